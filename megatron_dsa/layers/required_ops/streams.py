"""The operations of hyper-connections that a layer and the end of the model call."""

from typing import Any

from megatron_dsa.config.model import uses_streams
from megatron_dsa.layers.required_ops.calls import calls_of
from megatron_dsa.layers.required_ops.layers import RequiredOp
from megatron_dsa.ops.hyper_connections.spec import HEAD, READ, WRITE


def stream_ops(config: Any, device: str | None = None, head: bool = False) -> list[RequiredOp]:
    """Return what attention and MLP of a layer call for their streams; nothing without streams.

    Args:
        config, device: see :func:`.layers.required_ops.required_ops`.
        head: return what the end of the model calls instead.
    """
    if not uses_streams(config):
        return []
    call = calls_of(config, device).of(config.hc_mult, config.hidden_size)
    return [RequiredOp(each.name, call) for each in ((HEAD,) if head else (READ, WRITE))]
