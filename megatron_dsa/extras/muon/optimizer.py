"""Megatron's Muon with marked parameters orthogonalised block by block."""

from typing import Any

import torch
from megatron.core.optimizer import emerging_optimizers
from megatron.core.optimizer.emerging_optimizers import (
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_dsa.layers.weight_blocks import IS_TABLE, block_rows, is_sharded, local_blocks


def is_left_to_adamw(parameter: torch.Tensor) -> bool:
    """Return whether AdamW updates a parameter under ``--optimizer muon``, as in DeepSeek-V4."""
    embeds = getattr(parameter, "is_embedding_or_output_parameter", False)
    return parameter.dim() != 2 or bool(embeds) or getattr(parameter, IS_TABLE, False)


class _ByBlock:
    pg_collection: Any
    tp_mode: str
    scaled_orthogonalize_fn: Any

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._sharing: dict[tuple[int, ...], Any] = {}

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the scaled update for the local gradient ``grad [m, n]``."""
        pattern = block_rows(p)
        if pattern is not None:
            return self._by_block(p, grad, pattern)
        if not is_sharded(p) and getattr(p, "partition_dim", -1) in (0, 1):
            # Megatron would gather equal copies of a replicated weight.
            return self.scaled_orthogonalize_fn(grad, None, None)
        return super().orthogonalize(p, grad, **kwargs)  # type: ignore[misc]

    def _by_block(self, p, grad: torch.Tensor, pattern: tuple[int, ...]) -> torch.Tensor:
        group = self.pg_collection.tp if is_sharded(p) and self.pg_collection else None
        held = local_blocks(grad.shape[0], pattern, 1 if group is None else get_pg_size(group))
        if held.sharers > 1:
            if self.tp_mode == "blockwise":
                return self.scaled_orthogonalize_fn(grad, None, None)
            return self.scaled_orthogonalize_fn(grad, self._sharers(group, held.sharers), 0)
        parts = grad.unflatten(0, (-1, sum(pattern))).split(pattern, dim=1)
        done = [self.scaled_orthogonalize_fn(part, None, None) for part in parts]
        return torch.cat(done, dim=1).flatten(0, 1)

    def _sharers(self, group, count: int) -> Any:
        """Return the process group that shares this rank's block; create it on first use."""
        if count == get_pg_size(group):
            return group
        ranks = torch.distributed.get_process_group_ranks(group)
        first = get_pg_rank(group) // count * count
        members = tuple(ranks[first : first + count])
        if members not in self._sharing:
            self._sharing[members] = torch.distributed.new_group(
                list(members), use_local_synchronization=True, group_desc="MUON_BLOCK"
            )
        return self._sharing[members]


class BlockMuon(_ByBlock, TensorParallelMuon):
    """Optimizer of ``--optimizer muon``."""


class BlockAdaptiveMuon(_ByBlock, TensorParallelAdaptiveMuon):
    """Optimizer of ``--optimizer adaptive_muon``; scales by block shape after the second moment.

    megatron-core 0.19 scales before the second moment, emerging-optimizers 0.3 by local shape.
    """

    def __init__(self, *args, scale_mode: str = "spectral", extra_scale_factor: float = 1.0,
                 **kwargs):  # fmt: skip
        super().__init__(
            *args, scale_mode=scale_mode, extra_scale_factor=extra_scale_factor, **kwargs
        )
        self._scaled, self._settings = (
            self.scaled_orthogonalize_fn,
            (scale_mode, extra_scale_factor),
        )
        self._scale: torch.Tensor

    def _scale_of(self, part, group, dim=None) -> torch.Tensor:
        size = [part.size(-2), part.size(-1)]
        if dim is not None:
            size[dim] *= get_pg_size(group)
        mode, extra = self._settings
        scale = emerging_optimizers.get_muon_scale_factor(*size, mode=mode) * extra
        return torch.full_like(part, scale)

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.scaled_orthogonalize_fn = self._scale_of
        self._scale = super().orthogonalize(p, grad, **kwargs)
        self.scaled_orthogonalize_fn = self._scaled
        return super().orthogonalize(p, grad, **kwargs) / self._scale

    def _apply_muon_scale(self, update: torch.Tensor, size_out: int, size_in: int) -> torch.Tensor:
        return update * self._scale
