"""Hyper-connections of DeepSeek-V4 (mHC).

A token has ``n`` residual streams of ``C`` channels. All of them, normalised together, are
projected to ``pre`` (n), which sums the layer's input, ``post`` (n), which adds its output to each
stream, and ``comb`` (n x n, doubly stochastic by Sinkhorn iterations), which mixes streams:

    ``u = sum_i pre_i x_i``, rounded; ``y = F(RMSNorm(u))``;
    ``x'_j = post_j y + sum_i comb[i, j] x_i``.

A read computes everything before ``F``, a write everything after it; the head is a read with only
``pre``. A read returns the streams, so that the write's backward adds all their gradients in one
pass.
"""

from typing import NamedTuple

import torch

from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.hyper_connections.spec import (
    HEAD,
    READ,
    WRITE,
    Connection,
    ReadInputs,
    WriteInputs,
)

__all__ = ["Connection", "StreamsRead", "read_head", "read_streams", "write_streams"]


class StreamsRead(NamedTuple):
    """Input of a layer, and the tensors of its write.

    Attributes:
        normed: ``[tokens, C]``, input of attention or MLP.
        streams: ``[tokens, n, C]``, as read.
        post: ``[tokens, n]`` fp32.
        comb: ``[tokens, n, n]`` fp32.
    """

    normed: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def read_streams(
    streams: torch.Tensor,
    connection: Connection,
    weight: torch.Tensor,
    *,
    policy: Policy = Policy(),
) -> StreamsRead:
    """Compute the layer's input, and the weights of the write.

    Args:
        streams: ``[tokens, n, C]``.
        connection: with ``n * (n + 2)`` outputs of ``fn``.
        weight: ``[C]``, of the RMSNorm.

    Returns:
        Differentiable in the streams and the parameters, with bitwise repeatable gradients. Keeps
        the streams, and about ``n * n`` numbers per token.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    inputs = ReadInputs(streams, connection, weight, policy.workspace_bytes)
    inputs.check(head=False)
    return StreamsRead(*READ.run(_describe(streams), policy, inputs))


def write_streams(
    output: torch.Tensor,
    read: StreamsRead,
    *,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Mix the streams of the read, and add the output of attention or MLP.

    Args:
        output: ``[tokens, C]``, dtype of the streams.
        read: result of :func:`read_streams`; its ``normed`` is not used.

    Returns:
        ``[tokens, n, C]``, rounded once, differentiable in all of the above.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    inputs = WriteInputs(output, *read[1:], policy.workspace_bytes)
    inputs.check()
    return WRITE.run(_describe(read.streams), policy, inputs)


def read_head(
    streams: torch.Tensor,
    connection: Connection,
    weight: torch.Tensor,
    *,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Read the streams at the end of the model.

    Arguments as in :func:`read_streams`, but with ``n`` outputs of ``fn``.

    Returns:
        ``[tokens, C]``, normalised, differentiable in the streams and the parameters.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    inputs = ReadInputs(streams, connection, weight, policy.workspace_bytes)
    inputs.check(head=True)
    return HEAD.run(_describe(streams), policy, inputs)


def _describe(streams: torch.Tensor) -> OpCall:
    return describe_stream_call(streams.device, streams.dtype, *streams.shape[1:])


def describe_stream_call(device, dtype: torch.dtype, streams: int, channels: int) -> OpCall:
    """Describe a call: streams stand for heads, channels for dims."""
    return describe_call(device, dtype=dtype, heads=streams, qk_dim=channels, v_dim=0)
