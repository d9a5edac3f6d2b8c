"""Causal attention to all visible keys: its operands and their description."""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import describe_call
from megatron_dsa.dispatch.support import OpCall
from megatron_dsa.numerics.checks import FLOATS, require_tensor


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise a :class:`ConfigError` unless shapes, dtypes and devices fit each other."""
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    fix = "repeat the heads of grouped queries' keys"
    require_tensor("k", k, tuple(q.shape), (q.dtype,), q, fix)
    require_tensor("v", v, (*q.shape[:2], "Dv"), (q.dtype,), q, fix)


def describe_dense_call(q: torch.Tensor, v_dim: int, packed: bool) -> OpCall:
    """Describe a call to dispatch."""
    return describe_call(
        q.device, dtype=q.dtype, heads=q.shape[1], qk_dim=q.shape[2], v_dim=v_dim, packed=packed
    )
