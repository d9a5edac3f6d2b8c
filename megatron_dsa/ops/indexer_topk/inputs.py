"""The lightning indexer: score every visible key, keep the best (DeepSeek-V3.2, eq. 1 and 2).

Two operations work together on one block of queries at a time, so that scores never exist for all
pairs: ``indexer_scores`` (:class:`BlockScores`) and ``indexer_topk`` (:class:`BlockSelection`).
:mod:`.api` walks over the blocks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron_dsa.dispatch import OpCall, describe_call, on_meta
from megatron_dsa.errors import require
from megatron_dsa.numerics.arithmetic import accumulation_dtype
from megatron_dsa.numerics.checks import FLOATS, require_layout, require_on_device, require_tensor
from megatron_dsa.numerics.scaling import has_triton
from megatron_dsa.sequence.layout import Block, Layout, Seen


@dataclass(frozen=True)
class IndexerInputs:
    """What an index score is made of.

    Attributes:
        q: ``[Sq, HI, DI]``, one query per index head.
        k: ``[Skv, DI]``, one key shared by all index heads.
        weights: ``[Sq, HI]``, head weights with ``HI^-1/2 * DI^-1/2`` already in them.
        relu: clamp each head's product at 0 (DeepSeek) or leave it.
        key_scales: fp32 ``[Skv]``, factor on the scores of each key; q and k are then fp8 (e4m3),
            the scales of q in ``weights`` (:mod:`.fp8`). ``None`` otherwise.
        checked: :func:`require_finite_scores` accepted them, it need not look again.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True
    key_scales: torch.Tensor | None = None
    checked: bool = False

    def detach(self) -> IndexerInputs:
        """Return the same inputs outside of the autograd graph."""
        q, k, weights = (x.detach() for x in (self.q, self.k, self.weights))
        return replace(self, q=q, k=k, weights=weights)


@dataclass(frozen=True)
class TopKInputs:
    """Inputs of one selection: the indexer's, the layout and ``topk``."""

    indexer: IndexerInputs
    layout: Layout
    topk: int


class BlockScores(Protocol):
    """An implementation of ``indexer_scores``."""

    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        """Temporary bytes per score, the score included (``itemsize`` bytes), for the budget."""

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        """Return the scores ``[tokens, width]`` of the block's queries, fp32 (fp64 for fp64
        inputs).

        ``keys [slots, DI]`` are all keys in slot order. What a query does not see (``seen``) may
        hold anything, NaN and uninitialised memory included. The caller may overwrite them.
        """


class BlockSelection(Protocol):
    """An implementation of ``indexer_topk``; its call is described by the indexer's q."""

    def bytes_per_score(self) -> int:
        """Temporary bytes per score besides the score itself, for the budget."""

    def __call__(
        self, scores: torch.Tensor, seen: Seen, topk: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return int32 ``[tokens, topk]``: ascending columns of the best seen scores, then -1.

        The result may be written to ``out``, which is contiguous, and be it.

        ``scores [tokens, width]``, ``width > topk``, may be overwritten. Ties go to the smallest
        column, ``-0`` and ``+0`` are equal. What is not ``seen`` may hold anything.
        """


def describe_index_call(inputs: IndexerInputs, layout: Layout, topk: int | None) -> OpCall:
    """Describe a call of an indexer operation to dispatch."""
    dtype = inputs.q.dtype
    if inputs.key_scales is None:  # else it is fp8, and weights are fp32
        dtype = torch.promote_types(dtype, inputs.weights.dtype)
    return describe_call(
        inputs.q.device,
        dtype=dtype,
        heads=inputs.q.shape[1],
        qk_dim=inputs.q.shape[2],
        v_dim=0,
        topk=topk,
        packed=layout.real is not None,
        relu=inputs.relu,
    )


def check_indexer(inputs: IndexerInputs, layout: Layout, **queries: torch.Tensor) -> None:
    """Raise unless the indexer's tensors, the layout and what has its query tokens fit."""
    q, k, weights = inputs.q, inputs.k, inputs.weights
    fix = "flatten sequence and batch to tokens"
    require_tensor("inputs.q", q, ("Sq", "HI", "DI"), FLOATS, fix=fix)
    require_tensor("inputs.k", k, ("Skv", q.shape[2]), (q.dtype,), q, "give it the DI of inputs.q")
    fix = "give one weight per query token and index head"
    require_tensor("inputs.weights", weights, tuple(q.shape[:2]), FLOATS, q, fix)
    require(inputs.key_scales is None, "inputs.key_scales must be None: they belong to fp8 keys")
    require_layout(layout, {"inputs.q": q} | queries, {"inputs.k": k})


ADVICE = (
    "check the indexer's parameters (checkpoint, learning rate) and the hidden states that enter "
    "the layer"
)


@torch.no_grad()
def require_finite_scores(inputs: IndexerInputs, layout: Layout, where: str) -> IndexerInputs:
    """Return ``inputs``, marked as checked, if every score between tokens of ``layout`` is finite.

    Comparisons with NaN are false: a selection would leave out a key, or all keys of a query,
    without a word. Scores are finite if the inputs are and no sum of products can overflow, so the
    inputs are checked, of which there are far fewer.

    Queries that see no key and keys that no query sees may hold anything in packed batches, where
    they are padding. Inputs that are marked are not checked again. Three small kernels on a GPU
    and no synchronisation.

    Args:
        inputs: the indexer's tensors, in 16 bits or more.
        layout: which keys each query sees.
        where: what the message calls the place, a layer or an operation.

    Raises:
        ConfigError: an input is NaN or infinite, or a score could be. On a GPU a device assert.
    """
    tensors = (inputs.q, inputs.k, inputs.weights)
    if inputs.checked or on_meta() or any(x.numel() == 0 for x in tensors):
        return inputs
    unseen = _Unseen.of(layout)
    heads, dim = inputs.q.shape[1:]
    limit = torch.finfo(accumulation_dtype(inputs.q.dtype)).max / (2 * heads * dim)
    hidden = unseen.queries, unseen.keys, unseen.queries
    if inputs.q.is_cuda and has_triton() and all(x.dtype != torch.float64 for x in tensors):
        from megatron_dsa.ops.indexer_topk.finite_triton import sums_fit  # needs Triton

        holds = sums_fit(tensors, hidden, limit)
    else:
        q, k, weights = map(_largest, tensors, hidden)
        products = q * k
        # The products of a head are summed before they are weighted: both sums have to fit.
        holds = torch.addcmul(products, products, weights) < limit
    require_on_device(
        holds, f"{where}: index scores are NaN or infinite: {ADVICE}",
        lambda: _explain(inputs, unseen, where),
    )  # fmt: skip
    return dataclasses.replace(inputs, checked=True)


@dataclasses.dataclass(frozen=True)
class _Unseen:
    """Padding: bool ``[num_queries]`` and ``[num_keys]``, ``None`` if there is none."""

    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None

    @classmethod
    def of(cls, layout: Layout) -> _Unseen:
        if layout.real is None:
            return cls()
        return layout.derive("unseen queries and keys", lambda: cls._find(layout))

    @classmethod
    def _find(cls, layout: Layout) -> _Unseen:
        sees = (layout.end > layout.start).int()
        # Ranges begin and end: their sum up to a slot is how many of them cover it.
        changes = sees.new_zeros(layout.num_keys + 1)
        changes.index_add_(0, layout.start, sees).index_add_(0, layout.end, -sees)
        slots = changes.cumsum(0)[:-1] == 0
        if layout.key_rows is not None:
            slots = torch.empty_like(slots).index_copy_(0, layout.key_rows, slots)
        return cls(sees == 0, slots)


def _largest(x: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    """Return the largest magnitude, a scalar in the accumulation dtype; NaN if there is one."""
    dtype, inf = accumulation_dtype(x.dtype), float("inf")
    if unseen is None:
        return torch.linalg.vector_norm(x, inf, dtype=dtype)
    tokens = torch.linalg.vector_norm(x, inf, dim=tuple(range(1, x.dim())), dtype=dtype)
    return tokens.masked_fill_(unseen, 0.0).amax()


def _explain(inputs: IndexerInputs, unseen: _Unseen, where: str) -> str:
    """Say how many tokens are concerned; waits for the device."""

    def wrong(x: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
        found = ~x.isfinite().flatten(1).all(1)
        return found if unseen is None else found & ~unseen

    q, weights = wrong(inputs.q, unseen.queries), wrong(inputs.weights, unseen.queries)
    keys = wrong(inputs.k, unseen.keys)
    if not (q | weights).any() and not keys.any():
        largest = ", ".join(
            f"{name} {_largest(x, hidden):.1e}"
            for name, x, hidden in (
                ("q", inputs.q, unseen.queries),
                ("k", inputs.k, unseen.keys),
                ("weights", inputs.weights, unseen.queries),
            )
        )
        return (
            f"{where}: index scores must be finite, but sums of products of these inputs can "
            f"overflow {accumulation_dtype(inputs.q.dtype)} (largest magnitudes: {largest}): "
            f"{ADVICE}"
        )
    return (
        f"{where}: index scores must be finite, but inputs of the indexer are NaN or infinite: "
        f"queries of {int(q.sum())} and weights of {int(weights.sum())} of {len(q)} query tokens, "
        f"keys of {int(keys.sum())} of {len(keys)} key tokens: {ADVICE}"
    )
