"""Pools: consecutive tokens of a document that the indexer selects together (GLM-5.3).

A pool is a group of :mod:`.compressed` without overlap. Selected pools are expanded to lists of
tokens, and the attention mass of the tokens is summed per pool.
"""

from dataclasses import dataclass, replace

import torch

from megatron_dsa.ops.layout.compressed import CompressedKeys, compressed_keys, visible_groups
from megatron_dsa.ops.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class KeyPools:
    layout: Layout
    keys: CompressedKeys

    @classmethod
    def of(cls, layout: Layout, size: int) -> "KeyPools":
        # A cache in the layout would create a reference cycle that retains a batch's tensors.
        return cls(layout, compressed_keys(layout, size))

    @property
    def size(self) -> int:
        return self.keys.ratio

    def expand(
        self, selected: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of selected pools, then the tokens after the last complete pool.

        Args:
            selected: int32 ``[Sq, K]``, ascending pools from ``indexer_topk``.
            count: int32 ``[Sq]``, number of pools.

        Returns:
            int32 ``indices [Sq, K * size + size - 1]``, ascending, then -1, and ``length [Sq]``.
        """
        start, first = self.layout.start[:, None], self.keys.layout.start[:, None]
        size, (queries, most) = self.size, selected.shape
        inside = torch.arange(size, dtype=torch.int32, device=start.device)
        tokens = ((selected - first) * size + start)[..., None] + inside
        tail_start = start + (self.keys.layout.end[:, None] - first) * size
        tail = self.layout.end[:, None] - tail_start
        pooled = count[:, None] * size
        column = torch.arange(most * size + size - 1, dtype=torch.int32, device=start.device)
        indices = column + (tail_start - pooled)
        part = indices[:, : most * size]
        torch.where(column[: most * size] < pooled, tokens.view(queries, -1), part, out=part)
        length = pooled + tail
        indices.masked_fill_(column >= length, -1)
        return self.layout.to_key_indices(indices), length.squeeze(1)

    def of_lists(
        self,
        indices: torch.Tensor,
        length: torch.Tensor | None,
        mass: torch.Tensor,
        tokens: torch.Tensor | slice = slice(None),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indices, number and attention mass of the pools in lists from :meth:`expand`.

        ``mass [r, K * size + size - 1]`` is per list entry; tokens in no pool are ignored.
        """
        if length is None:
            length = (indices >= 0).sum(1, dtype=torch.int32)
        size, most = self.size, indices.shape[1] // self.size
        start, first = (x.start[tokens][:, None] for x in (self.layout, self.keys.layout))
        count = length // size  # fewer than ``size`` tokens per list are in no pool
        column = torch.arange(most, dtype=torch.int32, device=indices.device)
        absent = column >= count[:, None]
        leading = indices[:, : most * size : size]
        if self.layout.key_indices is not None:
            leading = self.layout.slots_of_keys()[leading.clamp_min(0).long()]
        pools = ((leading - start) // size + first).masked_fill_(absent, -1)
        of_pools = mass[:, : most * size].unflatten(1, (most, size)).sum(-1)
        return pools.int(), count, of_pools.masked_fill_(absent, 0.0)

    def by_token(self, k: torch.Tensor) -> tuple[torch.Tensor, Layout]:
        """Return the key of each token's pool, and the layout of the returned keys.

        Tokens in no pool are invisible. The student is constant within a pool, so losses over
        tokens and over pools have the same gradient.
        """
        layout, keys = self.layout, self.keys

        def pool_of_token() -> torch.Tensor:
            whole = layout.all_tokens
            pool = visible_groups(whole, self.size).start + whole.position // self.size
            return pool.clamp_max(max(keys.count - 1, 0))

        def pooled_tokens() -> Layout:
            seen = (keys.layout.end - keys.layout.start) * self.size
            return replace(layout, end=layout.start + seen, sequences=None)

        index = layout.derive(("pool of token", self.size), pool_of_token)
        return k.index_select(0, index), layout.derive(("pooled tokens", self.size), pooled_tokens)
