"""Bytes that ranks send: counting rules, and bytes counted at the collectives.

A byte counts where it leaves a rank, as in a ring: of ``P`` ranks, each sends its part of an
all-gather ``P - 1`` times, as much for a reduce-scatter, and twice ``(P - 1) / P`` of an
all-reduce. Counting and formula (:mod:`benchmarks.ranks.design`) share these rules, so that
differences come from missing, additional or differently sized collectives.
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


def gather(part: float, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-gather of ``part`` bytes per rank."""
    return (ranks - 1) * part


#: A reduce-scatter sends as much, with ``part`` the bytes of one rank's result.
reduce = gather


def exchange(whole: float, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-to-all of ``whole`` bytes: all but its
    own part.
    """
    return (ranks - 1) * whole / ranks


def leaving(whole: float, splits: list[int], given: dict) -> float:
    """Return the bytes that a rank sends in an all-to-all of parts of different sizes."""
    own = splits[torch.distributed.get_rank(given.get("group"))]
    return whole * (1 - own / sum(splits)) if own else whole


def sum_everywhere(whole: float, ranks: int) -> float:
    """Return the bytes that a rank sends in an all-reduce of ``whole`` bytes."""
    return 2 * (ranks - 1) * whole / ranks


@dataclass
class Traffic:
    """Collectives of this rank: name and bytes sent, in order."""

    calls: list[tuple[str, float]] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        return sum(sent for _, sent in self.calls)


#: Collective -> the argument whose size counts, and the rule.
COLLECTIVES = {
    "all_gather_into_tensor": ("input_tensor", gather),
    "reduce_scatter_tensor": ("output", reduce),
    "all_to_all_single": ("input", exchange),
    "all_reduce": ("tensor", sum_everywhere),
}


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count bytes sent by torch's collectives, from any thread, in the context."""
    traffic = Traffic()
    with contextlib.ExitStack() as stack:
        for name, rule in COLLECTIVES.items():
            original = getattr(torch.distributed, name)
            counting = _counting(original, name, *rule, traffic)
            stack.enter_context(replaced(original, counting))
        yield traffic


@contextlib.contextmanager
def replaced(original, other) -> Iterator[None]:
    """Replace all references to a collective in torch.distributed, Megatron and this package.

    Megatron binds some of them on import.
    """
    bound = [
        (module, alias)
        for name, module in list(sys.modules.items())
        if name.startswith(("torch.distributed", "megatron"))
        for alias, value in list(vars(module).items())
        if value is original
    ]
    for module, alias in bound:
        setattr(module, alias, other)
    try:
        yield
    finally:
        for module, alias in bound:
            setattr(module, alias, original)


def _counting(original, name: str, counts: str, rule, traffic: Traffic):
    inside = threading.local()

    def collective(*args, **kwargs):
        # Under a torch function mode a collective calls itself again, by its (new) name.
        if getattr(inside, "yes", False):
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        tensor, ranks = given[counts], torch.distributed.get_world_size(given.get("group"))
        if ranks > 1:
            size = tensor.numel() * tensor.element_size()
            splits = given.get("input_split_sizes")
            traffic.calls.append(
                (name, rule(size, ranks) if splits is None else leaving(size, splits, given))
            )
        inside.yes = True
        try:
            return original(*args, **kwargs)
        finally:
            inside.yes = False

    return collective
