"""Calls of registered operations and the eager calls that they must equal to the bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import megatron_dsa.dsa_kernels as eager
import megatron_dsa.extras.torch_library as ops
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.hyper_connections import api as streams
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys, visible_groups
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout

TOKENS, HEADS, TOPK = 40, 4, 6
#: Packed documents: empty, one token, padding after the second and at the end.
REAL = (0, 9, 9, 10, 25, 33)
PADDED = (0, 9, 9, 12, 27, 36)


@dataclass
class Case:
    """One call.

    Attributes:
        op, eager: the same function; take :attr:`leaves` by name and return tensors.
        leaves: tensors, differentiated if floating.
        rest: other tensors of the call.
    """

    op: Callable[..., Any]
    eager: Callable[..., Any]
    leaves: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor] = field(default_factory=dict)


class Draw:
    """Reproducible random tensors."""

    def __init__(self, dtype: torch.dtype, device: str):
        self.generator = torch.Generator().manual_seed(0)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.device, dtype or self.dtype)

    def lists(self, queries: int, keys: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw lists with invalid ids in the middle and an empty one, and lengths."""
        rows = [torch.randperm(keys, generator=self.generator)[:width] for _ in range(queries)]
        indices = torch.stack(rows).int()
        indices[:, 1], indices[2] = -1, -1
        indices[3, 0] = keys
        length = torch.randint(0, width + 1, (queries,), generator=self.generator).int()
        length[4] = 0
        return indices.to(self.device), length.to(self.device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lengths(packed: bool, device: str) -> dict[str, Any]:
    if not packed:
        return {}
    real, padded = (torch.tensor(x, dtype=torch.int32, device=device) for x in (REAL, PADDED))
    return {"cu_seqlens": real, "cu_seqlens_padded": padded}


def _layout(lengths: dict[str, Any], device: str):
    if not lengths:
        return bshd_layout(TOKENS, 1, torch.device(device))
    real, padded = lengths["cu_seqlens"], lengths["cu_seqlens_padded"]
    return packed_layout(real, TOKENS, 15, padded)


def attention(
    dtype, device, sink=False, p_sum=False, heads=HEADS, dims=(24, 16), keys=30, width=9
) -> Case:
    draw, (dim, v_dim) = Draw(dtype, device), dims
    leaves = {"q": draw(TOKENS, heads, dim), "kv": draw(keys, dim)}
    if sink:
        leaves["attn_sink"] = draw(heads, dtype=torch.float32)
    indices, length = draw.lists(TOKENS, keys, width)
    given = {"softmax_scale": dim**-0.5, "v_dim": v_dim, "want_p_sum": p_sum}

    def call(function):
        def run(q, kv, indices, topk_length, attn_sink=None):
            found = function(q, kv, indices, topk_length=topk_length, attn_sink=attn_sink, **given)
            return found if p_sum else found[:2]

        return run

    rest = {"indices": indices, "topk_length": length}
    return Case(call(ops.sparse_attention), call(eager.sparse_attention), leaves, rest)


def _index(draw: Draw, keys: int, heads: int = 3, dim: int = 8) -> dict[str, torch.Tensor]:
    return {"q": draw(TOKENS, heads, dim), "k": draw(keys, dim), "weights": draw(TOKENS, heads)}


def selection(dtype, device, packed=False, ratio=1, relu=True, sizes=()) -> Case:
    draw, lengths = Draw(dtype, device), _lengths(packed, device)
    bound = {"max_seqlen": 15} if packed else {}

    def op(q, k, weights, **lengths):
        return ops.indexer_topk(q, k, weights, TOPK, **lengths, **bound, ratio=ratio, relu=relu)

    def plain(q, k, weights, **lengths):
        layout = _layout(lengths, device)
        layout = layout if ratio == 1 else visible_groups(layout, ratio)
        return eager.indexer_topk(eager.IndexerInputs(q, k, weights, relu), layout, TOPK)

    return Case(op, plain, _index(draw, TOKENS // ratio, *sizes), lengths)


def sparse_loss(dtype, device, relu=True, sizes=()) -> Case:
    draw = Draw(dtype, device)
    indices, length = draw.lists(TOKENS, TOKENS, 9)
    teacher = draw(TOKENS, 9, dtype=_wide(dtype)).abs()
    rest = {"indices": indices, "topk_length": length, "teacher": teacher}

    def op(q, k, weights, indices, topk_length, teacher):
        return (
            ops.sparse_indexer_loss(
                q, k, weights, indices, teacher, topk_length=topk_length, relu=relu
            ),
        )

    def plain(q, k, weights, indices, topk_length, teacher):
        inputs = eager.IndexerInputs(q, k, weights, relu)
        layout = bshd_layout(TOKENS, 1, q.device)
        return (
            eager.sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=topk_length),
        )

    return Case(op, plain, _index(draw, TOKENS, *sizes), rest)


def dense_loss(dtype, device, packed=False, ratio=1, keys="one head") -> Case:
    draw, lengths = Draw(dtype, device), _lengths(packed, device)
    count = TOKENS // ratio
    rest = {"q_main": draw(TOKENS, HEADS, 12)}
    if keys == "latents":
        rest |= {"k_main": draw(count, 9 + 4), "w_uk": draw(HEADS, 8, 9)}
    elif keys == "expanded":
        rest |= {"k_main": draw(count, HEADS, 8 + 5), "k_pe": draw(count, 4)}
    else:
        rest["k_main"] = draw(count, 1, 12)
    if ratio > 1:
        rest["other_lse"] = draw(TOKENS, HEADS, dtype=_wide(dtype))
    bound = {"max_seqlen": 15} if packed else {}

    def teacher_keys(k_main, w_uk=None, k_pe=None):
        if w_uk is not None:
            return eager.LatentKeys(k_main, w_uk)
        return k_main if k_pe is None else eager.ExpandedKeys(k_main, k_pe, 5)

    def op(q, k, weights, q_main, k_main, w_uk=None, k_pe=None, other_lse=None, **lengths):
        return (
            ops.dense_indexer_loss(
                q, k, weights, q_main, teacher_keys(k_main, w_uk, k_pe), softmax_scale=0.3,
                other_lse=other_lse, ratio=ratio, **lengths, **bound,
            ),
        )  # fmt: skip

    def plain(q, k, weights, q_main, k_main, w_uk=None, k_pe=None, other_lse=None, **lengths):
        layout = _layout(lengths, device)
        layout = layout if ratio == 1 else visible_groups(layout, ratio)
        return (
            eager.dense_indexer_loss(
                eager.IndexerInputs(q, k, weights), q_main, teacher_keys(k_main, w_uk, k_pe),
                layout, softmax_scale=0.3, other_lse=other_lse,
            ),
        )  # fmt: skip

    return Case(op, plain, _index(draw, count), rest | lengths)


def bits(dtype, device) -> Case:
    indices, length = Draw(dtype, device).lists(TOKENS, 30, 9)

    def call(function):
        return lambda indices, topk_length: (function(indices, topk_length, 30),)

    rest = {"indices": indices, "topk_length": length}
    return Case(call(ops.key_bits), call(eager.key_bits), {}, rest)


def all_bits(dtype, device, packed=False) -> Case:
    lengths = _lengths(packed, device)
    rest = {"tokens": Draw(dtype, device)(TOKENS, 2)} | lengths

    def op(tokens, **lengths):
        return (ops.visible_bits(tokens, **lengths),)

    def plain(tokens, **lengths):
        return (eager.visible_bits(_layout(lengths, device)),)

    return Case(op, plain, {}, rest)


def v4_lists(dtype, device, packed=False, ratio=4, selects=False) -> Case:
    draw, lengths = Draw(dtype, device), _lengths(packed, device)
    rest = {"tokens": draw(TOKENS, 2)} | lengths
    bound = {"max_seqlen": 15} if packed else {}
    if selects:
        index = _index(draw, TOKENS // ratio)
        found = ops.indexer_topk(**index, topk=3, ratio=ratio, **lengths, **bound)
        rest["selected"], rest["selected_length"] = found

    def op(tokens, selected=None, selected_length=None, **lengths):
        return ops.key_lists(
            tokens, 5, ratio=ratio, selected=selected, selected_length=selected_length,
            **lengths, **bound,
        )  # fmt: skip

    def plain(tokens, selected=None, selected_length=None, **lengths):
        layout = _layout(lengths, device)
        compressed = compressed_keys(layout, ratio) if ratio else None
        lists = KeyLists(layout, 5, compressed, selected, selected_length)
        (block,) = lists.blocks(Policy())
        padding = (0, lists.full_width - block[1].shape[1])
        return torch.nn.functional.pad(block[1], padding, value=-1), block[2]

    return Case(op, plain, {}, rest)


def masked(dtype, device, p_sum=False, heads=HEADS, nope=8, rope=4, v_dim=6) -> Case:
    draw = Draw(dtype, device)
    indices, length = draw.lists(TOKENS, 30, 9)
    leaves = {
        "q": draw(TOKENS, heads, nope + rope), "kv": draw(30, heads, nope + v_dim),
        "k_pe": draw(30, rope),
    }  # fmt: skip

    def call(function):
        def run(q, kv, k_pe, bits):
            found = function(q, kv, k_pe, bits, softmax_scale=0.3, topk=9, want_p_sum=p_sum)
            return found if p_sum else found[:2]

        return run

    made = eager.key_bits(indices, length, 30)
    return Case(call(ops.masked_attention), call(eager.masked_attention), leaves, {"bits": made})


def compressor(dtype, device, packed=False, overlap=True) -> Case:
    draw, lengths = Draw(dtype, device), _lengths(packed, device)
    width, ratio = (12 if overlap else 6), 4
    leaves = {
        "values": draw(TOKENS, width), "scores": draw(TOKENS, width),
        "ape": draw(ratio, width, dtype=_wide(dtype)),
    }  # fmt: skip

    def op(values, scores, ape, **lengths):
        return (ops.compress(values, scores, ape, overlap=overlap, **lengths),)

    def plain(values, scores, ape, **lengths):
        keys = compressed_keys(_layout(lengths, device), ratio, overlap)
        return (compress(values, scores, ape, keys, overlap=overlap),)

    return Case(op, plain, leaves, lengths)


def _connection(draw: Draw, n: int, outputs: int, scales: int) -> dict[str, torch.Tensor]:
    wide = _wide(draw.dtype)
    return {
        "streams": draw(TOKENS, n, 16), "fn": draw(outputs, n * 16, dtype=wide),
        "base": draw(outputs, dtype=wide), "scale": draw(scales, dtype=wide), "weight": draw(16),
    }  # fmt: skip


def stream_read(dtype, device) -> Case:
    def call(function):
        def run(streams, fn, base, scale, weight):
            connection = ops.Connection(fn, base, scale, 1e-6, 1e-5, 3)
            normed, _, post, comb = function(streams, connection, weight)
            return normed, post, comb

        return run

    leaves = _connection(Draw(dtype, device), 4, 24, 3)
    return Case(call(ops.read_streams), call(streams.read_streams), leaves)


def stream_head(dtype, device) -> Case:
    def call(function):
        def run(streams, fn, base, scale, weight):
            return (function(streams, ops.Connection(fn, base, scale, 1e-6, 1e-5), weight),)

        return run

    leaves = _connection(Draw(dtype, device), 4, 4, 1)
    return Case(call(ops.read_head), call(streams.read_head), leaves)


def stream_write(dtype, device) -> Case:
    draw, wide = Draw(dtype, device), _wide(dtype)
    leaves = {
        "output": draw(TOKENS, 16), "streams": draw(TOKENS, 4, 16),
        "post": draw(TOKENS, 4, dtype=wide), "comb": draw(TOKENS, 4, 4, dtype=wide),
    }  # fmt: skip

    def call(function):
        def run(output, streams, post, comb):
            return (function(output, ops.StreamsRead(output, streams, post, comb)),)

        return run

    return Case(call(ops.write_streams), call(streams.write_streams), leaves)


def stream_layer(dtype, device) -> Case:
    """Run a read, a layer and the write: streams get two gradients."""
    leaves = _connection(Draw(dtype, device), 4, 24, 3)

    def call(read, write):
        def run(streams, fn, base, scale, weight):
            found = read(streams, ops.Connection(fn, base, scale, 1e-6, 1e-5, 3), weight)
            return (write(found.normed.tanh(), found),)

        return run

    ours = call(ops.read_streams, ops.write_streams)
    return Case(ours, call(streams.read_streams, streams.write_streams), leaves)


#: Name -> builder of the case, given dtype and device.
CASES: dict[str, Callable[..., Case]] = {
    "sparse_attention": attention,
    "sparse_attention, sink and p_sum": lambda *a: attention(*a, sink=True, p_sum=True),
    "indexer_topk": selection,
    "indexer_topk, packed": lambda *a: selection(*a, packed=True),
    "indexer_topk, compressed": lambda *a: selection(*a, ratio=4, relu=False),
    "indexer_topk, compressed and packed": lambda *a: selection(*a, packed=True, ratio=4),
    "sparse_indexer_loss": sparse_loss,
    "sparse_indexer_loss, without relu": lambda *a: sparse_loss(*a, relu=False),
    "dense_indexer_loss": dense_loss,
    "dense_indexer_loss, packed, latents": lambda *a: dense_loss(*a, packed=True, keys="latents"),
    "dense_indexer_loss, expanded": lambda *a: dense_loss(*a, keys="expanded"),
    "dense_indexer_loss, compressed": lambda *a: dense_loss(*a, packed=True, ratio=4),
    "key_bits": bits,
    "visible_bits": all_bits,
    "visible_bits, packed": lambda *a: all_bits(*a, packed=True),
    "key_lists, window": lambda *a: v4_lists(*a, ratio=0),
    "key_lists, all compressed, packed": lambda *a: v4_lists(*a, packed=True),
    "key_lists, all compressed": v4_lists,
    "key_lists, selected": lambda *a: v4_lists(*a, packed=True, selects=True),
    "masked_attention": masked,
    "masked_attention, p_sum": lambda *a: masked(*a, p_sum=True),
    "compress": compressor,
    "compress, packed": lambda *a: compressor(*a, packed=True),
    "compress, packed, no overlap": lambda *a: compressor(*a, packed=True, overlap=False),
    "read_streams": stream_read,
    "read_head": stream_head,
    "write_streams": stream_write,
    "read and write": stream_layer,
}

#: V3.2's sizes, with fused kernels.
RELEASED: dict[str, Callable[..., Case]] = {
    "sparse_attention": lambda *a: attention(
        *a, p_sum=True, heads=16, dims=(576, 512), keys=300, width=128
    ),
    "indexer_topk": lambda *a: selection(*a, sizes=(64, 128)),
    "sparse_indexer_loss": lambda *a: sparse_loss(*a, sizes=(64, 128)),
    "masked_attention": lambda *a: masked(*a, heads=16, nope=128, rope=64, v_dim=128),
}
