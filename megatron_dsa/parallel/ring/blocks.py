"""Attention to one block of keys and values: the implementations, and which of them runs.

All compute ``forward(q, k, v, causal, scale, sequences) -> out, lse`` and ``backward(dout, q, k, v,
out, lse, causal, scale, sequences) -> dq, dk, dv``, where ``out`` and ``lse`` of the backward are
those of the whole attention, not of the block. Rows that see no key give 0 and ``-inf``, and
gradients are 0 where nothing is seen. Dims are compared as they are: nobody pads before the choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_dsa import dispatch
from megatron_dsa.dispatch.support import Problem
from megatron_dsa.parallel.ring import (
    leaf_cudnn,
    leaf_flash2,
    leaf_flash3,
    leaf_torch,
    leaf_torch_flash,
)


@dataclass(frozen=True)
class Leaf:
    """One implementation of attention to a block.

    Attributes:
        name: short name.
        fused: whether it is a fused kernel.
        pads_values: whether it pads values to the key's width.
        reason: why it cannot run a problem, or ``None``.
        forward, backward: see the module.
    """

    name: str
    fused: bool
    pads_values: bool
    reason: Callable[[Problem], str | None]
    forward: Callable
    backward: Callable


def _leaf(name: str, module, fused: bool = True, pads_values: bool = False) -> Leaf:
    return Leaf(name, fused, pads_values, module.reason, module.forward, module.backward)


#: In the order in which they are tried: those that take keys wider than values as they are first.
LEAVES = (
    _leaf("flash3", leaf_flash3),
    _leaf("torch-cudnn", leaf_cudnn),
    _leaf("flash2", leaf_flash2, pads_values=True),
    _leaf("torch-flash", leaf_torch_flash, pads_values=True),
    _leaf("torch", leaf_torch, fused=False),
)


_BY_NAME = {leaf.name: leaf for leaf in LEAVES}


def choose(problem: Problem, name: str | None = None) -> Leaf:
    """Return the leaf that dispatch chooses for ``problem``, or the one of that name.

    Raises:
        ConfigError: there is no leaf of that name.
        ImplementationError: it cannot run the problem.
    """
    policy = dispatch.Policy(named=(("ring_attention", name),))
    return _BY_NAME[dispatch.choose("ring_attention", problem, policy).candidate.name]


def leaf_with(name: str, workspace_bytes: int) -> Leaf:
    """Return the leaf of that name, with a budget for temporary memory if it needs much."""
    return torch_leaf(workspace_bytes) if name == "torch" else _BY_NAME[name]


def torch_leaf(workspace_bytes: int) -> Leaf:
    """The torch leaf with another budget for temporary memory."""
    given = {"workspace_bytes": workspace_bytes}
    forward, backward = (partial(f, **given) for f in (leaf_torch.forward, leaf_torch.backward))
    return Leaf("torch", False, False, leaf_torch.reason, forward, backward)
