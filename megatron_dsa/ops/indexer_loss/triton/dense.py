"""Dense indexer loss with Triton kernels, which keep scores of single heads on chip.

Teachers are fp32, score gradients bf16, both in whole blocks of :data:`BLOCK` and 0 at hidden keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.ops.common.arithmetic import ceil_div, next_power_of_2, slices
from megatron_dsa.ops.indexer_loss.dense import TileBytes, dense_loss, gathered_bytes, take
from megatron_dsa.ops.indexer_loss.spec import (
    DenseLossInputs,
    ExpandedKeys,
    IndexerLoss,
    LatentKeys,
    TeacherKeys,
)
from megatron_dsa.ops.indexer_loss.triton import gradients, student, teacher
from megatron_dsa.ops.indexer_topk.api import seen_slots
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout, Seen

BLOCK = 128
#: Maximum edge of a tile, whose tokens share expanded keys.
LONGEST_EDGE = 2048
FEWEST_HEADS = 16


@dataclass(frozen=True)
class Launch:
    rows: int
    columns: int
    stages: int
    warps: int = 8

    def options(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.rows, "BLOCK_N": self.columns, "STAGES": self.stages,
            "num_warps": self.warps,
        }  # fmt: skip

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        return ceil_div(rows, self.rows), ceil_div(columns, self.columns)


#: Launch parameters by required shared memory; the first entry that fits is used.
LAUNCHES = {
    200 * 1024: {
        "head_sums": Launch(128, 128, 4),
        "head_lse": Launch(128, 128, 4),
        "student_lse": Launch(128, 128, 4),
        "student_loss": Launch(128, 128, 4),
        "query_gradient": Launch(128, 128, 2),
        "key_gradient": Launch(128, 128, 3),
    },
    160 * 1024: {
        "head_sums": Launch(128, 128, 3),
        "head_lse": Launch(128, 128, 3),
        "student_lse": Launch(128, 128, 3),
        "student_loss": Launch(128, 128, 3),
        "query_gradient": Launch(128, 64, 2),
        "key_gradient": Launch(128, 128, 2),
    },
    0: {
        "head_sums": Launch(128, 64, 2),
        "head_lse": Launch(128, 64, 2),
        "student_lse": Launch(64, 64, 2, 4),
        "student_loss": Launch(64, 64, 2, 4),
        "query_gradient": Launch(64, 64, 2, 4),
        "key_gradient": Launch(64, 64, 2, 4),
    },
}


def launches(device: torch.device) -> dict[str, Launch]:
    shared = next(iter(LAUNCHES))
    if device.type == "cuda":
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return next(kernels for needed, kernels in LAUNCHES.items() if needed <= shared)


def dense(inputs: DenseLossInputs) -> IndexerLoss:
    return dense_loss(inputs, TritonTiles(inputs))


class TritonTiles:
    #: True if teacher kernels copy non-contiguous operands.
    copies = False

    def __init__(self, inputs: DenseLossInputs):
        self.shape, self._heads_at_once = tile_shape(inputs, self.copies)
        self._keys, self._scale = inputs.indexer.k, inputs.softmax_scale
        self._covered = inputs.layout.derive("covered", lambda: seen_slots(inputs.layout))
        self._launches = launches(self._keys.device)

    def index_keys(self, layout: Layout, slots: slice) -> torch.Tensor:
        """Copy index keys and zero hidden keys, because NaN times 0 is NaN."""
        keys = take(self._keys, layout, slots)
        return keys.masked_fill(~self._covered[slots, None], 0.0).contiguous()

    def student_lse(self, x: IndexerInputs, seen: Seen) -> torch.Tensor:
        x = _dense_inputs(x)
        queries, width = x.q.shape[0], x.k.shape[0]
        launch = self._launches["student_lse"]
        blocks, parts = launch.blocks(queries, width)
        parts = x.q.new_empty(parts, queries, dtype=torch.float32)
        student.student_lse[(blocks * parts.shape[0],)](
            x.q, x.k, x.weights, parts, seen.start, seen.end, queries, width, parts.stride(0),
            x.q.stride(0), x.weights.stride(0), **_sizes(x), **launch.options(),
        )  # fmt: skip
        return parts.logsumexp(0)

    def teacher_lse(self, q: torch.Tensor, keys, seen: Seen) -> torch.Tensor:
        q = _dense_tokens(q)
        queries, heads, dim = q.shape
        lse = q.new_empty(heads, queries, dtype=torch.float32)
        launch = self._launches["head_lse"]
        for some, k, shared, strides in self._key_parts(keys, heads):
            count, width = some.stop - some.start, k.shape[0]
            teacher.head_lse[(launch.blocks(queries, width)[0] * count,)](
                q[:, some], k, shared, lse[some], seen.start, seen.end, queries, width, count,
                queries, q.stride(0), dim, *strides, self._scale,
                DIM=dim, K_DIM=k.shape[2], CHUNK_D=_chunk(dim), **launch.options(),
            )  # fmt: skip
        return lse

    def teacher(self, q: torch.Tensor, keys, lse: torch.Tensor, seen: Seen) -> torch.Tensor:
        q, lse = _dense_tokens(q), lse.contiguous()
        queries, heads, dim = q.shape
        out, launch = None, self._launches["head_sums"]
        for some, k, shared, strides in self._key_parts(keys, heads):
            width = k.shape[0]
            first = out is None
            if first:
                out = whole_blocks(q, queries, width, torch.float32)
            blocks, columns = launch.blocks(*out.shape)
            teacher.head_sums[(blocks * columns,)](
                q[:, some], k, shared, lse[some], out, seen.start, seen.end, queries, width,
                some.stop - some.start, lse.stride(0), out.stride(0),
                q.stride(0), dim, *strides, self._scale,
                FIRST=first, DIM=dim, K_DIM=k.shape[2], CHUNK_D=_chunk(dim),
                **launch.options(),
            )  # fmt: skip
        return out

    def loss(
        self, x: IndexerInputs, seen: Seen, teacher: torch.Tensor, lse: torch.Tensor, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = _dense_inputs(x)
        queries, width = x.q.shape[0], x.k.shape[0]
        launch = self._launches["student_loss"]
        blocks, parts = launch.blocks(*teacher.shape)
        parts = x.q.new_empty(parts, queries, dtype=torch.float32)
        dscores = whole_blocks(x.q, queries, width, x.q.dtype) if gradient else None
        student.student_loss[(blocks * parts.shape[0],)](
            x.q, x.k, x.weights, teacher, lse, parts, dscores, seen.start, seen.end, queries, width,
            parts.stride(0), teacher.stride(0), x.q.stride(0), x.weights.stride(0),
            **_sizes(x), **launch.options(),
        )  # fmt: skip
        return parts.sum(), dscores

    def backward(
        self, x: IndexerInputs, seen: Seen, dscores: torch.Tensor, dq: torch.Tensor,
        dweights: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        x = _dense_inputs(x)
        (queries, heads, dim), width = x.q.shape, x.k.shape[0]
        launch = self._launches["query_gradient"]
        gradients.query_gradient[(launch.blocks(queries, width)[0] * heads,)](
            x.q, x.k, dscores, dq, seen.start, seen.end, queries, width, dscores.stride(0),
            x.q.stride(0), **_sizes(x), **launch.options(),
        )  # fmt: skip
        launch = self._launches["key_gradient"]
        blocks, columns = launch.blocks(queries, width)
        weights = dq.new_zeros(heads, dscores.shape[0])
        weights[:, :queries] = torch.where(seen.start < seen.end, x.weights.t(), 0.0)
        dk = dq.new_empty(blocks, width, dim)
        gradients.key_gradient[(blocks * columns,)](
            x.q, x.k, weights, dscores, dk, seen.start, seen.end, queries, width, dscores.stride(0),
            x.q.stride(0), weights.stride(0), **_sizes(x), **launch.options(),
        )  # fmt: skip
        return dk.sum(0)

    def finish(
        self, x: IndexerInputs, seen: Seen, dq: torch.Tensor, out: torch.Tensor,
        dweights: torch.Tensor,
    ) -> None:  # fmt: skip
        x = _dense_inputs(x)
        queries, heads, dim = x.q.shape
        gradients.finish_queries[(queries,)](
            x.q, x.weights, dq, out, dweights, seen.start.contiguous(), seen.end.contiguous(),
            queries, x.q.stride(0), x.weights.stride(0), out.stride(0), dweights.stride(0),
            HEADS=heads, DIM=dim, BLOCK_H=next_power_of_2(heads),
        )  # fmt: skip

    def _key_parts(self, keys: TeacherKeys, heads: int):
        """Yield groups of heads, their key dims, shared key dims, and strides.

        ``k [w, h or 1, K_DIM]``; ``shared [w, DIM - K_DIM]`` is ``k`` without shared dims.
        """
        if isinstance(keys, torch.Tensor):
            keys = _dense_tokens(keys)
            head_stride = keys.stride(1) if keys.shape[1] > 1 else 0
            yield slice(0, heads), keys, keys, (keys.stride(0), head_stride, 0)
            return
        if isinstance(keys, ExpandedKeys):
            k, shared = keys.nope, keys.k_pe
            if k.shape[2] % teacher.CHUNK == 0 and shared.stride(1) == k.stride(2) == 1:
                strides = k.stride(0), k.stride(1), shared.stride(0)
                yield slice(0, heads), k, shared, strides
                return
            for some in slices(heads, self._heads_at_once):
                k = keys.expanded(some)
                yield some, k, k, (k.stride(0), k.stride(1), 0)
            return
        w_uk, latents = keys.w_uk, keys.latents
        dim, rank = w_uk.shape[1:]
        apart = dim % teacher.CHUNK == 0 and latents.stride(1) == 1
        for some in slices(heads, self._heads_at_once):
            if not apart or latents.shape[1] == rank:
                k = keys.expanded(some)
                yield some, k, k, (k.stride(0), k.stride(1), 0)
                continue
            k = latents[:, :rank] @ w_uk[some].flatten(0, 1).t()
            k = k.unflatten(1, (-1, dim))
            shared = latents[:, rank:]
            yield some, k, shared, (k.stride(0), dim, shared.stride(0))


def tile_shape(inputs: DenseLossInputs, copies: bool = False) -> tuple[tuple[int, int], int]:
    heads, longest = inputs.q.shape[1], (LONGEST_EDGE, LONGEST_EDGE)
    costs = tile_bytes(inputs, heads, copies)
    while heads > FEWEST_HEADS and costs(*longest) > inputs.workspace_bytes:
        heads = max(heads // 2, FEWEST_HEADS)
        costs = tile_bytes(inputs, heads, copies)
    return costs.fitting_shape(inputs.workspace_bytes, LONGEST_EDGE, BLOCK), heads


def tile_bytes(inputs: DenseLossInputs, heads_at_once: int, copies: bool = False) -> TileBytes:
    x, q, k = inputs.indexer, inputs.q, inputs.k
    (index_heads, index_dim), (heads, dim) = x.q.shape[1:], q.shape[1:]
    item, gathers = q.element_size(), inputs.layout.key_indices is not None
    # Temporaries per pair: one or two teachers, score gradients, partial key gradients.
    pair = 4 * (1 if inputs.head_group is None else 2) + item + 4 * index_dim // 64
    token = index_heads * index_dim * 4 + 6 * heads * 4
    slot = index_dim * (3 * item + 4)
    fixed = 0
    if isinstance(k, ExpandedKeys):
        slot += gathered_bytes(k) * gathers
        slot += 0 if k.nope.shape[2] % teacher.CHUNK == 0 else heads_at_once * item * dim
    elif isinstance(k, LatentKeys):
        nope, rank = k.w_uk.shape[1:]
        apart = nope % teacher.CHUNK == 0
        slot += heads_at_once * item * (nope if apart else nope + dim)
        slot += k.latents.shape[1] * item * gathers + (k.latents.shape[1] - rank) * item * copies
        fixed = 0 if k.w_uk.is_contiguous() else heads_at_once * nope * rank * item
    else:
        slot += k.shape[1] * dim * item * gathers
    if not _is_dense(q) or not _is_dense(x.q):
        token += heads * dim * item + index_heads * index_dim * item
    elif copies and any(x.tokens.step != 1 for x in inputs.layout.query_ranges):
        token += heads * dim * item
    return TileBytes(pair, token, slot, fixed)


def _sizes(x: IndexerInputs) -> dict:
    return {"RELU": x.relu, "HEADS": x.q.shape[1], "DIM": x.q.shape[2]}


def _chunk(dim: int) -> int:
    return min(teacher.CHUNK, max(16, next_power_of_2(dim)))


def whole_blocks(like: torch.Tensor, queries: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    queries, width = (ceil_div(n, BLOCK) * BLOCK for n in (queries, width))
    return like.new_empty(queries, width, dtype=dtype)


def _is_dense(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _dense_tokens(x: torch.Tensor) -> torch.Tensor:
    return x if _is_dense(x) else x.contiguous()


def _dense_inputs(x: IndexerInputs) -> IndexerInputs:
    weights = x.weights if x.weights.stride(1) == 1 else x.weights.contiguous()
    return IndexerInputs(_dense_tokens(x.q), x.k, weights, x.relu)
