"""The lightning indexer: score every visible key, keep the best (DeepSeek-V3.2, eq. 1 and 2).

Two operations work together on one block of queries at a time, so that scores never exist for all
pairs: ``indexer_scores`` (:class:`BlockScores`) and ``indexer_topk`` (:class:`BlockSelection`).
:mod:`.api` walks over the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.checks import FLOATS, require_layout, require_tensor
from megatron_dsa.ops.dispatch import OpCall, describe_call
from megatron_dsa.ops.layout.blocks import Block, Seen
from megatron_dsa.ops.layout.layout import Layout


@dataclass(frozen=True)
class IndexerInputs:
    """What an index score is made of.

    Attributes:
        q: ``[Sq, HI, DI]``, one query per index head.
        k: ``[Skv, DI]``, one key shared by all index heads.
        weights: ``[Sq, HI]``, head weights with ``HI^-1/2 * DI^-1/2`` already in them.
        relu: clamp each head's product at 0 (DeepSeek) or leave it.
        key_scales: fp32 ``[Skv]``, factor on the scores of each key; q and k are then fp8 (e4m3),
            the scales of q in ``weights`` (:mod:`.engine`). ``None`` otherwise.
        fp32_weights: fp32 ``[Sq, HI]``, the head weights whose constants were multiplied in fp32
            (:func:`.engine.fp32_weights`), for scores in the arithmetic of inference engines.
            ``None``: these take ``weights``.
        checked: :func:`.finite.require_finite_scores` accepted them, it need not look again.
    """

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True
    key_scales: torch.Tensor | None = None
    fp32_weights: torch.Tensor | None = None
    checked: bool = False

    def detach(self) -> IndexerInputs:
        """Return the same inputs outside of the autograd graph."""
        q, k, weights = (x.detach() for x in (self.q, self.k, self.weights))
        return replace(self, q=q, k=k, weights=weights)

    def formed(self) -> IndexerInputs:
        """Return these inputs: their queries exist."""
        return self

    def shaped(self) -> IndexerInputs:
        """Return these inputs, for their shapes and dtypes."""
        return self

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that get gradients."""
        return self.q, self.k, self.weights

    def with_tensors(self, tensors: Sequence[Any]) -> IndexerInputs:
        """Return the same with other :meth:`tensors`."""
        q, k, weights = tensors
        return replace(self, q=q, k=k, weights=weights)

    def without_tensors(self) -> IndexerInputs:
        """Return the same without tensors, to be kept until a backward."""
        return replace(self.with_tensors((None,) * 3), fp32_weights=None)


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
    """An implementation of ``indexer_topk``; its call is described by the indexer's q.

    One with a true attribute ``takes_out`` is called with a fourth argument where that spares a
    copy: a contiguous tensor, which takes the result and is returned.
    """

    def bytes_per_score(self) -> int:
        """Temporary bytes per score besides the score itself, for the budget."""

    def __call__(self, scores: torch.Tensor, seen: Seen, topk: int) -> torch.Tensor:
        """Return int32 ``[tokens, topk]``: ascending columns of the best seen scores, then -1.

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
    if inputs.fp32_weights is not None:
        fix = "make them with ops.indexer_topk.engine.fp32_weights"
        dtypes = (torch.float32,)
        require_tensor(
            "inputs.fp32_weights", inputs.fp32_weights, tuple(q.shape[:2]), dtypes, q, fix
        )
    require_layout(layout, {"inputs.q": q} | queries, {"inputs.k": k})
