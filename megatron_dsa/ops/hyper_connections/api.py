"""Hyper-connections of DeepSeek-V4 (mHC).

A token has ``n`` residual streams of ``C`` channels. Normalised together, the streams are projected
to weights: ``pre`` (n) sums streams to the layer's input, ``post`` (n) adds its output to each
stream, and ``comb`` (n x n, doubly stochastic by Sinkhorn iterations) mixes streams:

    ``u = sum_i pre_i x_i``, rounded; ``y = F(RMSNorm(u))``;
    ``x'_j = post_j y + sum_i comb[i, j] x_i``.

A read computes everything before ``F``, a write everything after; the head is a read with only
``pre``. A read also returns the streams, so that its backward adds all their gradients in one pass.
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
    """Result of :func:`read_streams`.

    Attributes:
        normed: ``[tokens, C]``, input of attention or MLP.
        streams: ``[tokens, n, C]``, unchanged.
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
    """Compute a layer's input and the weights of :func:`write_streams`.

    Args:
        streams: ``[tokens, n, C]``.
        connection: parameters, with ``n * (n + 2)`` outputs of ``fn``.
        weight: ``[C]``, weight of the RMSNorm.

    Returns:
        Tensors that are differentiable in streams and parameters, with bitwise repeatable
        gradients.

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
    """Mix the streams and add the output of attention or MLP.

    Args:
        output: ``[tokens, C]`` in the dtype of the streams.
        read: result of :func:`read_streams`.

    Returns:
        ``[tokens, n, C]``, rounded once, differentiable in all inputs.

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
    """Reduce the streams to the model's normalised output.

    Arguments and errors are as in :func:`read_streams`, but ``fn`` has ``n`` outputs.

    Returns:
        ``[tokens, C]``, normalised, differentiable in the streams and the parameters.
    """
    inputs = ReadInputs(streams, connection, weight, policy.workspace_bytes)
    inputs.check(head=True)
    return HEAD.run(_describe(streams), policy, inputs)


def _describe(streams: torch.Tensor) -> OpCall:
    return describe_stream_call(streams.device, streams.dtype, *streams.shape[1:])


def describe_stream_call(device, dtype: torch.dtype, streams: int, channels: int) -> OpCall:
    return describe_call(device, dtype=dtype, heads=streams, qk_dim=channels, v_dim=0)
