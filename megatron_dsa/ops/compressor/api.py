"""Compressor pooling of DeepSeek-V4's attention: a group of tokens becomes one key row.

Per channel a softmax over the positions of a group weighs their values. With overlap a group also
pools the positions of the group before it, through the other half of the channels. What follows in
the model (RMSNorm, rope at the group's position) is not part of the operation.
"""

from dataclasses import dataclass

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.compressor.declaration import COMPRESSOR
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.layout.compressed import CompressedKeys, Groups

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
    """Pool every group of positions into one row (DeepSeek-V4's compressor, before its norm).

    Args:
        values, scores: ``[rows, c * d]`` of one dtype; ``c`` is 2 with overlap, else 1.
        ape: ``[ratio, c * d]`` fp32 (fp64 for fp64 values), added to the scores by position.
        keys: the groups, from :func:`megatron_dsa.ops.layout.compressed.compressed_keys`.
        overlap: a group also pools the positions of the group before it, with the first ``d``
            channels; its own use the last ``d``.
        policy: which implementations may run.

    Returns:
        ``[keys.count, d]`` in the dtype of values; 0 in slots without a group. Differentiable in
        values, scores and ape; equal inputs give bitwise equal gradients.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, or keys of another batch.
    """
    require(
        values.shape[:1] == (keys.pooled_rows,),
        f"values must have the {keys.pooled_rows} tokens that keys describe, got shape "
        f"{tuple(values.shape)}: make keys for the batch of these tensors",
    )
    inputs = CompressorInputs(
        values, scores, ape, keys.groups, keys.ratio, overlap, policy.workspace_bytes
    )
    call = describe_call(values.device, dtype=values.dtype, heads=1, qk_dim=inputs.dim, v_dim=0)
    return COMPRESSOR.run(call, policy, inputs)


@dataclass(frozen=True)
class CompressorInputs:
    """Inputs of one pooling, as every implementation receives them; ``c = 2 if overlap else 1``.

    Group ``g`` pools its own rows ``first_row + i * row_step``, ``0 <= i < ratio``, and with
    overlap, if ``position[g] > 0``, the rows ``first_row + (i - ratio) * row_step`` of the previous
    group. Own rows use the *last* ``d`` channels of ``values`` and of ``scores + ape[i]``, rows of
    the previous group the *first* ``d``. A channel whose scores are all ``-inf`` and a slot without
    a group give 0. Rows that belong to no group are never read.

    Attributes:
        values: ``[rows, c * d]``, last dim contiguous.
        scores: ``[rows, c * d]``, dtype of values, last dim contiguous; without ``ape``.
        ape: ``[ratio, c * d]``, fp32 (fp64 for fp64 values): score of a position inside its group.
        groups: the rows of each of the ``G`` slots.
        ratio: positions of a group, at least 2.
        overlap: groups also pool the previous group.
        workspace_bytes: budget for temporary memory.
    """

    values: torch.Tensor
    scores: torch.Tensor
    ape: torch.Tensor
    groups: Groups
    ratio: int
    overlap: bool
    workspace_bytes: int

    @property
    def dim(self) -> int:
        """Channels ``d`` of a pooled row."""
        return self.values.shape[1] // (2 if self.overlap else 1)

    def __post_init__(self):
        values, scores, ape, groups = self.values, self.scores, self.ape, self.groups
        if self.ratio < 2:
            raise ConfigError(
                f"ratio must be at least 2, got {self.ratio}: pass the layer's ratio."
            )
        fix = "pass both halves of the compressor's projection"
        require_tensor("values", values, ("rows", "c * d"), FLOATS, fix=fix)
        require_tensor("scores", scores, tuple(values.shape), (values.dtype,), values, fix)
        if values.stride(1) != 1 or scores.stride(1) != 1:
            raise ConfigError(
                "the last dim of values and scores must be contiguous, got strides "
                f"{values.stride()} and {scores.stride()}: call .contiguous() on them."
            )
        if self.overlap and values.shape[1] % 2:
            raise ConfigError(
                "with overlap the width of values must be even (two halves of d channels), got "
                f"{values.shape[1]}: project to 2 * d channels."
            )
        shape, dtypes = (self.ratio, values.shape[1]), (accumulation_dtype(values.dtype),)
        require_tensor("ape", ape, shape, dtypes, values, "pass the ape of this layer's ratio")
        if groups.first_row.shape != groups.position.shape or groups.first_row.dim() != 1:
            raise ConfigError(
                "groups.first_row and groups.position must be 1-dimensional and of one length, got "
                f"{tuple(groups.first_row.shape)} and {tuple(groups.position.shape)}: give both "
                "one entry per slot."
            )
        if groups.row_step < 1 or groups.first_row.shape[0] % groups.row_step:
            raise ConfigError(
                "groups.row_step must be positive and divide the number of slots (every batch "
                f"element has equally many), got {groups.row_step} for "
                f"{groups.first_row.shape[0]} slots: pass the micro-batch size."
            )
