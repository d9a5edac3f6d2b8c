"""Hyper-connections as registered operations (:mod:`megatron_dsa.ops.hyper_connections.api`)."""

import torch
from torch import Tensor

from megatron_dsa.extras.torch_library.registration import (
    derivatives,
    empty_like,
    policy_of,
    policy_text,
    registered,
)
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.hyper_connections import api
from megatron_dsa.ops.hyper_connections.api import Connection, StreamsRead


def read_streams(
    streams: Tensor, connection: Connection, weight: Tensor, *, policy: Policy = Policy()
) -> StreamsRead:
    """Read as :func:`megatron_dsa.ops.hyper_connections.api.read_streams`.

    ``streams`` of the result is the argument itself. In 16 bits the gradient that a write has for
    it is therefore added after rounding; the eager function rounds the sum once.
    """
    c = connection
    normed, post, comb = _read(
        streams, c.fn, c.base, c.scale, weight, c.eps, c.norm_eps, c.iterations,
        policy_text(policy),
    )  # fmt: skip
    return StreamsRead(normed, streams, post, comb)


def read_head(
    streams: Tensor, connection: Connection, weight: Tensor, *, policy: Policy = Policy()
) -> Tensor:
    """Read as :func:`megatron_dsa.ops.hyper_connections.api.read_head`."""
    c = connection
    return _head(
        streams, c.fn, c.base, c.scale, weight, c.eps, c.norm_eps, c.iterations,
        policy_text(policy),
    )  # fmt: skip


def write_streams(output: Tensor, read: StreamsRead, *, policy: Policy = Policy()) -> Tensor:
    """Write as :func:`megatron_dsa.ops.hyper_connections.api.write_streams`."""
    return _write(output, read.streams, read.post, read.comb, policy_text(policy))


@registered("read_streams")
def _read(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float,
    norm_eps: float, iterations: int, policy: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    connection = Connection(fn, base, scale, eps, norm_eps, iterations)
    read = api.read_streams(streams, connection, weight, policy=policy_of(policy))
    return read.normed, read.post, read.comb


@registered("read_head")
def _head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor, eps: float,
    norm_eps: float, iterations: int, policy: str = "",
) -> Tensor:  # fmt: skip
    connection = Connection(fn, base, scale, eps, norm_eps, iterations)
    return api.read_head(streams, connection, weight, policy=policy_of(policy))


@registered("read_streams_backward")
def _read_backward(
    dnormed: Tensor, dpost: Tensor | None, dcomb: Tensor | None, streams: Tensor, fn: Tensor,
    base: Tensor, scale: Tensor, weight: Tensor, eps: float, norm_eps: float, iterations: int,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    asked = policy_of(policy)

    def run(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor):
        connection = Connection(fn, base, scale, eps, norm_eps, iterations)
        if dpost is None:
            return [api.read_head(streams, connection, weight, policy=asked)]
        read = api.read_streams(streams, connection, weight, policy=asked)
        return read.normed, read.post, read.comb

    gradients = [dnormed] if dpost is None or dcomb is None else [dnormed, dpost, dcomb]
    found = derivatives(run, (streams, fn, base, scale, weight), gradients)[1]
    dx, dfn, dbase, dscale, dweight = found
    # Triton's launch cuts base and scale from one sum, and results of an operation share no memory.
    return dx, dfn, dbase, dscale.clone(), dweight


@_read_backward.register_fake
def _(dnormed, dpost, dcomb, streams, fn, base, scale, weight, *_settings):
    return tuple(map(empty_like, (streams, fn, base, scale, weight)))


def _keep_read(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


@once_differentiable
def _differentiate_read(ctx, dnormed, dpost, dcomb):
    found = _read_backward(dnormed, dpost, dcomb, *ctx.saved_tensors, *ctx.rest)
    return *found, *(None,) * 4


@once_differentiable
def _differentiate_head(ctx, dnormed):
    found = _read_backward(dnormed, None, None, *ctx.saved_tensors, *ctx.rest)
    return *found, *(None,) * 4


@registered("write_streams")
def _write(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, policy: str = "") -> Tensor:
    # A write does not look at what was read.
    read = StreamsRead(output, streams, post, comb)
    return api.write_streams(output, read, policy=policy_of(policy))


@registered("write_streams_backward")
def _write_backward(
    dout: Tensor, output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, policy: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    asked = policy_of(policy)

    def run(output: Tensor, *read: Tensor) -> list[Tensor]:
        return [api.write_streams(output, StreamsRead(output, *read), policy=asked)]

    found = derivatives(run, (output, streams, post, comb), [dout])[1]
    doutput, dstreams, dpost, dcomb = found
    return doutput, dstreams, dpost, dcomb


@_write_backward.register_fake
def _(dout, output, streams, post, comb, *_settings):
    return tuple(map(empty_like, (output, streams, post, comb)))


def _keep_write(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.policy = inputs[4]


@once_differentiable
def _differentiate_write(ctx, dout):
    return *_write_backward(dout, *ctx.saved_tensors, ctx.policy), None


torch.library.register_autograd(
    "megatron_dsa::read_streams", _differentiate_read, setup_context=_keep_read
)
torch.library.register_autograd(
    "megatron_dsa::read_head", _differentiate_head, setup_context=_keep_read
)
torch.library.register_autograd(
    "megatron_dsa::write_streams", _differentiate_write, setup_context=_keep_write
)
