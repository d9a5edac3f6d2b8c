"""Choice of TileLang kernels per GPU: wgmma on Hopper, portable kernels elsewhere."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import Enum

import torch

TARGETS = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}


class Way(Enum):
    """Choice of backward kernels, which sets the column order of dKV."""

    PORTABLE = "portable"
    #: One Hopper kernel writes dKV in fragment order.
    ONE = "one kernel"
    #: Of two Hopper kernels, the second adds to dKV once for all head tiles: fp32 in transposed
    #: fragment order, integers in column order.
    TWO = "two kernels"


@dataclass(frozen=True)
class Kernels:
    """Kernels for one GPU; ``tiles`` names a portable tiling, ``None`` selects Hopper's kernels."""

    target: str
    tiles: str | None

    def way(self, heads: int, fixed_point: bool) -> Way:
        if self.tiles is not None:
            return Way.PORTABLE
        return Way.TWO if heads > (32 if fixed_point else 64) else Way.ONE

    def compiled(self, part: str, *arguments):
        folder, options = "hopper", {}
        if self.tiles is not None:
            folder, options = "portable", {"tiles": self.tiles}
        return _module(f"{folder}.{part}").compiled(*arguments, target=self.target, **options)

    def unions(self, *arguments):
        return _module("hopper.unions").compiled(*arguments, target=self.target)

    def rows(self, part: str) -> int:
        if self.tiles is None:
            return importlib.import_module("megatron_dsa.ops.hopper.tiles").TILE
        tiles = _module("portable.tiles")
        return tiles.tiling_of(getattr(tiles, part.upper()), self.tiles).rows


def _module(name: str):
    return importlib.import_module(f"{__package__}.{name}")


def kernels_for(device: torch.device, tiles: str | None = None) -> Kernels:
    target = "sm_90a"
    if device.type == "cuda":
        target = TARGETS[torch.cuda.get_device_capability(device)]
    return Kernels(target, tiles if tiles or target == "sm_90a" else target)
