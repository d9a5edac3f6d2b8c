"""Compressor pooling of DeepSeek-V4.

A softmax per channel over a group's positions weights the values.
"""

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.compressor.spec import COMPRESSOR, CompressorInputs
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.layout.compressed import CompressedKeys

__all__ = ["CompressorInputs", "compress"]


def compress(
    values: torch.Tensor,
    scores: torch.Tensor,
    ape: torch.Tensor,
    keys: CompressedKeys,
    *,
    overlap: bool,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Pool every group of positions into one key.

    Args:
        values, scores: ``[tokens, c * d]`` of one dtype, last dim contiguous; ``c`` is 2 with
            overlap, else 1.
        ape: ``[ratio, c * d]`` fp32 (fp64), added to the scores by position.
        keys: the groups, from :func:`megatron_dsa.ops.layout.compressed.compressed_keys`.
        overlap: the first ``d`` channels pool the previous group's positions, the last ``d``
            channels this group's positions.

    Returns:
        ``[keys.count, d]`` in the dtype of values; 0 in empty slots. Differentiable in values,
        scores and ape, with bitwise repeatable gradients.

    Raises:
        ConfigError: shapes or dtypes do not fit, or keys are of another batch.
    """
    require(
        values.shape[:1] == (keys.pooled_tokens,),
        f"values must have the {keys.pooled_tokens} tokens that keys describe, got shape "
        f"{tuple(values.shape)}: make keys for the batch of these tensors",
    )
    inputs = CompressorInputs(
        values, scores, ape, keys.groups, keys.ratio, overlap, policy.workspace_bytes
    )
    inputs.check()
    call = describe_call(values.device, dtype=values.dtype, heads=1, qk_dim=inputs.dim, v_dim=0)
    return COMPRESSOR.run(call, policy, inputs)
