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
class MetaDispatch:
    """A GPU that is not there, and what stands in for kernels on it.

    Attributes:
        capability: its compute capability; ``None`` stands for a CPU.
        run: called as ``run(operation, candidate, *args, **kwargs)`` in place of the candidate.
    """

    capability: tuple[int, int] | None
    run: Callable


_meta_dispatch: MetaDispatch | None = None


@contextlib.contextmanager
def meta_dispatch(fake: MetaDispatch) -> Iterator[None]:
    """Choose for that GPU and run the fake kernels, while it lasts (``tools.planner``)."""
    global _meta_dispatch
    before, _meta_dispatch = _meta_dispatch, fake
    try:
        yield
    finally:
        _meta_dispatch = before


def current_meta_dispatch() -> MetaDispatch | None:
    """Return what stands in for kernels now, ``None`` if they run."""
    return _meta_dispatch


def on_meta() -> bool:
    """Whether nothing is to be run on a GPU: kernels are chosen and not called."""
    return _meta_dispatch is not None


def describe_call(device: torch.device | str, **properties) -> OpCall:
    """Build a :class:`OpCall`, reading the compute capability off ``device``."""
    properties.setdefault("deterministic", deterministic_mode())
    if _meta_dispatch is not None:
        name = "cpu" if _meta_dispatch.capability is None else "cuda"
        return OpCall(device=name, capability=_meta_dispatch.capability, **properties)
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return OpCall(device=device.type, capability=capability, **properties)
