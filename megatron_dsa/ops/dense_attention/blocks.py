"""Attention to one block of keys and values: the implementations, and which of them runs.

All compute ``forward(q, k, v, causal, scale, sequences) -> out, lse`` and ``backward(dout, q, k, v,
out, lse, causal, scale, sequences) -> dq, dk, dv``. ``out`` and ``lse`` of the backward are those
of the whole attention, not of the block. Queries without keys give 0 and ``-inf``, and gradients
are 0 where nothing is seen. Head dims are compared before a kernel pads anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_dsa.dispatch import OpCall, Policy
from megatron_dsa.ops.dense_attention import flash2, torch_cudnn, torch_flash
from megatron_dsa.ops.dense_attention import torch as torch_block
from megatron_dsa.ops.dense_attention.declaration import DENSE_ATTENTION


@dataclass(frozen=True)
class BlockAttention:
    """One implementation of attention to a block.

    Attributes:
        name: short name.
        fused: whether it is a fused kernel.
        pads_values: whether it pads values to the key's width.
        reason: why it cannot run a call, or ``None``.
        forward, backward: see the module.
    """

    name: str
    fused: bool
    pads_values: bool
    reason: Callable[[OpCall], str | None]
    forward: Callable
    backward: Callable


def _kernel(name: str, module, fused: bool = True, pads_values: bool = False) -> BlockAttention:
    return BlockAttention(name, fused, pads_values, module.reason, module.forward, module.backward)


#: In the order in which they are tried: kernels for keys wider than values come first.
BLOCK_KERNELS = (
    _kernel("torch-cudnn", torch_cudnn),
    _kernel("flash2", flash2, pads_values=True),
    _kernel("torch-flash", torch_flash, pads_values=True),
    _kernel("torch", torch_block, fused=False),
)


_BY_NAME = {kernel.name: kernel for kernel in BLOCK_KERNELS}


def choose(call: OpCall, name: str | None = None) -> BlockAttention:
    """Return the kernel that dispatch chooses for ``call``, or the one of that name.

    Raises:
        ConfigError: there is no kernel of that name.
        ImplementationError: it cannot run the call.
    """
    policy = Policy() if name is None else Policy(named=((DENSE_ATTENTION.name, name),))
    return _BY_NAME[DENSE_ATTENTION.choose(call, policy).candidate.name]


def block_kernel(name: str, workspace_bytes: int) -> BlockAttention:
    """Return the kernel of that name, with a budget for temporary memory if it needs much."""
    return torch_kernel(workspace_bytes) if name == "torch" else _BY_NAME[name]


def torch_kernel(workspace_bytes: int) -> BlockAttention:
    """Return torch's with another budget for temporary memory."""
    given: dict[str, Any] = {"workspace_bytes": workspace_bytes}
    forward, backward = (partial(f, **given) for f in (torch_block.forward, torch_block.backward))
    return BlockAttention("torch", False, False, torch_block.reason, forward, backward)


def _attend_with(name: str) -> Callable:
    def attend(attention: Callable, workspace_bytes: int, *args, **options):
        return attention(*args, block=block_kernel(name, workspace_bytes), **options)

    return attend


#: What the operation ``dense_attention`` runs: ``attention(..., block=kernel)`` with this kernel.
with_torch_cudnn = _attend_with("torch-cudnn")
with_flash2 = _attend_with("flash2")
with_torch_flash = _attend_with("torch-flash")
with_torch = _attend_with("torch")
