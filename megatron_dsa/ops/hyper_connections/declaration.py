"""Hyper-connections: the operations and what implements them."""

from typing import Any

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON
from megatron_dsa.ops.dispatch.support import HALF, OpCall

_HERE = __package__

#: Streams of the Triton kernels, whose tiles hold all of them.
STREAMS = (2, 4)
#: Most channels: programs of the mix hold all channels of a token in registers.
MOST_CHANNELS = 16384


def _why_not_triton(call: OpCall) -> str | None:
    if call.heads not in STREAMS:
        return f"takes {', '.join(map(str, STREAMS))} streams, got {call.heads}"
    if call.qk_dim > MOST_CHANNELS:
        return f"takes up to {MOST_CHANNELS} channels, got {call.qk_dim}"
    return None


_TRITON: dict[str, Any] = PORTABLE | {
    "package": TRITON,
    "dtypes": (*HALF, torch.float32),
    "probe": _why_not_triton,
}


def _operation(name: str, title: str) -> Operation:
    return Operation(
        f"hyper_connection_{name}",
        title,
        (
            Candidate(
                "triton",
                f"{_HERE}.triton.launch:{name}",
                Support(covers="2 or 4 streams; all gradients", **_TRITON),
            ),
            Candidate("torch", f"{_HERE}.torch:{name}", Support(covers="any shape"), fused=False),
        ),
        meta=f"{_HERE}.meta:{name}",
    )


READ = _operation("read", "weights of a hyper-connection, mix and norm, forward and backward")
WRITE = _operation("write", "write-back of a hyper-connection, forward and backward")
HEAD = _operation("head", "last mix of the streams and norm, forward and backward")
