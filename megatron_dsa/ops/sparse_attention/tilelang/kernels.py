"""Choice among our own kernels: Hopper's (wgmma) on Hopper, the portable ones elsewhere."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum

import torch

#: TileLang's targets, per compute capability.
TARGETS = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}


class Way(Enum):
    """Kernels of a backward. They determine the column order of the key gradient in its buffer."""

    #: One kernel, columns in order.
    PORTABLE = "portable"
    #: One kernel for Hopper, columns in the order of fragments.
    ONE = "one kernel"
    #: Two kernels for Hopper, query_gradient, then key_gradient. More heads than a tile has
    #: add to dKV once instead of once per tile. Columns in the order of transposed fragments;
    #: integers in order, so that neighbouring threads add to neighbours.
    TWO = "two kernels"


@dataclass(frozen=True)
class Kernels:
    """The kernels for one GPU, compiled at first use, with the arguments of their ``build``.

    Attributes:
        target: of the compilation.
        tiles: target whose tiling the portable kernels have; ``None``: the kernels are Hopper's.
    """

    target: str
    tiles: str | None

    def way(self, heads: int, fixed_point: bool) -> Way:
        if self.tiles is not None:
            return Way.PORTABLE
        return Way.TWO if heads > (32 if fixed_point else 64) else Way.ONE

    def compiled(self, part: str, *arguments):
        """Return the kernel of the module ``part``, e.g. ``forward``."""
        folder, options = "hopper", {}
        if self.tiles is not None:
            folder, options = "portable", {"tiles": self.tiles}
        return _module(f"{folder}.{part}").compiled(*arguments, target=self.target, **options)

    def unions(self, *arguments):
        return _module("hopper.unions").compiled(*arguments, target=self.target)

    def rows(self, part: str) -> int:
        """Return the rows of a tile of the kernel ``forward`` or ``backward``."""
        if self.tiles is None:
            return importlib.import_module("megatron_dsa.ops.hopper.tiles").TILE
        tiles = _module("portable.tiles")
        return tiles.tiling_of(getattr(tiles, part.upper()), self.tiles).rows


def _module(name: str):
    """Import a module that needs TileLang."""
    return importlib.import_module(f"{__package__}.{name}")


def kernels_for(device: torch.device, tiles: str | None = None) -> Kernels:
    """Return the kernels for ``device``; with ``tiles`` the portable ones with that tiling.

    The tiles of a GPU with less shared memory also run on one with more, for tests.
    """
    target = "sm_90a"
    if device.type == "cuda":
        target = TARGETS[torch.cuda.get_device_capability(device)]
    return Kernels(target, tiles if tiles or target == "sm_90a" else target)
