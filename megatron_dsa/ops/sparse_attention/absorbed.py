"""MLA sparse attention with absorbed up projections.

``W_uk`` is multiplied into the queries and ``W_uv`` into the output, so all heads share one key,
the latent. Absorbed queries exist for one block of tokens at a time; the backward recomputes them.

With ``group``, each pass gathers the weights: keeping them takes 34 MB per DeepSeek-V3.2 layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import (
    accumulation_dtype,
    add_bmm,
    items_within,
    lengths,
    slices,
)
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.checks import (
    FLOATS,
    require_lists,
    require_scale,
    require_sink,
    require_tensor,
)
from megatron_dsa.ops.common.collectives import (
    all_gather_async,
    exchange_parts,
    reduce_scatter_async,
)
from megatron_dsa.ops.common.head_products import write_head_products
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.hopper.sums import largest
from megatron_dsa.ops.indexer_loss.sample import QuerySample
from megatron_dsa.ops.indexer_loss.training import (
    IndexerTraining,
    Taught,
    TeacherPart,
    separate_tensors,
)
from megatron_dsa.ops.sparse_attention.api import (
    Settings,
    SparseAttentionOutput,
    require_kv_grad,
)
from megatron_dsa.ops.sparse_attention.blocks import token_blocks
from megatron_dsa.ops.sparse_attention.spec import (
    BACKWARD,
    FORWARD,
    PROBABILITIES,
    KeyGradientAccumulator,
    SparseAttentionInputs,
)

AbsorbedAttentionOutput = SparseAttentionOutput


@dataclass(frozen=True)
class _Plan:
    attention: Settings
    blocks: tuple[slice, ...]
    kernel_heads: int
    keeps_latents: bool
    group: Any


class _Blocks:
    def __init__(self, plan: _Plan, heads: int, q, kv, weights, sink, indices, length):
        self.attention, self.longest = plan.attention, plan.blocks[0].stop
        self.q, self.kv, self.indices, self.length = q, kv.contiguous(), indices, length
        self.sink = sink
        self.rank = weights.shape[2]
        self.nope = q.shape[2] - (kv.shape[1] - self.rank)
        self.w_uk, self.w_uv = weights[:, : self.nope], weights[:, self.nope :]
        self.absorbed = self.buffer(heads, kv.shape[1])
        if heads > q.shape[1]:
            self.absorbed[:, q.shape[1] :] = 0.0

    def buffer(self, heads: int, dims: int) -> torch.Tensor:
        return self.q.new_empty(self.longest, heads, dims)

    def inputs(self, tokens: slice, want_p_sum: bool = False) -> SparseAttentionInputs:
        """Return a block's kernel inputs, valid until the next call."""
        length = None if self.length is None else self.length[tokens]
        return self.inputs_of(self.q[tokens], self.indices[tokens], length, want_p_sum)

    def inputs_of(
        self, q, indices, length, want_p_sum: bool = False, heads: slice = slice(None)
    ) -> SparseAttentionInputs:
        padded = self.absorbed[: len(q)]
        if q.shape[1] < self.q.shape[1]:
            padded = padded.flatten(0, 1)[: len(q) * q.shape[1]].unflatten(0, q.shape[:2])
        absorbed = padded[:, : q.shape[1]]
        write_head_products(q[..., : self.nope], self.w_uk[heads], absorbed[..., : self.rank])
        absorbed[..., self.rank :] = q[..., self.nope :]
        sink = None if self.sink is None else self.sink[heads]
        inputs = self.attention.inputs(absorbed, self.kv, sink, indices, length, want_p_sum)
        return inputs if padded.shape == absorbed.shape else replace(inputs, padded_q=padded)


class _AbsorbedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, kv_grad, weights, sink, indices, length, p, *index_tensors):
        all_weights = all_gather_async(weights, p.group).wait()
        blocks = _Blocks(p, p.kernel_heads, q, kv, all_weights, sink, indices, length)
        out = q.new_empty(*q.shape[:2], all_weights.shape[1] - blocks.nope)
        latents, lses, p_sums = [], [], []
        for tokens in p.blocks:
            inputs = blocks.inputs(tokens, p.attention.want_p_sum)
            latent, lse, p_sum = p.attention.run(FORWARD, inputs)
            if p.attention.want_p_sum:
                if p_sum is None:
                    p_sum = p.attention.run(PROBABILITIES, inputs, lse)
                p_sums.append(p_sum)
            write_head_products(latent, blocks.w_uv.transpose(1, 2), out[tokens])
            lses.append(lse)
            if p.keeps_latents:
                latents.append(latent.contiguous())
            del inputs, latent, p_sum
        lse, p_sum = _joined(lses), _joined(p_sums) if p_sums else None
        ctx.save_for_backward(q, kv, weights, sink, indices, length, lse, *index_tensors, *latents)
        ctx.plan, ctx.index_tensors = p, len(index_tensors)
        ctx.separate_kv_grad = kv_grad is not None
        ctx.mark_non_differentiable(*(x for x in (lse, p_sum) if x is not None))
        ctx.set_materialize_grads(False)
        return out, lse, p_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse, _dp_sum):
        p: _Plan = ctx.plan
        q, kv, weights, sink, indices, length, lse, *rest = ctx.saved_tensors
        index_tensors, latents = rest[: ctx.index_tensors], rest[ctx.index_tensors :]
        all_weights = all_gather_async(weights, p.group).wait()
        blocks = _Blocks(p, q.shape[1], q, kv, all_weights, sink, indices, length)
        if dout is None:  # every rank must join the collectives
            dout = q.new_zeros(*q.shape[:2], all_weights.shape[1] - blocks.nope)
        wanted = ctx.needs_input_grad
        backward = _Backward(p, blocks, lse, latents, dout, wanted[0], wanted[3])
        index_grads: tuple[torch.Tensor | None, ...] = (None,) * len(index_tensors)
        indexer = p.attention.indexer if any(wanted[8:]) else None
        sample = None if indexer is None else indexer.sample(len(q), q.device)
        if indexer is None or sample is not None:
            for tokens in p.blocks:
                backward.run(tokens)
        if indexer is not None:
            parts = backward.teachers()
            if sample is not None:
                parts = backward.sampled(sample, indexer.head_group)
            policy = p.attention.policy
            index_grads = indexer.gradients(index_tensors, parts, policy, sample)
        travel, dweights = None, None
        if backward.dweights is not None:
            travel = reduce_scatter_async(backward.dweights, p.group)
        dkv = backward.keys.result()
        if travel is not None:
            dweights = travel.wait().to(weights.dtype)
        to_kv, to_proxy = (None, dkv) if ctx.separate_kv_grad else (dkv.to(kv.dtype), None)
        dsink = None if sink is None else backward.dsink.to(sink.dtype)
        return backward.dq, to_kv, to_proxy, dweights, dsink, None, None, None, *index_grads


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Backward:
    def __init__(self, plan: _Plan, blocks: _Blocks, lse, latents, dout, wants_q, wants_weights):
        self.plan, self.blocks, self.lse, self.dout = plan, blocks, lse, dout
        self.latents = dict(zip((x.start for x in plan.blocks), latents, strict=False))
        # A bound method would keep buffers alive in a reference cycle.
        query_heads = blocks.q.shape[:2].numel()
        self.keys = KeyGradientAccumulator(query_heads, partial(_bounds, blocks, dout))
        self.dlatent = blocks.buffer(blocks.q.shape[1], blocks.rank)
        self.wants_q, self.wants_weights = wants_q, wants_weights
        self.dq: torch.Tensor | None = None
        self.dweights: torch.Tensor | None = None
        self.dsink: Any = None

    def teachers(self) -> Iterator[TeacherPart]:
        """Yield the teacher in large parts: the loss allocates a key gradient per part."""
        blocks, indices, length = self.plan.blocks, self.blocks.indices, self.blocks.length
        workspace = self.plan.attention.policy.workspace_bytes // 8
        per_block = self.blocks.longest * indices.shape[1] * 4
        for some in slices(len(blocks), items_within(workspace, per_block)):
            part = blocks[some]
            tokens = slice(part[0].start, part[-1].stop)
            teacher = _joined([self.run(block, teaches=True) for block in part])
            of_part = None if length is None else length[tokens]
            yield TeacherPart(tokens, indices[tokens], of_part, teacher)
            del teacher

    def sampled(self, sample: QuerySample, head_group: Any) -> Iterator[TeacherPart]:
        group = head_group if sample.parts > 1 else None
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        parts, indices, length = sample.parts // ranks, self.blocks.indices, self.blocks.length
        local = slice(rank * parts, (rank + 1) * parts)
        teachers = self._teachers_of(list(sample.by_part())[local])
        if group is None:
            yield from teachers
            return
        (teacher,) = exchange_parts([torch.cat([x.teacher for x in teachers])], 1, parts, group)
        indices, length = select_tokens(sample.tokens, indices, length)
        yield TeacherPart(slice(0, len(sample.tokens)), indices, length, teacher)

    def _teachers_of(self, parts: list[QuerySample]) -> Iterator[TeacherPart]:
        blocks, attention = self.blocks, self.plan.attention
        count = blocks.q.shape[1] // len(parts)
        if len(parts) > 1:
            attention = replace(attention, call=replace(attention.call, heads=count))
        for i, part in enumerate(parts):
            heads, first = slice(i * count, (i + 1) * count), i * len(part.tokens)
            for some in slices(len(part.tokens), blocks.longest):
                q, indices, length, lse = select_tokens(
                    part.tokens[some], blocks.q, blocks.indices, blocks.length, self.lse
                )
                inputs = blocks.inputs_of(q[:, heads], indices, length, heads=heads)
                teacher = attention.run(PROBABILITIES, inputs, lse[:, heads])
                taken = slice(first + some.start, first + some.stop)
                yield TeacherPart(taken, indices, length, teacher)
                del q, lse, inputs, teacher

    def run(self, tokens: slice, teaches: bool = False) -> Any:
        blocks, attention = self.blocks, self.plan.attention
        inputs, dout = blocks.inputs(tokens), self.dout[tokens]
        latent = self.latents.get(tokens.start)
        if latent is None:
            latent = attention.run(FORWARD, inputs)[0]
        dlatent, lse = self.dlatent[: len(dout)], self.lse[tokens]
        write_head_products(dout, blocks.w_uv, dlatent)
        inputs = replace(inputs, want_p_sum=teaches, key_sum=self.keys)
        absorbed, dkv, dsink, p_sum = attention.run(
            BACKWARD, inputs, latent, lse, dlatent, teacher=teaches
        )
        self.keys.add(dkv)
        if dsink is not None:
            self.dsink = dsink if self.dsink is None else self.dsink + dsink
        if self.wants_weights:
            self._add_weights(tokens, absorbed, latent)
        if self.wants_q:
            self._write_queries(tokens, absorbed)
        if teaches and p_sum is None:
            p_sum = attention.run(PROBABILITIES, inputs, lse)
        return p_sum

    def _add_weights(self, tokens: slice, absorbed, latent) -> None:
        blocks, q, dout = self.blocks, self.blocks.q[tokens], self.dout[tokens]
        if self.dweights is None:
            shape = q.shape[1], blocks.nope + dout.shape[2], blocks.rank
            self.dweights = q.new_zeros(shape, dtype=accumulation_dtype(q.dtype))
        of_keys, of_values = self.dweights.split([blocks.nope, dout.shape[2]], dim=1)
        nope = q[..., : blocks.nope].permute(1, 2, 0)
        add_bmm(of_keys, nope, absorbed[..., : blocks.rank].transpose(0, 1))
        add_bmm(of_values, dout.permute(1, 2, 0), latent.transpose(0, 1))

    def _write_queries(self, tokens: slice, absorbed) -> None:
        blocks = self.blocks
        if self.dq is None:
            self.dq = torch.empty_like(blocks.q, memory_format=torch.contiguous_format)
        dq, rank, w_ku = self.dq[tokens], blocks.rank, blocks.w_uk.transpose(1, 2)
        write_head_products(absorbed[..., :rank], w_ku, dq[..., : blocks.nope])
        dq[..., blocks.nope :] = absorbed[..., rank:]


def _bounds(x: _Blocks, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nope, rope = x.q.split([x.nope, x.q.shape[2] - x.nope], dim=2)
    queries = largest(_largest_vector(nope) * _largest_column(x.w_uk))
    outputs = largest(_largest_vector(dout) * _largest_column(x.w_uv))
    return torch.maximum(queries, largest(rope)), outputs


def _largest_column(weights: torch.Tensor) -> torch.Tensor:
    wide = accumulation_dtype(weights.dtype)
    return torch.linalg.vector_norm(weights, dim=1, dtype=wide).amax(1)


def _largest_vector(x: torch.Tensor) -> torch.Tensor:
    norms = torch.linalg.vector_norm(x, dim=2, dtype=accumulation_dtype(x.dtype))
    return norms.amax(0) if len(x) else norms.new_zeros(x.shape[1])


def absorbed_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    *,
    softmax_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    kv_grad: torch.Tensor | None = None,
    want_p_sum: bool = False,
    in_order: bool = False,
    indexer: Taught | None = None,
    group: Any = None,
    recompute: bool = False,
    policy: Policy = Policy(),
) -> AbsorbedAttentionOutput:
    """Compute MLA of each query over its list of latents.

    For other arguments, results and errors see
    :func:`~megatron_dsa.ops.sparse_attention.api.sparse_attention`.

    Args:
        q: ``[Sq, H, A + P]``; the last ``P`` dims have rope.
        kv: ``[Skv, R + P]``, same dtype: latent, then the rotated key that all heads share.
        weights: ``[H, A + V, R]``, same dtype: up projection per head, ``W_uk`` then ``W_uv``; with
            ``group``, of this rank's heads only.
        group: process group that splits the heads; its ranks hold different tokens. Forward and
            backward run collectives on it.
        recompute: rerun the forward kernel in the backward instead of saving ``[Sq, H, R]``.

    Returns:
        ``out [Sq, H, V]``, ``lse``, ``p_sum``; ``out`` is differentiable in q, kv, weights and
        attn_sink.
    """
    fix = "flatten [s, b, H, D] to [s * b, H, D]"
    require_tensor("q", q, ("Sq", "H", "A + P"), FLOATS, fix=fix)
    require_tensor("kv", kv, ("Skv", "R + P"), (q.dtype,), q, "give one latent per key")
    ranks = 1 if group is None else group.size()
    require(
        q.shape[1] % ranks == 0,
        f"q must have equally many heads of each of the {ranks} ranks of group, got {q.shape[1]}",
    )
    shape = (q.shape[1] // ranks, "A + V", "R")
    fix = "give the up projection of keys and values of this rank's heads"
    require_tensor("weights", weights, shape, (q.dtype,), q, fix)
    rank = weights.shape[2]
    nope = q.shape[2] - (kv.shape[1] - rank)
    require(
        0 < nope < weights.shape[1] and nope <= q.shape[2],
        f"kv must have the R = {rank} columns of weights and the P dims of q with rope, got "
        f"{kv.shape[1]} columns beside q of {q.shape[2]} dims and weights of {weights.shape[1]}: "
        "fit them to each other",
    )
    require_scale(softmax_scale)
    require_lists(indices, q, topk_length)
    require_kv_grad(kv_grad, kv)
    require_sink(attn_sink, q)
    call = describe_call(
        q.device, dtype=q.dtype, heads=q.shape[1], qk_dim=kv.shape[1], v_dim=rank,
        topk=indices.shape[1], sink=attn_sink is not None,
    )  # fmt: skip
    trains = indexer is not None
    if isinstance(indexer, IndexerTraining):
        indexer.check_parts(q.shape[1], indexer.head_group)
    indexer, trained = separate_tensors(indexer, q=q)
    tensors = (q, kv, kv_grad, weights, attn_sink)
    backward = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*tensors, *trained)
    )
    if topk_length is not None:
        topk_length = lengths(indices, topk_length)
    attention = Settings(
        rank, softmax_scale, policy, call, want_p_sum, indexer, in_order=in_order,
        length_in_range=True,
    )  # fmt: skip
    kernel_heads = FORWARD.choose(call, policy).candidate.support.kernel_heads(q.shape[1])
    blocks = token_blocks(
        len(q), len(kv), replace(call, teacher=trains), policy, q.device, backward, kernel_heads
    )
    plan = _Plan(attention, blocks, kernel_heads, backward and not recompute, group)
    return AbsorbedAttentionOutput(
        *_AbsorbedAttention.apply(*tensors, indices, topk_length, plan, *trained)
    )
