"""Seeded inputs: ordinary rows, and among them the ones on which kernels are known to fail."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch

from megatron_dsa.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs
from megatron_dsa.ops.sparse_attention.inputs import SparseAttentionInputs
from megatron_dsa.sequence.layout import Layout, QueryRange, bshd_layout, packed_layout
from megatron_dsa.tools.doctor.shapes import Shape

#: Every so many keys one is selected by nobody, besides the first and the last.
UNSELECTED_STEP = 11


def layout_of(shape: Shape, device: torch.device) -> Layout:
    """One causal sequence of ``seq`` rows, or four (one of them very short) and padding."""
    if not shape.packed:
        return bshd_layout(shape.seq, 1, device)
    ends = [0, shape.seq * 2 // 5, shape.seq * 2 // 5 + 5, shape.seq * 9 // 10, shape.seq - 3]
    longest = max(end - begin for begin, end in itertools.pairwise(ends))
    return packed_layout(
        torch.tensor(ends, dtype=torch.int32, device=device), shape.seq, max_seqlen=longest
    )


def sampled_rows(shape: Shape, device: torch.device) -> torch.Tensor:
    """Ascending query rows spread over the sequence, its first and its last included."""
    return torch.linspace(0, shape.seq - 1, shape.rows, device=device).long().unique()


def layout_of_rows(layout: Layout, rows: torch.Tensor) -> Layout:
    """The layout of some (ascending) query rows over all keys."""
    # The i-th sampled row must lie at or before slot first + i.
    first = int((rows - torch.arange(len(rows), device=rows.device)).max())
    return dataclasses.replace(
        layout,
        num_queries=len(rows),
        start=layout.start[rows],
        end=layout.end[rows],
        position=layout.position[rows],
        real=None if layout.real is None else layout.real[rows],
        query_ranges=(
            QueryRange(
                slice(0, len(rows), 1), 0, first, layout.num_keys + len(rows), layout.num_keys
            ),
        ),
    )


@dataclass(frozen=True)
class Lists:
    """Index lists of the sampled rows.

    Attributes:
        indices: int32 ``[R, K]``, with entries that select nothing.
        length: int32 ``[R]``.
        valid: bool ``[R, K]``, the entries that select a key.
        unselected: bool ``[Skv]``, keys that no row selects; they hold NaN in every input.
    """

    indices: torch.Tensor
    length: torch.Tensor
    valid: torch.Tensor
    unselected: torch.Tensor

    @property
    def empty(self) -> torch.Tensor:
        """bool ``[R]``: rows that select nothing."""
        return ~self.valid.any(-1)


def difficult_lists(shape: Shape, layout: Layout, seed: int = 1) -> Lists:
    """Lists of visible keys in ascending order, some of them spoilt on purpose.

    ``layout`` is that of the sampled rows. Among those with the most keys, one row has length 0,
    one holds nothing but -1, one has a -1 in the middle, one an id equal to the number of keys and
    one of 2^31 - 1, and one stale (real) ids past its length.
    """
    generator = torch.Generator().manual_seed(seed)
    start, end = layout.start.cpu(), layout.end.cpu()
    allowed = torch.ones(shape.seq, dtype=torch.bool)
    allowed[::UNSELECTED_STEP] = False
    allowed[-1] = False
    indices = torch.full((len(start), shape.topk), -1, dtype=torch.int32)
    length = torch.zeros(len(start), dtype=torch.int32)
    for row, (lo, hi) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        ids = allowed[lo:hi].nonzero().flatten() + lo
        if len(ids) > shape.topk:
            ids = ids[torch.randperm(len(ids), generator=generator)[: shape.topk].sort().values]
        indices[row, : len(ids)] = ids.int()
        length[row] = len(ids)
    _spoil(indices, length, shape.seq)
    place = torch.arange(shape.topk)
    valid = (indices >= 0) & (indices < shape.seq) & (place < length[:, None])
    unselected = torch.ones(shape.seq, dtype=torch.bool)
    unselected[indices[valid].long()] = False
    device = layout.start.device
    return Lists(*(x.to(device) for x in (indices, length, valid, unselected)))


def _spoil(indices: torch.Tensor, length: torch.Tensor, num_keys: int) -> None:
    # Every second of the longest rows, so that each has an ordinary neighbour to disturb.
    longest = length.argsort(descending=True, stable=True)[::2].tolist()
    no_length, only_invalid, hole, past_the_end, stale = longest[:5]
    length[no_length] = 0  # its ids stay listed
    indices[only_invalid] = -1
    middle = int(length[hole]) // 2
    indices[hole, middle] = -1
    last = int(length[past_the_end]) - 1
    indices[past_the_end, 0] = num_keys
    indices[past_the_end, last] = 2**31 - 1
    length[stale] = max(1, int(length[stale]) - 3)


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of sparse attention, forward and backward; shapes as in ``SparseAttentionInputs``."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor
    sink: torch.Tensor | None
    dout: torch.Tensor
    v_dim: int
    softmax_scale: float

    def inputs(self, want_p_sum: bool = False) -> SparseAttentionInputs:
        return SparseAttentionInputs(
            q=self.q,
            kv=self.kv,
            indices=self.indices,
            v_dim=self.v_dim,
            softmax_scale=self.softmax_scale,
            topk_length=self.length,
            sink=self.sink,
            workspace_bytes=DEFAULT_WORKSPACE_BYTES,
            want_p_sum=want_p_sum,
        )

    def take(self, rows: torch.Tensor) -> AttentionCase:
        """The case of some of its query rows."""
        return dataclasses.replace(
            self,
            q=self.q[rows],
            indices=self.indices[rows],
            length=self.length[rows],
            dout=self.dout[rows],
        )


def full_lists(shape: Shape, device: torch.device, seed: int = 3) -> Lists:
    """Lists of ``timed_rows`` queries, each full of distinct keys spread over all of them."""
    rows, keys = shape.timed_rows, min(shape.topk, shape.seq)
    generator = torch.Generator(device).manual_seed(seed)
    offset = torch.randint(shape.seq, (rows, 1), generator=generator, device=device)
    ids = (torch.arange(keys, device=device) * shape.seq // keys + offset) % shape.seq
    indices = torch.full((rows, shape.topk), -1, dtype=torch.int32, device=device)
    indices[:, :keys] = ids.sort(-1).values.int()
    length = torch.full((rows,), keys, dtype=torch.int32, device=device)
    return Lists(
        indices, length, indices >= 0, torch.zeros(shape.seq, dtype=torch.bool, device=device)
    )


def attention_case(shape: Shape, lists: Lists, seed: int = 2) -> AttentionCase:
    """Random queries and keys over ``lists``; keys that nobody selects are NaN."""
    indices = lists.indices
    draw = _normal(indices.device, seed)
    rows = len(indices)
    # Logits of standard deviation 1: neither a plain mean of the values nor a single one, which
    # would leave dq to the cancellation of two bf16 numbers.
    q = draw(rows, shape.heads, shape.qk_dim).to(shape.dtype)
    # A mean in the values and one (of either sign) in every row of dout keep out . dout, and with
    # it the sink's gradient, from being a difference of which little but rounding is left. One
    # sign for all would drown dkv in the sum of the probabilities.
    kv = draw(shape.seq, shape.qk_dim).add_(0.1).to(shape.dtype)
    kv[lists.unselected] = float("nan")
    dout = draw(rows, shape.heads, shape.v_dim) + draw(rows, shape.heads, 1).sign()
    return AttentionCase(
        q=q,
        kv=kv,
        indices=indices,
        length=lists.length,
        sink=draw(shape.heads) + math.log(min(shape.topk, shape.seq)) if shape.sink else None,
        dout=dout.to(shape.dtype),
        v_dim=shape.v_dim,
        softmax_scale=shape.qk_dim**-0.5,
    )


def random_index_inputs(shape: Shape, rows: int, device: torch.device, seed=5) -> IndexerInputs:
    """Index queries of ``rows`` rows over ``seq`` keys."""
    draw = _normal(device, seed)
    scale = shape.index_heads**-0.5 * shape.index_dim**-0.5
    return IndexerInputs(
        draw(rows, shape.index_heads, shape.index_dim).to(shape.dtype),
        draw(shape.seq, shape.index_dim).to(shape.dtype),
        draw(rows, shape.index_heads, scale=scale).to(shape.dtype),
    )


def integer_index_inputs(shape: Shape, rows: int, device: torch.device, seed=6) -> IndexerInputs:
    """Small whole numbers: fp32 scores are exact in any order of summation, and ties abound."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size):
        values = torch.randint(-1, 2, size, generator=generator, device=device)
        return values.to(shape.dtype)

    return IndexerInputs(
        draw(rows, shape.index_heads, shape.index_dim),
        draw(shape.seq, shape.index_dim),
        draw(rows, shape.index_heads),
    )


def _normal(device: torch.device, seed: int):
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size, scale=1.0):
        return torch.randn(*size, generator=generator, device=device).mul_(scale)

    return draw
