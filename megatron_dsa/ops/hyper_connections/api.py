"""Hyper-connections of DeepSeek-V4 (mHC): residual streams that layers read, and write to.

A token has ``n`` streams of ``C`` channels in place of one residual. All of them, normalised
together, are projected to three sets of weights: ``pre`` (n) for what the layer reads, ``post`` (n)
for how much of its output is added to each stream, and ``comb`` (n x n, made doubly stochastic by
Sinkhorn's iterations) for how streams are mixed. A layer is

    ``u = sum_i pre_i x_i``, rounded; ``y = F(RMSNorm(u))``;
    ``x'_j = post_j y + sum_i comb[i, j] x_i``.

:func:`read_streams` is all before ``F``, :func:`write_streams` all after it, and
:func:`read_head` what ends the model: a read without ``post`` and ``comb``.

A read hands the streams on, and the write takes them from there. So the gradient that the write has
for them enters the backward of the read, which adds its own two parts in the same pass.
"""

from typing import NamedTuple

import torch

from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.hyper_connections.declaration import HEAD, READ, WRITE
from megatron_dsa.ops.hyper_connections.inputs import Connection, ReadInputs, WriteInputs

__all__ = ["Connection", "StreamsRead", "read_head", "read_streams", "write_streams"]


class StreamsRead(NamedTuple):
    """What a layer reads, and what its write needs.

    Attributes:
        normed: ``[tokens, C]``, input of attention or of the MLP.
        streams: ``[tokens, n, C]``, those that were read.
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
        gradients. Kept for the backward are the streams, and per token some ``n * n`` numbers.

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
    """Mix the streams that were read, and add the output of attention or of the MLP.

    Args:
        output: ``[tokens, C]``, dtype of the streams.
        read: what :func:`read_streams` returned; its ``normed`` is not used.
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
        streams, weight, policy: as of :func:`read_streams`.
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
