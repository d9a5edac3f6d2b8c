"""Hyper-connections as registered operations (:mod:`megatron_dsa.ops.hyper_connections.api`)."""

from torch import Tensor

from megatron_dsa.extras.torch_library.registration import (
    derivatives,
    like,
    policy_of,
    policy_text,
    register_backward,
    registered,
)
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.hyper_connections import api
from megatron_dsa.ops.hyper_connections.api import Connection, StreamsRead


def read_streams(
    streams: Tensor, connection: Connection, weight: Tensor, *, policy: Policy = Policy()
) -> StreamsRead:
    """Read streams, see :func:`megatron_dsa.ops.hyper_connections.api.read_streams`.

    The result's ``streams`` is the argument itself, so in 16 bits a write's gradient is added after
    rounding; the eager function rounds the sum once.
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
    """Read streams for the head; see :func:`megatron_dsa.ops.hyper_connections.api.read_head`."""
    c = connection
    return _head(
        streams, c.fn, c.base, c.scale, weight, c.eps, c.norm_eps, c.iterations,
        policy_text(policy),
    )  # fmt: skip


def write_streams(output: Tensor, read: StreamsRead, *, policy: Policy = Policy()) -> Tensor:
    """Write streams, see :func:`megatron_dsa.ops.hyper_connections.api.write_streams`."""
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


_READ, _WRITTEN = (
    ("streams", "fn", "base", "scale", "weight"),
    ("output", "streams", "post", "comb"),
)


@registered("read_streams_backward", like(*_READ))
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
    # dbase and dscale are views of one tensor; results must not alias.
    return dx, dfn, dbase, dscale.clone(), dweight


@registered("write_streams")
def _write(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, policy: str = "") -> Tensor:
    # write_streams ignores ``normed``.
    read = StreamsRead(output, streams, post, comb)
    return api.write_streams(output, read, policy=policy_of(policy))


@registered("write_streams_backward", like(*_WRITTEN))
def _write_backward(
    dout: Tensor, output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, policy: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    asked = policy_of(policy)

    def run(output: Tensor, *read: Tensor) -> list[Tensor]:
        return [api.write_streams(output, StreamsRead(output, *read), policy=asked)]

    found = derivatives(run, (output, streams, post, comb), [dout])[1]
    doutput, dstreams, dpost, dcomb = found
    return doutput, dstreams, dpost, dcomb


register_backward("read_streams", _read, _read_backward, of=_READ)
register_backward("read_head", _head, _read_backward, of=_READ)
register_backward("write_streams", _write, _write_backward, of=_WRITTEN)
