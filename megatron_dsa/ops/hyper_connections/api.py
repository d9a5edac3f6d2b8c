"""Hyper-connections of DeepSeek-V4 (mHC): residual streams that layers read, and write to.

A token has ``n`` streams of ``C`` channels in place of one residual. All of them, normalised
together, are projected to three sets of weights: ``pre`` (n) sums the layer's input, ``post`` (n)
adds its output to each stream, and ``comb`` (n x n, doubly stochastic by Sinkhorn's iterations)
mixes streams. A layer is

    ``u = sum_i pre_i x_i``, rounded; ``y = F(RMSNorm(u))``;
    ``x'_j = post_j y + sum_i comb[i, j] x_i``.

:func:`read_streams` is all before ``F``, :func:`write_streams` all after it, and
:func:`read_head` what ends the model: a read without ``post`` and ``comb``.

A read returns the streams for the write, so that the backward of the read adds the write's
gradient and its own two parts in one pass.
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
    """The layer's input, and the tensors of its write.

    Attributes:
        normed: ``[tokens, C]``, input of attention or of the MLP.
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
    """Read the streams: their weighted sum, normalised, and the weights of the write.

    Args:
        streams: ``[tokens, n, C]``.
        connection: its parameters, with ``n * (n + 2)`` rows of ``fn``.
        weight: ``[C]``, of the RMSNorm.
        policy: which implementations may run.

    Returns:
        All differentiable in the streams and the parameters. Equal inputs give bitwise equal
        gradients. The backward keeps the streams, and per token some ``n * n`` numbers.

    Raises:
        ConfigError: for shapes or dtypes outside of the above.
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
    """Mix the streams of the read, and add the output of attention or of the MLP.

    Args:
        output: ``[tokens, C]``, dtype of the streams.
        read: result of :func:`read_streams`; its ``normed`` is not used.
        policy: which implementations may run.

    Returns:
        ``[tokens, n, C]``, rounded once. Differentiable in all of the above.

    Raises:
        ConfigError: for shapes or dtypes outside of the above.
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

    Args:
        streams, weight, policy: see :func:`read_streams`.
        connection: its parameters, with ``n`` rows of ``fn``.

    Returns:
        ``[tokens, C]``, normalised. Differentiable in the streams and the parameters.

    Raises:
        ConfigError: for shapes or dtypes outside of the above.
    """
    inputs = ReadInputs(streams, connection, weight, policy.workspace_bytes)
    inputs.check(head=True)
    return HEAD.run(_describe(streams), policy, inputs)


def _describe(streams: torch.Tensor) -> OpCall:
    return describe_stream_call(streams.device, streams.dtype, *streams.shape[1:])


def describe_stream_call(device, dtype: torch.dtype, streams: int, channels: int) -> OpCall:
    """Describe a call: the streams stand for heads, the channels for their dims."""
    return describe_call(device, dtype=dtype, heads=streams, qk_dim=channels, v_dim=0)
