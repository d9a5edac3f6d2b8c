"""Attention to one block of keys and values: the implementations, and which of them runs.

All compute ``forward(q, k, v, causal, scale, sequences) -> out, lse`` and ``backward(dout, q, k, v,
out, lse, causal, scale, sequences) -> dq, dk, dv``. ``out`` and ``lse`` of the backward are those
of the whole attention, not of the block. Queries without keys give 0 and ``-inf``, and gradients
are 0 where nothing is seen. Head dims are compared before a kernel pads anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_dsa.ops.dense_attention import flash2, flash4, torch_cudnn, torch_flash
from megatron_dsa.ops.dense_attention import torch as torch_block
from megatron_dsa.ops.dense_attention.declaration import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import OpCall, Policy


@dataclass(frozen=True)
class BlockAttention:
    """One implementation of attention to a block.

    Attributes:
        name: the name of the candidate.
        forward, backward: see the module.
    """

    name: str
    forward: Callable
    backward: Callable


_MODULES = {
    "torch-cudnn": torch_cudnn,
    "flash2": flash2,
    "torch-flash": torch_flash,
    "flash4": flash4,
    "torch": torch_block,
}
#: By the name of the candidate.
BLOCK_KERNELS = {
    name: BlockAttention(name, module.forward, module.backward) for name, module in _MODULES.items()
}


def choose(call: OpCall, name: str | None = None) -> BlockAttention:
    """Return the kernel that dispatch chooses for ``call``, or the one of that name.

    Raises:
        ConfigError: there is no kernel of that name.
        ImplementationError: it cannot run the call.
    """
    policy = Policy() if name is None else Policy(named=((DENSE_ATTENTION.name, name),))
    return BLOCK_KERNELS[DENSE_ATTENTION.choose(call, policy).candidate.name]


def block_kernel(name: str, workspace_bytes: int) -> BlockAttention:
    """Return the kernel of that name, with a budget for temporary memory if it needs much."""
    return torch_kernel(workspace_bytes) if name == "torch" else BLOCK_KERNELS[name]


def torch_kernel(workspace_bytes: int) -> BlockAttention:
    """Return torch's with another budget for temporary memory."""
    given: dict[str, Any] = {"workspace_bytes": workspace_bytes}
    forward, backward = (partial(f, **given) for f in (torch_block.forward, torch_block.backward))
    return BlockAttention("torch", forward, backward)


def _attend_with(name: str) -> Callable:
    def attend(attention: Callable, workspace_bytes: int, *args, **options):
        return attention(*args, block=block_kernel(name, workspace_bytes), **options)

    return attend


#: What the operation ``dense_attention`` runs: ``attention(..., block=kernel)`` with this kernel.
with_torch_cudnn = _attend_with("torch-cudnn")
with_flash2 = _attend_with("flash2")
with_torch_flash = _attend_with("torch-flash")
with_flash4 = _attend_with("flash4")
with_torch = _attend_with("torch")
