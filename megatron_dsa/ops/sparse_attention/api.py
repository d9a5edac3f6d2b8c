"""Differentiable sparse attention."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import (
    accumulation_dtype,
    items_within,
    part_of,
    slices,
)
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.checks import (
    FLOATS,
    require_layout,
    require_lists,
    require_scale,
    require_sink,
    require_tensor,
    require_values,
)
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.dispatch import Operation, Policy, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_loss.sample import QuerySample
from megatron_dsa.ops.indexer_loss.training import (
    IndexerTraining,
    Taught,
    TeacherPart,
    separate_tensors,
)
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.sparse_attention.spec import (
    BACKWARD,
    FORWARD,
    PROBABILITIES,
    SparseAttentionInputs,
)


class SparseAttentionOutput(NamedTuple):
    #: Output ``[Sq, H, v_dim]`` in q's dtype; 0 for queries without keys.
    out: torch.Tensor
    #: ``[Sq, H]`` fp32, natural log-sum-exp without the sink; ``-inf`` for queries without keys.
    lse: torch.Tensor
    #: ``[Sq, K]`` fp32, probabilities summed over local heads, 0 at invalid entries, or ``None``.
    p_sum: torch.Tensor | None


@lru_cache(maxsize=64)
def _teaching(call: OpCall) -> OpCall:
    return replace(call, teacher=True)


@dataclass(frozen=True)
class Settings:
    """Non-tensor arguments of the sparse attention function."""

    v_dim: int
    softmax_scale: float
    policy: Policy
    call: OpCall
    want_p_sum: bool
    indexer: Taught | None
    lists: KeyLists | None = None
    in_order: bool = False
    length_in_range: bool = False

    def inputs(self, q, kv, sink, indices, length, want_p_sum: bool) -> SparseAttentionInputs:
        return SparseAttentionInputs(
            q=q,
            kv=kv,
            indices=indices,
            v_dim=self.v_dim,
            softmax_scale=self.softmax_scale,
            topk_length=length,
            sink=sink,
            workspace_bytes=self.policy.workspace_bytes,
            want_p_sum=want_p_sum,
            in_order=self.in_order,
            length_in_range=self.length_in_range,
        )

    def run(self, operation: Operation, *args, teacher: bool = False) -> Any:
        call = _teaching(self.call) if teacher else self.call
        return operation.run(call, self.policy, *args)

    def blocks(self, indices, length) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
        if self.lists is None:
            yield slice(None), indices, length
        else:
            lists = replace(self.lists, selected=indices, selected_length=length)
            yield from lists.blocks(self.policy)

    def list_of(self, tokens: slice, indices, length) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the key lists of a slice of tokens, and their lengths."""
        assert self.lists is not None
        lists = replace(self.lists, selected=indices, selected_length=length)
        return lists.of(tokens, self.policy)

    def sampled_lists(self, taken: torch.Tensor, indices, length) -> Iterator[Any]:
        """Yield the key lists of sampled tokens in parts that fit the workspace."""
        width = indices.shape[1] + (0 if self.lists is None else self.lists.window)
        for some in slices(len(taken), items_within(self.policy.workspace_bytes // 8, 8 * width)):
            of_some = None if length is None else part_of(length, some)
            if self.lists is None:
                yield some, part_of(indices, some), of_some
            else:
                selected = part_of(taken, some), part_of(indices, some), of_some
                yield some, *self.lists.of_some(*selected, self.policy)

    def teacher_columns(self, p_sum, indices, tokens: slice) -> torch.Tensor:
        if self.lists is None:
            return p_sum
        # Window keys fill the columns that selected keys leave unused.
        valid = indices[tokens] >= 0
        return p_sum[:, : valid.shape[1]].masked_fill(~valid, 0.0)

    def loss_teacher(self, p_sum, indices) -> torch.Tensor:
        return p_sum if self.lists is None else p_sum[:, : indices.shape[1]].contiguous()


def put_tokens(whole: torch.Tensor | None, part: torch.Tensor | None, tokens: slice, total: int):
    """Write ``part`` to ``tokens`` of ``whole``; return ``part`` itself if it has all tokens.

    ``len(part)`` would make torch.compile build a graph per size.
    """
    if part is None or part.shape[0] == total:
        return None if part is None else part.contiguous()
    if whole is None:
        whole = part.new_empty(total, *part.shape[1:])
    whole[tokens] = part
    return whole


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, kv_grad, sink, indices, length, s: Settings, *index_tensors):
        out: Any = None
        lse: Any = None
        p_sum = None
        for tokens, listed, count in s.blocks(indices, length):
            inputs = s.inputs(part_of(q, tokens), kv, sink, listed, count, s.want_p_sum)
            part, part_lse, part_p_sum = s.run(FORWARD, inputs)
            if s.want_p_sum:
                if part_p_sum is None:
                    part_p_sum = s.run(PROBABILITIES, inputs, part_lse)
                p_sum = put_tokens(
                    p_sum, s.teacher_columns(part_p_sum, indices, tokens), tokens, q.shape[0]
                )
            out = put_tokens(out, part, tokens, q.shape[0])
            lse = put_tokens(lse, part_lse, tokens, q.shape[0])
        ctx.save_for_backward(q, kv, sink, indices, length, out, lse, *index_tensors)
        ctx.settings = s
        ctx.separate_kv_grad = kv_grad is not None
        ctx.mark_non_differentiable(*(x for x in (lse, p_sum) if x is not None))
        ctx.set_materialize_grads(False)
        return out, lse, p_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse, _dp_sum) -> tuple[torch.Tensor | None, ...]:
        s: Settings = ctx.settings
        q, kv, sink, indices, length, out, lse, *index_tensors = ctx.saved_tensors
        dout = (torch.zeros_like(out) if dout is None else dout).contiguous()
        indexer = s.indexer if any(ctx.needs_input_grad[7:]) else None
        sample = None if indexer is None else indexer.sample(len(q), q.device)
        wants_p_sum = indexer is not None and sample is None and not indexer.selected_only
        dq = dsink = teacher = None
        dkv: Any = None
        for tokens, listed, count in s.blocks(indices, length):
            inputs = s.inputs(part_of(q, tokens), kv, sink, listed, count, wants_p_sum)
            of_block = (part_of(x, tokens) for x in (out, lse, dout))
            part_dq, part_dkv, part_dsink, p_sum = s.run(
                BACKWARD, inputs, *of_block, teacher=wants_p_sum
            )
            dq = put_tokens(dq, part_dq, tokens, q.shape[0])
            dkv = part_dkv if dkv is None else dkv.add_(part_dkv)
            if part_dsink is not None:
                dsink = part_dsink if dsink is None else dsink + part_dsink
            if wants_p_sum:
                if p_sum is None:
                    p_sum = s.run(PROBABILITIES, inputs, lse[tokens])
                teacher = put_tokens(teacher, s.loss_teacher(p_sum, indices), tokens, q.shape[0])
        index_grads: tuple[torch.Tensor | None, ...] = (None,) * len(index_tensors)
        if indexer is not None:
            parts: Iterable[TeacherPart]
            if indexer.selected_only:
                if sample is not None:
                    q, indices, length = select_tokens(sample.tokens, q, indices, length)
                teacher = teacher_among(s, q, kv, indices, length)
                parts = [TeacherPart(slice(0, len(q)), indices, length, teacher)]
            elif sample is not None:
                parts = _sampled_teachers(s, sample, q, kv, sink, indices, length, lse)
            else:
                assert teacher is not None
                parts = [TeacherPart(slice(None), indices, length, teacher)]
            index_grads = indexer.gradients(index_tensors, parts, s.policy, sample)
        if dsink is not None:
            dsink = dsink.to(sink.dtype)
        to_kv, to_proxy = (None, dkv) if ctx.separate_kv_grad else (dkv.to(kv.dtype), None)
        return dq, to_kv, to_proxy, dsink, None, None, None, *index_grads


def teacher_among(s: Settings, q, kv, indices, length) -> torch.Tensor:
    """Return the head sum of a softmax over selected keys only."""
    call = replace(s.call, topk=indices.shape[1], sink=False)
    s = replace(s, call=call, length_in_range=False)
    inputs = s.inputs(q, kv, None, indices, length, True)
    _, lse, p_sum = s.run(FORWARD, inputs)
    return s.run(PROBABILITIES, inputs, lse) if p_sum is None else p_sum


def _sampled_teachers(
    s: Settings, sample: QuerySample, q, kv, sink, indices, length, lse
) -> Iterator[TeacherPart]:
    q, indices, length, lse = select_tokens(sample.tokens, q, indices, length, lse)
    for some, listed, count in s.sampled_lists(sample.tokens, indices, length):
        inputs = s.inputs(part_of(q, some), kv, sink, listed, count, True)
        teacher = s.loss_teacher(s.run(PROBABILITIES, inputs, part_of(lse, some)), indices)
        of_part = None if length is None else part_of(length, some)
        yield TeacherPart(some, part_of(indices, some), of_part, teacher)


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor | KeyLists,
    *,
    softmax_scale: float,
    v_dim: int,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    kv_grad: torch.Tensor | None = None,
    want_p_sum: bool = False,
    in_order: bool = False,
    indexer: Taught | None = None,
    policy: Policy = Policy(),
) -> SparseAttentionOutput:
    """Attend from each query to its list of keys; all heads share one key/value head.

    Args:
        q: ``[Sq, H, D]``, bf16, fp16, fp32 or fp64.
        kv: ``[Skv, D]``, same dtype; the first ``v_dim`` columns are the value (absorbed MLA).
        indices: int32 ``[Sq, K]``, unique key indices per query, the only mask; entries ``< 0`` or
            ``>= Skv`` select nothing. V4 passes
            :class:`~megatron_dsa.ops.key_lists.api.KeyLists`.
        softmax_scale: factor on ``q . kv``.
        topk_length: int32 ``[Sq]``: entries used per list; ``None``: all.
        attn_sink: ``[H]``, a logit without a value per head (DeepSeek-V4): ``out = out_keys *
            sigmoid(lse - sink)``.
        kv_grad: fp32 ``[Skv, D]``: receives the unrounded gradient instead of ``kv``.
        want_p_sum: also return the probabilities, summed over heads.
        in_order: all lists share one key order, as from ``indexer_topk``: the backward skips a
            sort.
        indexer: indexer that the backward trains on these probabilities.

    Returns:
        ``out`` is differentiable in q, kv and attn_sink.

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    require_scale(softmax_scale)
    check_queries_and_keys(q, kv, v_dim, attn_sink)
    lists: KeyLists | None = None
    selected: torch.Tensor | None
    if isinstance(indices, KeyLists):
        lists = indices
        check_lists(lists, q, kv, topk_length, want_p_sum or indexer is not None)
        width = lists.full_width
        selected, topk_length = lists.selected, lists.selected_length
        lists, in_order = replace(lists, selected=None, selected_length=None), True
    else:
        require_lists(indices, q, topk_length)
        selected, width = indices, indices.shape[1]
    require_kv_grad(kv_grad, kv)
    call = describe_attention(q, v_dim, width, attn_sink)
    require_one_head_part(indexer)
    indexer, trained = separate_tensors(indexer, q=q)
    settings = Settings(
        v_dim, softmax_scale, policy, call, want_p_sum, indexer, lists, in_order,
        length_in_range=lists is not None,
    )  # fmt: skip
    tensors = (q, kv, kv_grad, attn_sink, selected, topk_length)
    return SparseAttentionOutput(*_SparseAttention.apply(*tensors, settings, *trained))


def check_queries_and_keys(
    q: torch.Tensor, kv: torch.Tensor, v_dim: int, attn_sink: torch.Tensor | None
) -> None:
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    require_tensor("kv", kv, ("Skv", q.shape[2]), (q.dtype,), q, "give it the D of q")
    require(
        0 < v_dim <= kv.shape[1],
        f"v_dim must be in [1, {kv.shape[1]}] (the value is a slice of kv), got {v_dim}",
    )
    require_sink(attn_sink, q)


def describe_attention(
    q: torch.Tensor, v_dim: int, width: int, attn_sink: torch.Tensor | None
) -> OpCall:
    return describe_call(
        q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        qk_dim=q.shape[2],
        v_dim=v_dim,
        topk=width,
        sink=attn_sink is not None,
    )


def require_kv_grad(kv_grad: torch.Tensor | None, kv: torch.Tensor) -> None:
    if kv_grad is not None:
        fix = "pass the proxy that megatron_dsa.layers.parallel.gather.finish_with_proxy returned"
        wanted = accumulation_dtype(kv.dtype)
        require_tensor("kv_grad", kv_grad, tuple(kv.shape), (wanted,), kv, fix)


def require_one_head_part(indexer: Taught | None) -> None:
    require(
        not isinstance(indexer, IndexerTraining) or indexer.head_parts == 1,
        "indexer.head_parts must be 1: this attention sums the probabilities of all heads; drop it",
    )


def check_lists(lists: KeyLists, q, kv, topk_length, wants_teacher: bool) -> None:
    first = lists.offset
    # A partial ``kv`` cannot match the layout's keys.
    keys = {} if lists.held is not None else {f"kv[{first}:]" if first else "kv": kv[first:]}
    require_layout(lists.layout, {"q": q}, keys)
    require(topk_length is None, "topk_length must be None: lists have their own lengths")
    require(
        not wants_teacher or lists.selected is not None,
        "want_p_sum and indexer need lists with a selection: without one, use dense_indexer_loss",
    )
    if lists.selected is not None and not lists.checked and lists.selected.numel() > 0:
        # Slot numbers past the compressed keys would select uncompressed keys.
        rule = f"lists.selected must be compressed slots below {lists.offset}, or -1"
        fine = lists.selected.amax() < lists.offset
        require_values({f"{rule}: select with lists.compressed.layout": fine}, rule)
