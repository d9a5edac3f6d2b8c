"""Key lists of V4's attention, written block by block.

A query attends to the last positions of its sequence (the window) and to compressed keys, either
selected or all visible ones. The backward writes the lists again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import items_within, part_of
from megatron_dsa.ops.common.checks import require_tensor
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.dispatch import OpCall, Policy, describe_call
from megatron_dsa.ops.key_lists.spec import KEY_LISTS, ListInputs
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.layout.layout import Layout

#: Temporary bytes per list entry in torch and in the kernel.
_BYTES_UNFUSED, _BYTES_FUSED = 48, 8


@dataclass(frozen=True, eq=False)
class KeyLists:
    """Window and compressed keys of every query token of a microbatch.

    The key buffer and each list hold compressed keys first, then keys of positions. Lists without a
    selection are thus ascending, which speeds up the backward.

    Attributes:
        window: number of latest visible positions, including the query's.
        selected: int32 ``[Sq, topk]``, selected compressed slots, valid entries first; ``None``:
            all visible ones.
        selected_length: int32 ``[Sq]``, number of valid entries.
        held: int64 ``[slots]``, slot -> index of a position's key past the compressed keys;
            ``None``: the map of the layout (all ranks' keys).
        checked: ``selected`` is below the number of compressed keys, as from ``indexer_topk``; if
            false, its maximum is checked.

    Raises:
        ConfigError: the tensors do not fit the layout, or each other.
    """

    layout: Layout
    window: int
    compressed: CompressedKeys | None = None
    selected: torch.Tensor | None = None
    selected_length: torch.Tensor | None = None
    held: torch.Tensor | None = None
    checked: bool = False

    def __post_init__(self):
        queries, start = self.layout.num_queries, self.layout.start
        require(self.window >= 0, f"window must not be negative, got {self.window}: count tokens")
        if self.compressed is not None:
            require(
                self.compressed.layout.num_queries == queries,
                f"compressed must have the {queries} query tokens of layout, got "
                f"{self.compressed.layout.num_queries}: make it with compressed_keys(layout, ...)",
            )
        if self.selected is not None:
            require(
                self.compressed is not None and self.selected_length is not None,
                "selected needs compressed and selected_length: pass all results of indexer_topk",
            )
            fix, int32 = "select for the same batch", (torch.int32,)
            require_tensor("selected", self.selected, (queries, "topk"), int32, start, fix)
            assert self.selected_length is not None
            require_tensor("selected_length", self.selected_length, (queries,), int32, start, fix)

    @property
    def offset(self) -> int:
        """Buffer index of the first uncompressed key."""
        return 0 if self.compressed is None else self.compressed.count

    def width(self, tokens: slice) -> int:
        """Return the list width for some query tokens.

        Growing lists have power-of-two widths, because cuDNN compiles per width.
        """
        window = min(self.window, self.layout.widest(tokens))
        if self.compressed is None or self.selected is not None:
            return self._fixed_width(window)
        longest = window + self.compressed.layout.widest(tokens)
        return max(1, min(self.full_width, 1 << (longest - 1).bit_length()))

    @property
    def full_width(self) -> int:
        window = min(self.window, self.layout.max_length)
        if self.compressed is None or self.selected is not None:
            return self._fixed_width(window)
        return max(window + self.compressed.layout.max_length, 1)

    def _fixed_width(self, window: int) -> int:
        return max(window, 1) if self.selected is None else self.selected.shape[1] + window

    def blocks(self, policy: Policy) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield ``tokens, indices int32 [r, width], length int32 [r]`` for all query tokens.

        A list has indices into the key buffer without gaps, then ``-1``.
        """
        at_once, total = self.tokens_at_once(policy), self.layout.num_queries
        for first in range(0, total, at_once):
            tokens = slice(first, min(total, first + at_once))
            yield tokens, *self.of(tokens, policy)

    def tokens_at_once(self, policy: Policy) -> int:
        """Return the number of tokens whose lists fit the workspace."""
        fused = KEY_LISTS.choose(self._call(), policy).candidate.fused
        bytes_per_token = self.full_width * (_BYTES_FUSED if fused else _BYTES_UNFUSED)
        return items_within(policy.workspace_bytes, bytes_per_token)

    def of(self, tokens: slice, policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lists of a slice of tokens as :meth:`blocks` does."""
        inputs = self._inputs(tokens, self.width(tokens))
        return KEY_LISTS.run(self._call(), policy, inputs)

    def of_some(
        self, tokens: torch.Tensor, selected: torch.Tensor, length, policy: Policy
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = select_tokens(tokens, self.layout.start, self.layout.end)
        inputs = ListInputs(
            start=start,
            end=end,
            window=self.window,
            key_indices=self._key_indices,
            offset=self.offset,
            selected=selected,
            selected_length=length,
            group_start=None,
            group_end=None,
            width=selected.shape[1] + min(self.window, self.layout.max_length),
        )
        return KEY_LISTS.run(self._call(), policy, inputs)

    @property
    def _key_indices(self) -> torch.Tensor | None:
        return self.layout.key_indices if self.held is None else self.held

    def _call(self) -> OpCall:
        device = self.layout.start.device
        return describe_call(device, dtype=torch.int32, heads=1, qk_dim=0, v_dim=0)

    def _inputs(self, tokens: slice, width: int) -> ListInputs:
        groups = self.compressed if self.selected is None else None
        return ListInputs(
            start=part_of(self.layout.start, tokens),
            end=part_of(self.layout.end, tokens),
            window=self.window,
            key_indices=self._key_indices,
            offset=self.offset,
            selected=None if self.selected is None else part_of(self.selected, tokens),
            selected_length=(
                None if self.selected_length is None else part_of(self.selected_length, tokens)
            ),
            group_start=None if groups is None else part_of(groups.layout.start, tokens),
            group_end=None if groups is None else part_of(groups.layout.end, tokens),
            width=width,
        )
