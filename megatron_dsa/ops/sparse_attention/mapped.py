"""Sparse attention between maps of its queries and outputs, a block of tokens at a time.

Queries, outputs per head and their gradients exist for one block; the backward computes them again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, part_of, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.checks import FLOATS, require_scale, require_tensor
from megatron_dsa.ops.common.collectives import all_gather_async, reduce_scatter_async
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.hopper.sums import largest
from megatron_dsa.ops.indexer_loss.training import (
    IndexerTraining,
    Taught,
    TeacherPart,
    separate_tensors,
)
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.sparse_attention.api import (
    Settings,
    SparseAttentionOutput,
    check_lists,
    put_tokens,
    require_kv_grad,
    require_one_head_part,
    teacher_among,
)
from megatron_dsa.ops.sparse_attention.blocks import token_blocks
from megatron_dsa.ops.sparse_attention.spec import (
    BACKWARD,
    FORWARD,
    PROBABILITIES,
    KeyGradientAccumulator,
)

#: Fewest tokens of a block on a GPU: each block adds gradients of all weights in fp32.
LEAST_TOKENS = 4096
#: Tokens of a slice, or of int64 ``[n]``.
Tokens = slice | torch.Tensor
Map = Callable[[torch.Tensor, torch.Tensor, Tokens], torch.Tensor]


@dataclass(frozen=True, eq=False)
class MappedQueries:
    """Queries ``[Sq, H, D]``, computed from latents, and the map of their attention outputs.

    Attributes:
        latents: ``[Sq, L]``.
        query_weight, output_weight: second arguments of the maps.
        to_queries: maps latents ``[n, L]``, its weight and their tokens to ``[n, H, D]``.
        to_outputs: maps attention outputs ``[n, H, D]``, its weight and their tokens to ``[n, N]``;
            linear in the outputs. Both are differentiable in the first two arguments.
        heads, dim: H and D.
        group: ranks that have different tokens, and equal parts of the first dim of both weights;
            forward and backward gather the weights.
    """

    latents: torch.Tensor
    query_weight: torch.Tensor
    output_weight: torch.Tensor
    to_queries: Map
    to_outputs: Map
    heads: int
    dim: int
    group: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.latents), self.heads, self.dim

    @property
    def device(self) -> torch.device:
        return self.latents.device

    @property
    def dtype(self) -> torch.dtype:
        return self.latents.dtype

    @torch.no_grad()
    def __getitem__(self, tokens: Tokens) -> torch.Tensor:
        """Return the queries of some tokens, without gradient."""
        if isinstance(tokens, slice):
            latents = part_of(self.latents, tokens)
        else:
            (latents,) = select_tokens(tokens, self.latents)
        weight = all_gather_async(self.query_weight, self.group).wait()
        return self.to_queries(latents, weight, tokens)

    def gathered(self) -> "MappedQueries":
        """Return the same with the weights of all ranks, detached."""
        if self.group is None:
            return self
        weights = self.query_weight, self.output_weight
        travelling = [all_gather_async(x, self.group) for x in weights]
        query_weight, output_weight = (x.wait() for x in travelling)
        return replace(self, query_weight=query_weight, output_weight=output_weight, group=None)

    def of(self, latents, query_weight, output_weight) -> "MappedQueries":
        return replace(
            self, latents=latents, query_weight=query_weight, output_weight=output_weight
        )


@dataclass(frozen=True)
class _Plan:
    """Non-tensor arguments; ``queries`` has empty tensors."""

    attention: Settings
    blocks: tuple[slice, ...]
    queries: MappedQueries


class _MappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, latents, kv, kv_grad, w_query, w_output, sink, indices, length, p, *index_tensors
    ):
        queries, s = p.queries.of(latents, w_query, w_output).gathered(), p.attention
        result: Any = None
        lse: Any = None
        for tokens in p.blocks:
            listed, count = s.list_of(tokens, indices, length)
            inputs = s.inputs(queries[tokens], kv, sink, listed, count, False)
            out, part_lse, _ = s.run(FORWARD, inputs)
            part = queries.to_outputs(out, queries.output_weight, tokens)
            result = put_tokens(result, part, tokens, len(latents))
            lse = put_tokens(lse, part_lse, tokens, len(latents))
            del inputs, out, part
        ctx.save_for_backward(
            latents, kv, w_query, w_output, sink, indices, length, lse, *index_tensors
        )
        ctx.plan, ctx.separate_kv_grad = p, kv_grad is not None
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return result, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _dlse) -> tuple[torch.Tensor | None, ...]:
        p: _Plan = ctx.plan
        latents, kv, w_query, w_output, sink, indices, length, lse, *rest = ctx.saved_tensors
        queries, s = p.queries.of(latents, w_query, w_output).gathered(), p.attention
        indexer = s.indexer if any(ctx.needs_input_grad[9:]) else None
        sample = None if indexer is None else indexer.sample(len(latents), latents.device)
        wanted = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:5]
        backward = _Backward(p, queries, kv, sink, indices, length, lse, grad, wanted)
        teaches = indexer is not None and sample is None and not indexer.selected_only
        for tokens in p.blocks:
            backward.run(tokens, teaches)
        index_grads: tuple[torch.Tensor | None, ...] = (None,) * len(rest)
        if indexer is not None:
            parts: Iterable[TeacherPart]
            if teaches:
                parts = [TeacherPart(slice(None), indices, length, backward.teacher)]
            elif sample is None:
                every = torch.arange(len(latents), device=latents.device)
                parts = backward.teachers(indexer, every)
            else:
                parts = backward.teachers(indexer, sample.tokens)
            index_grads = indexer.gradients(rest, parts, s.policy, sample)
        travelling = [
            None if x is None else reduce_scatter_async(x, p.queries.group)
            for x in (backward.dquery, backward.doutput)
        ]
        dkv = backward.keys.result()
        dquery, doutput = (
            None if x is None else x.wait().to(weight.dtype)
            for x, weight in zip(travelling, (w_query, w_output), strict=True)
        )
        to_kv, to_proxy = (None, dkv) if ctx.separate_kv_grad else (dkv.to(kv.dtype), None)
        dsink = None if sink is None else backward.dsink.to(sink.dtype)
        return (
            backward.dlatents, to_kv, to_proxy, dquery, doutput, dsink, None, None, None,
            *index_grads,
        )  # fmt: skip


class _Backward:
    def __init__(
        self, plan: _Plan, queries: MappedQueries, kv, sink, indices, length, lse, grad, wanted
    ):
        self.plan, self.queries, self.grad, self.wanted = plan, queries, grad, wanted
        self.kv, self.sink, self.lse = kv, sink, lse
        self.indices, self.length = indices, length
        # A bound method would keep buffers alive in a reference cycle.
        self.keys = KeyGradientAccumulator(lse.numel(), partial(_bounds, plan, queries, grad))
        self.dlatents = torch.empty_like(queries.latents) if wanted[0] else None
        self.dquery, self.doutput = (
            x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) if is_wanted else None
            for x, is_wanted in zip(
                (queries.query_weight, queries.output_weight), wanted[1:], strict=True
            )
        )
        self.dsink: Any = None
        self.teacher: Any = None

    def run(self, tokens: slice, teaches: bool) -> None:
        s, x = self.plan.attention, self.queries
        latents = part_of(x.latents, tokens).detach().requires_grad_(self.wanted[0])
        w_query = x.query_weight.detach().requires_grad_(self.wanted[1])
        with torch.enable_grad():
            q = x.to_queries(latents, w_query, tokens)
        listed, count = s.list_of(tokens, self.indices, self.length)
        inputs = s.inputs(q.detach(), self.kv, self.sink, listed, count, teaches)
        out = s.run(FORWARD, inputs)[0].detach().requires_grad_()
        w_output = x.output_weight.detach().requires_grad_(self.wanted[2])
        dout, *doutput = _output_gradients(x, self.grad, tokens, out, w_output)
        lse, inputs = self.lse[tokens], replace(inputs, key_sum=self.keys)
        dq, dkv, dsink, p_sum = s.run(BACKWARD, inputs, out.detach(), lse, dout, teacher=teaches)
        self.keys.add(dkv)
        if dsink is not None:
            self.dsink = dsink if self.dsink is None else self.dsink + dsink
        leaves = [leaf for leaf in (latents, w_query) if leaf.requires_grad]
        grads = list(torch.autograd.grad(q, leaves, dq) if leaves else ())
        if self.dlatents is not None:
            self.dlatents[tokens] = grads.pop(0)
        if self.dquery is not None:
            self.dquery.add_(grads.pop())
        if self.doutput is not None:
            self.doutput.add_(doutput.pop())
        if teaches:
            if p_sum is None:
                p_sum = s.run(PROBABILITIES, inputs, lse)
            taught = s.loss_teacher(p_sum, self.indices)
            self.teacher = put_tokens(self.teacher, taught, tokens, len(self.lse))

    def teachers(self, indexer: Taught, tokens: torch.Tensor) -> Iterator[TeacherPart]:
        """Yield the teacher of some tokens, int64 ``[n]``."""
        s, longest = self.plan.attention, max(1, self.plan.blocks[0].stop)
        assert s.lists is not None
        for some in slices(len(tokens), longest):
            taken = tokens[some]
            indices, length, lse = select_tokens(taken, self.indices, self.length, self.lse)
            q = self.queries[taken]
            if indexer.selected_only:
                teacher = teacher_among(s, q, self.kv, indices, length)
            else:
                listed, count = s.lists.of_some(taken, indices, length, s.policy)
                inputs = s.inputs(q, self.kv, self.sink, listed, count, True)
                teacher = s.loss_teacher(s.run(PROBABILITIES, inputs, lse), indices)
            yield TeacherPart(some, indices, length, teacher)
            del q, teacher


def _output_gradients(
    queries: MappedQueries, grad, tokens: slice, out: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [x for x in (out, weight) if x.requires_grad]
    with torch.enable_grad():
        result = queries.to_outputs(out, weight, tokens)
    grad = torch.zeros_like(result) if grad is None else grad[tokens]
    return list(torch.autograd.grad(result, leaves, grad))


def _bounds(plan: _Plan, queries: MappedQueries, grad) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest ``|q|`` and ``|dout|``, for deterministic sums."""
    weight, of_queries, of_outputs = queries.output_weight.detach(), [], []
    for tokens in plan.blocks:
        q = queries[tokens]
        out = q.new_zeros(*q.shape[:2], plan.attention.v_dim).requires_grad_()
        (dout,) = _output_gradients(queries, grad, tokens, out, weight)
        of_queries.append(largest(q))
        of_outputs.append(largest(dout))
    return torch.stack(of_queries).amax(), torch.stack(of_outputs).amax()


def mapped_attention(
    q: MappedQueries,
    kv: torch.Tensor,
    lists: KeyLists,
    *,
    softmax_scale: float,
    v_dim: int,
    attn_sink: torch.Tensor | None = None,
    kv_grad: torch.Tensor | None = None,
    indexer: Taught | None = None,
    policy: Policy = Policy(),
) -> SparseAttentionOutput:
    """Return ``q.to_outputs`` of sparse attention as ``out [Sq, N]``, and ``lse [Sq, H]``.

    For the other arguments and errors see
    :func:`~megatron_dsa.ops.sparse_attention.api.sparse_attention`. ``out`` is differentiable in
    latents, both weights, kv and attn_sink.
    """
    require_scale(softmax_scale)
    require_tensor("kv", kv, ("Skv", q.dim), (q.dtype,), q.latents, "give it the dim of q")
    fix = "give one logit per head"
    if attn_sink is not None:
        require_tensor("attn_sink", attn_sink, (q.heads,), FLOATS, q.latents, fix)
    check_lists(lists, q, kv, None, indexer is not None)
    require_kv_grad(kv_grad, kv)
    require_one_head_part(indexer)
    call = describe_call(
        q.device, dtype=q.dtype, heads=q.heads, qk_dim=q.dim, v_dim=v_dim, topk=lists.full_width,
        sink=attn_sink is not None,
    )  # fmt: skip
    indexer, trained = separate_tensors(indexer, q=q.latents)
    selected, length = lists.selected, lists.selected_length
    attention = Settings(
        v_dim, softmax_scale, policy, call, False, indexer,
        replace(lists, selected=None, selected_length=None), in_order=True, length_in_range=True,
    )  # fmt: skip
    kernel_heads = FORWARD.choose(call, policy).candidate.support.kernel_heads(q.heads)
    teaches = isinstance(indexer, IndexerTraining) and indexer.share == 1
    if teaches and not indexer.selected_only:
        call = replace(call, teacher=True)
    blocks = token_blocks(
        len(q.latents), len(kv), call, policy, q.device, kernel_heads=kernel_heads,
        least=LEAST_TOKENS,
    )  # fmt: skip
    most = lists.tokens_at_once(policy)
    if blocks[0].stop > most:
        blocks = tuple(slices(len(q.latents), most))
    empty = q.of(*(x.new_empty(0) for x in (q.latents, q.query_weight, q.output_weight)))
    out, lse = _MappedAttention.apply(
        q.latents, kv, kv_grad, q.query_weight, q.output_weight, attn_sink, selected, length,
        _Plan(attention, blocks, empty), *trained,
    )  # fmt: skip
    return SparseAttentionOutput(out, lse, None)
