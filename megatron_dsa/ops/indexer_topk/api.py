"""Selection of the best visible keys per query."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype, items_within
from megatron_dsa.ops.common.checks import require_on_device
from megatron_dsa.ops.dispatch import Operation, Policy, on_meta
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8, EXACT
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk import engine
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE as FP8
from megatron_dsa.ops.indexer_topk.spec import (
    ENGINE_SCORES,
    SCORES,
    TOPK,
    IndexerInputs,
    check_indexer,
    describe_index_call,
)
from megatron_dsa.ops.indexer_topk.torch import largest, put, sums_fit
from megatron_dsa.ops.layout.layout import Block, Layout, Seen


def indexer_topk(
    inputs: IndexerInputs, layout: Layout, topk: int, *, policy: Policy = Policy()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``min(topk, visible)`` best visible keys per query token.

    Scores are ``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` in fp32, or with
    ``policy.indexer_numerics`` those computed by inference engines. The selection is exact and
    deterministic; ties go to the first key.

    Args:
        topk: keys per query, at least 1.

    Returns:
        ``indices`` int32 ``[Sq, topk]``: indices into the key buffer in sequence order, padded with
        ``-1``; ``length`` int32 ``[Sq]``: number of valid entries. Not differentiable.

    Raises:
        ConfigError: shapes, dtypes or the layout do not fit; scores are not finite;
            ``deepgemm-fp8`` lacks relu or has index dims above 128. On a GPU, scores that are not
            finite raise a device assert, which ends the process at its next synchronisation.
    """
    check_indexer(inputs, layout)
    if policy.indexer_numerics != EXACT:
        engine.check(inputs)
    require(topk >= 1, f"topk must be at least 1, got {topk}")
    inputs = require_finite_scores(inputs, layout, "indexer_topk")
    select = _EngineScored if policy.indexer_numerics == DEEPGEMM_FP8 else _Exact
    return _select_blocks(select(inputs.detach(), layout, topk, policy))


def selection_calls(call: OpCall, policy: Policy) -> Iterator[tuple[str, OpCall]]:
    yield "indexer_topk", call
    if policy.indexer_numerics == DEEPGEMM_FP8:
        yield "indexer_engine_scores", replace(call, dtype=FP8)
    else:
        yield "indexer_scores", call


class _Exact:
    scoring: Operation = SCORES

    def __init__(self, inputs: IndexerInputs, layout: Layout, topk: int, policy: Policy):
        self.layout, self.topk, self.policy = layout, topk, policy
        self.inputs = replace(inputs, k=layout.keys_in_slot_order(inputs.k))
        self.call = self.scoring_call = describe_index_call(self.inputs, layout, topk)

    def __call__(self, block: Block, seen: Seen, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ascending selected columns, then -1, int32 ``[tokens, topk]``; may use ``out``."""
        more = (out,) if out is not None and getattr(self._selection, "takes_out", False) else ()
        return TOPK.run(self.call, self.policy, self._scores(block, seen), seen, self.topk, *more)

    def bytes_per_token(self, width: int) -> int:
        return width * self._bytes_per_score + 4 * self.topk

    def _scores(self, block: Block, seen: Seen) -> torch.Tensor:
        return SCORES.run(self.call, self.policy, self.inputs, block, self.inputs.k, seen)

    @functools.cached_property
    def _selection(self) -> Any:
        return TOPK.choose(self.call, self.policy).candidate.load()

    @functools.cached_property
    def _bytes_per_score(self) -> int:
        call = self.scoring_call
        scores: Any = self.scoring.choose(call, self.policy).candidate.load()
        itemsize = accumulation_dtype(self.inputs.q.dtype).itemsize
        return scores.bytes_per_score(call.heads, itemsize) + self._selection.bytes_per_score()


class _EngineScored(_Exact):
    scoring = ENGINE_SCORES

    def __init__(self, *given):
        super().__init__(*given)
        self.scoring_call = replace(self.call, dtype=FP8)

    @functools.cached_property
    def _fp8_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        # All blocks share the quantized keys.
        return engine.quantized(self.inputs.k)

    def bytes_per_token(self, width: int) -> int:
        heads, dim = self.inputs.q.shape[1:]
        return super().bytes_per_token(width) + 11 * heads * dim

    def _scores(self, block: Block, seen: Seen) -> torch.Tensor:
        weights = self.inputs.fp32_weights
        weights = self.inputs.weights if weights is None else weights
        q, weights = engine.quantized_queries(self.inputs.q[block.tokens], weights[block.tokens])
        k, scales = self._fp8_keys
        inputs = IndexerInputs(q, k, weights, self.inputs.relu, scales)
        here = replace(block, tokens=slice(0, q.shape[0], 1))
        call = describe_index_call(inputs, self.layout, self.topk)
        return ENGINE_SCORES.run(call, self.policy, inputs, here, k, seen)


@torch.no_grad()
def _select_blocks(select: _Exact) -> tuple[torch.Tensor, torch.Tensor]:
    q, layout, topk = select.inputs.q, select.layout, select.topk
    indices = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
    length = layout.derive(
        ("selected keys", topk), lambda: torch.clamp(layout.end - layout.start, max=topk)
    )

    def tokens_for_width(width: int) -> int:
        lists = 12 * topk if layout.packed else 0
        bytes_per_token = select.bytes_per_token(width) + lists
        return items_within(select.policy.workspace_bytes, bytes_per_token)

    # Queries with at most topk visible keys need no scores.
    for block in layout.blocks(tokens_for_width, topk + 1):
        seen, out = layout.seen(block), indices[block.tokens]
        columns = written = None
        if block.width > topk and block.bound > topk:
            if not layout.packed:
                written = out if _takes_columns(out, layout, block) else None
                columns = select(block, seen, written)
            else:
                columns = select(block, _scored(layout, block, seen, topk))
        if written is None or columns is not written:
            put(out, columns, seen, block.lo, layout.key_indices)
    return indices, length


def _takes_columns(out: torch.Tensor, layout: Layout, block: Block) -> bool:
    columns_are_keys = block.lo == 0 and layout.key_indices is None
    # Kernels store aligned vectors of 16 bytes.
    return columns_are_keys and out.is_contiguous() and out.data_ptr() % 16 == 0


def _scored(layout: Layout, block: Block, seen: Seen, topk: int) -> Seen:
    def scored() -> Seen:
        few = seen.end - seen.start <= topk
        return Seen(torch.where(few, seen.end, seen.start), seen.end)

    return layout.derive(("scored", topk, *block.key), scored)


ADVICE = (
    "check the indexer's parameters (checkpoint, learning rate) and the hidden states that enter "
    "the layer"
)


@torch.no_grad()
def require_finite_scores(inputs: IndexerInputs, layout: Layout, where: str) -> IndexerInputs:
    """Return ``inputs``, marked as checked, if every visible score is finite.

    Comparisons with NaN are false, so a selection would silently omit keys. Small kernels check the
    inputs and a bound of their products without synchronisation, ignoring padding. ``where`` names
    the caller in the message.

    Raises:
        ConfigError: an input is not finite, or a score may overflow; a device assert on a GPU.
    """
    tensors = inputs.tensors()
    if inputs.checked or on_meta() or any(x.numel() == 0 for x in tensors):
        return inputs
    queries, keys = _unseen(layout)
    heads, dim = inputs.q.shape[1:]
    limit = torch.finfo(accumulation_dtype(inputs.q.dtype)).max / (2 * heads * dim)
    hidden = queries, keys, queries
    require_on_device(
        sums_fit(tensors, hidden, limit), f"{where}: index scores are NaN or infinite: {ADVICE}",
        lambda: _explain(tensors, hidden, where),
    )  # fmt: skip
    return replace(inputs, checked=True)


def _unseen(layout: Layout) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    def find() -> tuple[torch.Tensor, torch.Tensor]:
        keys = ~seen_slots(layout)
        if layout.key_indices is not None:
            keys = torch.empty_like(keys).index_copy_(0, layout.key_indices, keys)
        return layout.end <= layout.start, keys

    return layout.derive("unseen queries and keys", find) if layout.packed else (None, None)


def seen_slots(layout: Layout) -> torch.Tensor:
    sees = (layout.end > layout.start).int()
    # The prefix sum of range starts minus ends counts the ranges that cover a slot.
    changes = sees.new_zeros(layout.num_keys + 1)
    changes.index_add_(0, layout.start, sees).index_add_(0, layout.end, -sees)
    return changes.cumsum(0)[:-1] > 0


def _explain(tensors, hidden, where: str) -> str:
    q, keys, weights = (
        ~x.isfinite().flatten(1).all(1) & (True if unseen is None else ~unseen)
        for x, unseen in zip(tensors, hidden, strict=True)
    )
    if not (q | weights).any() and not keys.any():
        magnitudes = ", ".join(
            f"{name} {largest(x, unseen):.1e}"
            for name, x, unseen in zip(("q", "k", "weights"), tensors, hidden, strict=True)
        )
        return (
            f"{where}: index scores must be finite, but sums of products of these inputs can "
            f"overflow {accumulation_dtype(tensors[0].dtype)} (largest magnitudes: {magnitudes}): "
            f"{ADVICE}"
        )
    return (
        f"{where}: index scores must be finite, but inputs of the indexer are NaN or infinite: "
        f"queries of {int(q.sum())} and weights of {int(weights.sum())} of {len(q)} query tokens, "
        f"keys of {int(keys.sum())} of {len(keys)} key tokens: {ADVICE}"
    )
