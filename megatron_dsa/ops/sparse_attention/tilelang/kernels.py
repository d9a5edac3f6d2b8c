"""Which of our own kernels a GPU runs: Hopper's (wgmma) there, the portable ones elsewhere."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

#: What TileLang compiles for, per compute capability.
TARGETS = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a"}


@dataclass(frozen=True)
class Kernels:
    """The kernels for one GPU, compiled when they are first asked for.

    Attributes:
        target: what they are compiled for.
        tiles: target whose tiling the portable kernels have; ``None``: the kernels are Hopper's.
    """

    target: str
    tiles: str | None

    def forward(self, *arguments):
        """Return the forward compiled for what :func:`.hopper.forward.build` takes."""
        return self._compiled("forward", arguments)

    def backward(self, *arguments):
        """Return the backward compiled for what :func:`.hopper.backward.build` takes."""
        return self._compiled("backward", arguments)

    def in_two(self, heads: int, fixed_point: bool) -> bool:
        """Whether the backward is two kernels: dQ with P and dS, then dKV from these.

        More heads than a tile has then add to dKV once instead of once per tile; and 64-bit
        integers are added so that neighbouring threads add to neighbours.
        """
        return self.tiles is None and heads > (32 if fixed_point else 64)

    def query_gradient(self, *arguments):
        """Return the first of the two compiled for :func:`.hopper.query_gradient.build`'s."""
        return self._compiled("query_gradient", arguments)

    def key_gradient(self, *arguments):
        """Return the second of the two compiled for :func:`.hopper.key_gradient.build`'s."""
        return self._compiled("key_gradient", arguments)

    def unions(self, *arguments):
        """Return what :func:`.hopper.unions.build` describes, compiled for its arguments."""
        unions = importlib.import_module(f"{__package__}.hopper.unions")
        return unions.compiled(*arguments, self.target)

    def forward_rows(self) -> int:
        """Rows of a tile of the forward."""
        return self._rows("FORWARD")

    def backward_rows(self) -> int:
        """Rows of a tile of the backward."""
        return self._rows("BACKWARD")

    def _compiled(self, part: str, arguments: tuple):
        folder, options = "hopper", {}
        if self.tiles is not None:
            folder, options = "portable", {"tiles": self.tiles}
        module = importlib.import_module(f"{__package__}.{folder}.{part}")
        return module.compiled(*arguments, target=self.target, **options)

    def _rows(self, table: str) -> int:
        if self.tiles is None:
            return importlib.import_module("megatron_dsa.ops.hopper.tiles").TILE
        tiles = importlib.import_module(f"{__package__}.portable.tiles")
        return tiles.tiling_of(getattr(tiles, table), self.tiles).rows


def target_of(device: torch.device) -> str:
    """Return what TileLang compiles for on ``device``."""
    if device.type != "cuda":
        return "sm_90a"
    return TARGETS[torch.cuda.get_device_capability(device)]


def kernels_for(device: torch.device, tiles: str | None = None) -> Kernels:
    """Return what runs on ``device``; ``tiles`` asks for the portable kernels with that tiling.

    The tiles of a GPU with less shared memory also run on one with more, so that tests reach them.
    """
    target = target_of(device)
    return Kernels(target, tiles if tiles or target == "sm_90a" else target)
