"""Selection of the best visible keys of every query."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype, rows_in_budget
from megatron_dsa.ops.dispatch import Operation, Policy
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8, EXACT
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk import engine
from megatron_dsa.ops.indexer_topk.declaration import ENGINE_SCORES, SCORES, TOPK
from megatron_dsa.ops.indexer_topk.finite import require_finite_scores
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE as FP8
from megatron_dsa.ops.indexer_topk.inputs import (
    IndexerInputs,
    TopKInputs,
    check_indexer,
    describe_index_call,
)
from megatron_dsa.ops.indexer_topk.torch import put
from megatron_dsa.ops.layout.blocks import Block, Seen
from megatron_dsa.ops.layout.layout import Layout


def indexer_topk(
    inputs: IndexerInputs, layout: Layout, topk: int, *, policy: Policy = Policy()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``min(topk, visible)`` best visible keys of every query token.

    Scores are ``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` in fp32. The selection is exact
    and deterministic; equal scores go to the key that comes first in its sequence. With
    ``policy.indexer_numerics`` ``deepgemm-fp8`` scores are those of inference engines, by the rule
    of :mod:`megatron_dsa.ops.indexer_topk.engine`.

    Args:
        inputs: see :class:`IndexerInputs`.
        layout: which keys each query token sees.
        topk: keys per query, at least 1.
        policy: which implementations may run.

    Returns:
        ``indices`` int32 ``[Sq, topk]``: rows of the key buffer in sequence order, then ``-1``;
        ``length`` int32 ``[Sq]``: number of valid entries. Not differentiable.

    Raises:
        ConfigError: for shapes or dtypes outside of the above, a layout of other tensors, or scores
            that are NaN or infinite; on a GPU the latter is a device assert, which ends the
            process at its next synchronisation; for what scores of inference engines do not
            have: no relu, index dims above 128.
    """
    check_indexer(inputs, layout)
    if policy.indexer_numerics != EXACT:
        engine.check(inputs, policy)
    require(topk >= 1, f"topk must be at least 1, got {topk}")
    inputs = require_finite_scores(inputs, layout, "indexer_topk")
    arguments = TopKInputs(inputs.detach(), layout, topk)
    return select_blocks(arguments, selector(arguments, policy), policy.workspace_bytes)


class Selector(Protocol):
    """How the best keys of a block are found."""

    def bytes_per_row(self, width: int) -> int:
        """Temporary bytes per query of a block ``width`` slots wide, the result included."""

    def __call__(self, block: Block, seen: Seen, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return int32 ``[tokens, topk]``: ascending columns of the block, then -1.

        The block is wider than ``topk``. The result may be written to ``out`` and be it.
        """


def selection_calls(call: OpCall, policy: Policy) -> Iterator[tuple[str, OpCall]]:
    """Yield what a selection described by ``call`` calls, each with its own call."""
    yield "indexer_topk", call
    if policy.indexer_numerics == DEEPGEMM_FP8:
        yield "indexer_engine_scores", dataclasses.replace(call, dtype=FP8)
    else:
        yield "indexer_scores", call


def selector(inputs: TopKInputs, policy: Policy) -> Selector:
    """Return what finds the best keys of a block, as ``policy`` asks for it."""
    return (EngineScored if policy.indexer_numerics == DEEPGEMM_FP8 else Exact)(inputs, policy)


class Exact:
    """Scores of the inputs as they are, and the best of them."""

    def __init__(self, inputs: TopKInputs, policy: Policy):
        self.given, self.policy = inputs, policy
        self.keys = inputs.layout.keys_in_slot_order(inputs.indexer.k)
        self.inputs = dataclasses.replace(inputs.indexer, k=self.keys)

    def bytes_per_row(self, width: int) -> int:
        """Scores, what selecting from them takes, and the result."""
        return width * self._exact_bytes + 4 * self.given.topk

    def __call__(self, block: Block, seen: Seen, out: torch.Tensor | None = None) -> torch.Tensor:
        topk = self.given.topk
        scores = self._score(self.inputs, topk, block, seen)
        return self._select(scores, seen, topk, out if self._takes_out else None)

    @functools.cached_property
    def _exact_bytes(self) -> int:
        call = self._describe(self.inputs, self.given.topk)
        return self._bytes_per_score(call, call)

    def _describe(self, inputs: IndexerInputs, topk: int) -> OpCall:
        return describe_index_call(inputs, self.given.layout, topk)

    def _score(self, inputs: IndexerInputs, topk: int, block: Block, seen: Seen) -> torch.Tensor:
        call = self._describe(inputs, topk)
        return SCORES.run(call, self.policy, inputs, block, inputs.k, seen)

    @functools.cached_property
    def _takes_out(self) -> bool:
        call = self._describe(self.inputs, self.given.topk)
        return getattr(TOPK.choose(call, self.policy).candidate.load(), "takes_out", False)

    def _select(self, scores, seen: Seen, topk: int, out: torch.Tensor | None) -> torch.Tensor:
        call = self._describe(self.inputs, topk)
        more = () if out is None else (out,)
        return TOPK.run(call, self.policy, scores, seen, topk, *more)

    def _bytes_per_score(
        self, scoring: OpCall, selecting: OpCall, operation: Operation = SCORES
    ) -> int:
        """Temporary bytes per score of the implementations that score and select."""
        scores: Any = operation.choose(scoring, self.policy).candidate.load()
        select: Any = TOPK.choose(selecting, self.policy).candidate.load()
        itemsize = accumulation_dtype(self.inputs.q.dtype).itemsize
        return scores.bytes_per_score(scoring.heads, itemsize) + select.bytes_per_score()


class EngineScored(Exact):
    """Scores in the fp8 arithmetic of inference engines, and the best of them."""

    @functools.cached_property
    def fp8_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and their scales, for all blocks; queries are quantised a block at a time."""
        return engine.quantized(self.keys)

    @functools.cached_property
    def _engine_bytes(self) -> int:
        call = self._describe(self.inputs, self.given.topk)
        scoring = dataclasses.replace(call, dtype=FP8)
        return self._bytes_per_score(scoring, call, ENGINE_SCORES)

    def bytes_per_row(self, width: int) -> int:
        """The same; queries in bf16, fp32 and fp8."""
        heads, dim = self.inputs.q.shape[1:]
        return width * self._engine_bytes + 11 * heads * dim + 4 * self.given.topk

    def __call__(self, block: Block, seen: Seen, out: torch.Tensor | None = None) -> torch.Tensor:
        weights = self.inputs.fp32_weights
        weights = self.inputs.weights if weights is None else weights
        q, weights = engine.quantized_queries(self.inputs.q[block.rows], weights[block.rows])
        k, scales = self.fp8_keys
        rows = IndexerInputs(q, k, weights, self.inputs.relu, scales)
        # The queries are the block's own, from the first on.
        here = dataclasses.replace(block, rows=slice(0, q.shape[0], 1))
        topk = self.given.topk
        call = self._describe(rows, topk)
        scores = ENGINE_SCORES.run(call, self.policy, rows, here, k, seen)
        return self._select(scores, seen, topk, out if self._takes_out else None)


@torch.no_grad()
def select_blocks(
    arguments: TopKInputs, select: Selector, workspace_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``indices`` int32 ``[Sq, K]`` (rows of the key buffer, ascending slots, -1 padded) and
    ``length`` int32 ``[Sq]``, the number of valid entries.

    Args:
        arguments: what to select from.
        select: finds the best keys of a block.
        workspace_bytes: budget for the temporaries of one block.
    """
    inputs, layout, topk = arguments.indexer, arguments.layout, arguments.topk
    device = inputs.q.device
    indices = torch.empty(inputs.q.shape[0], topk, dtype=torch.int32, device=device)
    length = layout.derive(
        ("selected keys", topk), lambda: torch.clamp(layout.end - layout.start, max=topk)
    )

    def rows_for_width(width: int) -> int:
        # A block of documents merges two selections (`_select_of_documents`).
        lists = 0 if layout.real is None else 12 * topk
        return rows_in_budget(workspace_bytes, select.bytes_per_row(width) + lists)

    # Queries that see no more keys than they select need no scores.
    for block in layout.blocks(rows_for_width, (topk + 1,)):
        seen = layout.kept_seen(block)
        slots = place = None
        if block.width > topk and block.bound > topk:  # else every query gets all that it sees
            if layout.real is None:
                place = _place_for(indices, layout, block)
                slots = select(block, seen, place)
            else:
                # Only the device knows which queries see few keys.
                slots = select(block, _scored(layout, block, seen, topk))
        if place is None or slots is not place:
            put(indices[block.rows], slots, seen, block.lo, layout.key_rows)
    return indices, length


def _place_for(indices: torch.Tensor, layout: Layout, block: Block) -> torch.Tensor | None:
    """Return where a selection may write columns of the block, if these are key rows."""
    place = indices[block.rows]
    fits = block.lo == 0 and layout.key_rows is None and place.is_contiguous()
    # Kernels write 16 bytes at a time.
    return place if fits and place.data_ptr() % 16 == 0 else None


def _scored(layout: Layout, block: Block, seen: Seen, topk: int) -> Seen:
    """Return what the queries of a block see that see more than ``topk`` keys; others nothing."""

    def scored() -> Seen:
        few = seen.end - seen.start <= topk
        return Seen(torch.where(few, seen.end, seen.start), seen.end)

    return layout.derive(("scored", topk, *block.key), scored)
