"""Rope of DeepSeek-V4's hybrid attention: cosines and sines by position, per kind of layer.

Here the rotated dims belong to the value, too, and are rotated back in the attention's output, so
pairs stay in place (Megatron's MLA rope moves the even dims in front of the odd ones). The angles
are formed in float64 and the tables rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
)

from megatron_dsa.numerics.arithmetic import accumulation_dtype
from megatron_dsa.sequence.compressed import CompressedKeys
from megatron_dsa.sequence.layout import Layout


@dataclass(frozen=True)
class PositionRope:
    """Frequencies of one kind of layer.

    Attributes:
        dim: number of rotated dims, a multiple of 2.
        base: rotary base.
        yarn: ``None``, or YaRN's ``(scaling factor, original maximal position, beta_fast,
            beta_slow)``. Its concentration factor (mscale) is not used by DeepSeek-V4.
    """

    dim: int
    base: float
    yarn: tuple[float, int, float, float] | None = None

    @classmethod
    def for_ratio(cls, config, ratio: int) -> PositionRope:
        """Return the rope of layers with compression ratio ``ratio`` (0: window only)."""
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

    def tables(self, positions: torch.Tensor, dtype: torch.dtype):
        """Return ``cos, sin [n, dim / 2]`` for int64 ``positions [n]``, fp32 (fp64 for fp64)."""
        angles = positions.double()[:, None] * self.frequencies(positions.device)
        wide = accumulation_dtype(dtype)
        return angles.cos().to(wide), angles.sin().to(wide)

    def of_rows(self, layout: Layout, dtype: torch.dtype):
        """Return the tables of all query rows, formed once per layout."""
        return self._cached(layout, "rows", layout.position, dtype)

    def of_groups(self, keys: CompressedKeys, dtype: torch.dtype):
        """Return the tables of all compressed keys, formed once per layout."""
        return self._cached(keys.layout, "groups", keys.groups.position, dtype)

    def _cached(self, layout: Layout, what: str, positions: torch.Tensor, dtype: torch.dtype):
        return layout.derive((self, what, dtype), lambda: self.tables(positions, dtype))
