"""Rope tables per token, for MLA and DeepSeek-V4.

Megatron's packed rope synchronises with the host; indexing by positions does not. Unlike
Megatron's, this rope keeps the order of dims, since V4 rotates its values back.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
)

from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.capture import TensorCache
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.rope.spec import hadamard_signs


class TokenRope:
    """Rope tables of one microbatch, by query token.

    ``embedding`` is Megatron's; layers with the same ``owner`` share tables.
    """

    def __init__(self, embedding, layout: Layout, owner: object | None = None):
        self._embedding, self._layout = embedding, layout
        self._owner = embedding if owner is None else owner
        self._ranks: Ranks | None = None

    def held(self, ranks: Ranks) -> TokenRope:
        if ranks.indexer_tp is None:
            return self
        part = copy.copy(self)
        part._ranks = ranks
        return part

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``cos, sin [tokens, dim / 2]``, fp32 (fp64 for fp64), scaled by YaRN's mscale."""
        wide = accumulation_dtype(dtype)
        # The cache keeps the owner alive, so that the owner's id stays unique.
        key = "rope", id(self._owner), wide
        _, tables = self._layout.derive_large(key, lambda: (self._owner, self._compute(wide)))
        return tables if self._ranks is None else self._ranks.held(tables)

    def _compute(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        table = _angles(self._embedding, self._layout.max_length)
        table, mscale = table if isinstance(table, tuple) else (table, 1.0)
        angles = table.flatten(0, 2)[self._layout.position, : table.shape[-1] // 2]
        # Megatron also computes cos and sin in fp32 for fp64 models.
        cos, sin = (x.mul_(mscale).to(dtype) for x in (angles.cos(), angles.sin()))
        return cos, sin


@torch.inference_mode(False)  # training reuses rope tables of evaluation
def _angles(embedding, length: int):
    """Return Megatron's rope tables from a cache that keeps tables of CUDA graphs alive."""
    tables = embedding.__dict__.setdefault("_megatron_dsa_tables", TensorCache(4))
    forward = getattr(type(embedding).forward, "__wrapped__", type(embedding).forward)
    return tables.get(length, lambda: forward(embedding, length, packed_seq=True))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Compute a normalised Walsh-Hadamard transform of the last dim (a power of two).

    A matmul is exact in every dtype, and at 128 dims cheaper than log2(128) passes.
    """
    size = x.shape[-1]
    return torch.matmul(x, hadamard_signs(size, x.dtype, x.device)) * size**-0.5


@dataclass(frozen=True)
class PositionRope:
    """Rope frequencies of one layer kind.

    ``yarn``: ``(scaling factor, original maximal position, beta_fast, beta_slow)``; V4 uses no
    mscale.
    """

    dim: int
    base: float
    yarn: tuple[float, int, float, float] | None = None

    @classmethod
    def for_ratio(cls, config, ratio: int) -> PositionRope:
        dim = config.qk_pos_emb_head_dim
        if ratio == 0:
            return cls(dim, config.rotary_base)
        yarn = None
        if config.rope_type == "yarn":
            yarn = (
                config.rotary_scaling_factor,
                config.original_max_position_embeddings,
                config.beta_fast,
                config.beta_slow,
            )
        return cls(dim, config.csa_compress_rotary_base, yarn)

    def frequencies(self, device) -> torch.Tensor:
        """Return float64 ``[dim / 2]``, radians per position (YaRN: Peng et al. 2023)."""
        pair = torch.arange(self.dim // 2, dtype=torch.float64, device=device)
        plain = self.base ** (-2 * pair / self.dim)
        if self.yarn is None:
            return plain
        factor, original, beta_fast, beta_slow = self.yarn
        low, high = _yarn_find_correction_range(beta_fast, beta_slow, self.dim, self.base, original)
        ramp = ((pair - low) / ((high - low) or 0.001)).clamp(0, 1)
        return plain / factor * ramp + plain * (1 - ramp)

    def tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``cos, sin [n, dim / 2]`` for int64 ``positions [n]``, fp32 (fp64 for fp64)."""
        angles = positions.double()[:, None] * self.frequencies(positions.device)
        wide = accumulation_dtype(dtype)
        return angles.cos().to(wide), angles.sin().to(wide)

    def of_tokens(self, layout: Layout, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cached(layout, "tokens", layout.position, dtype)

    def of_groups(
        self, keys: CompressedKeys, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cached(keys.layout, "groups", keys.groups.position, dtype)

    def _cached(self, layout: Layout, what: str, positions: torch.Tensor, dtype: torch.dtype):
        return layout.derive_large((self, what, dtype), lambda: self.tables(positions, dtype))
