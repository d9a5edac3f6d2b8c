"""The device that a call is for: the real one, or a GPU that a plan stands in for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_dsa.dispatch.support import OpCall


def deterministic_mode() -> bool:
    """Whether torch's deterministic mode is in force, and not only for warnings."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


@dataclass(frozen=True)
class Rehearsal:
    """A GPU that is not there, and what stands in for kernels on it.

    Attributes:
        capability: its compute capability; ``None`` stands for a CPU.
        run: called as ``run(operation, candidate, *args, **kwargs)`` in place of the candidate.
    """

    capability: tuple[int, int] | None
    run: Callable


_rehearsal: Rehearsal | None = None


@contextlib.contextmanager
def rehearse(rehearsal: Rehearsal) -> Iterator[None]:
    """Choose for that GPU and run the stand-ins, while it lasts (``tools.planner``)."""
    global _rehearsal
    before, _rehearsal = _rehearsal, rehearsal
    try:
        yield
    finally:
        _rehearsal = before


def rehearsal() -> Rehearsal | None:
    """Return what stands in for kernels now, ``None`` if they run."""
    return _rehearsal


def rehearsing() -> bool:
    """Whether nothing is to be run on a GPU: kernels are chosen and not called."""
    return _rehearsal is not None


def describe_call(device: torch.device | str, **properties) -> OpCall:
    """Build a :class:`OpCall`, reading the compute capability off ``device``."""
    properties.setdefault("deterministic", deterministic_mode())
    if _rehearsal is not None:
        name = "cpu" if _rehearsal.capability is None else "cuda"
        return OpCall(device=name, capability=_rehearsal.capability, **properties)
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return OpCall(device=device.type, capability=capability, **properties)
