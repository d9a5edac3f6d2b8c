"""Slices of full tensors that a rank of a parallel model holds."""

import re
from dataclasses import dataclass

import torch

from megatron_dsa.errors import require
from megatron_dsa.extras.huggingface.names import Entry, Split


@dataclass(frozen=True)
class ParallelRank:
    """Position of a rank in the parallel grid; the default is a single rank.

    Attributes:
        tensor, expert_tensor, expert: ``(rank, size)`` in each group.
        first_layer: decoder layers on earlier pipeline stages.
        splits_latents: split down projections (without transformer-engine).
    """

    tensor: tuple[int, int] = (0, 1)
    expert_tensor: tuple[int, int] = (0, 1)
    expert: tuple[int, int] = (0, 1)
    first_layer: int = 0
    num_experts: int | None = None
    splits_latents: bool = True

    def __post_init__(self):
        for name in ("tensor", "expert_tensor", "expert"):
            rank, size = getattr(self, name)
            require(
                0 <= rank < size, f"{name} must be (rank, size) with 0 <= rank < size: {rank, size}"
            )
        experts, ranks = self.num_experts, self.expert[1]
        require(
            not experts or experts % ranks == 0,
            f"num_experts ({experts}) must be a multiple of the expert-parallel size ({ranks})",
        )

    def shard(self, entry: Entry) -> tuple[int, int]:
        whole = entry.split in (Split.WHOLE, Split.TABLE)
        if whole or (entry.split is Split.LATENT and not self.splits_latents):
            return 0, 1
        return self.expert_tensor if entry.is_expert else self.tensor


_EXPERT = re.compile(r"(.*\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")


def global_name(name: str, parallel_rank: ParallelRank) -> str:
    """Return a parameter's name with global layer and expert numbers."""
    rank, size = parallel_rank.expert
    if layer := _LAYER.fullmatch(name):
        name = f"{layer[1]}{int(layer[2]) + parallel_rank.first_layer}{layer[3]}"
    if (expert := _EXPERT.fullmatch(name)) and size > 1:
        experts = parallel_rank.num_experts
        require(
            experts is not None, f"{name} under expert parallelism: ParallelRank needs num_experts"
        )
        assert experts is not None
        name = f"{expert[1]}{int(expert[2]) + rank * (experts // size)}{expert[3]}"
    return name


def part(entry: Entry, shape: tuple[int, ...], parallel_rank: ParallelRank) -> tuple[slice, ...]:
    """Return this rank's slice of each ``entry.hf`` tensor; ``shape`` has vocabulary padding."""
    rank, size = parallel_rank.shard(entry)
    whole = tuple(slice(0, extent) for extent in shape)
    if size == 1:
        return whole
    dim = 1 if entry.split is Split.COLUMNS else 0
    require(
        shape[dim] % size == 0,
        f"{entry.hf[0]}: dim {dim} of {tuple(shape)} is no multiple of the {size} "
        "tensor-parallel ranks that share it; choose a tensor-parallel size that divides it",
    )
    step = shape[dim] // size
    return whole[:dim] + (slice(rank * step, (rank + 1) * step),) + whole[dim + 1 :]


def assemble(entry: Entry, pieces: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Join all ranks' slices into the contiguous ``entry.hf`` tensors."""
    dim = 1 if entry.split is Split.COLUMNS else 0
    parts = [piece.chunk(len(entry.hf), dim=entry.join) for piece in pieces]
    return tuple(
        (torch.cat(slices, dim) if len(slices) > 1 else slices[0]).contiguous()
        for slices in zip(*parts, strict=True)
    )
