"""Differentiable masked dense attention, and the key bits that serve as its mask.

Tensor-parallel ranks save only the bits of local tokens and gather all bits again in the backward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype, items_within, slices
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
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.dispatch import OpCall, Policy, describe_call
from megatron_dsa.ops.indexer_loss.sample import QuerySample
from megatron_dsa.ops.indexer_loss.training import (
    IndexerTraining,
    Taught,
    TeacherPart,
    separate_tensors,
)
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.masked_attention.spec import (
    BACKWARD,
    FORWARD,
    GROUP,
    KEY_BITS,
    PROBABILITIES,
    VISIBLE_BITS,
    WORDS,
    KeyBitsInputs,
    ListedProbabilities,
    MaskedAttentionInputs,
    VisibleBitsInputs,
    groups,
)

#: Maximum keys for which bits are cached (128 MiB).
MOST_KEPT = 32 * 1024


def key_bits(
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    num_keys: int,
    *,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Return the bits of listed keys for :func:`masked_attention`.

    Args:
        indices: int32 ``[Sq, K]``, in any order; entries ``< 0`` or ``>= num_keys`` select nothing.
        topk_length: int32 ``[Sq]``, number of valid entries per list; ``None`` if all are valid.
        num_keys: ``Skv``.

    Returns:
        int32 ``[Sq, ceil(Skv / 128), 4]`` (:mod:`megatron_dsa.ops.masked_attention.spec`).

    Raises:
        ConfigError: shapes or dtypes do not fit.
    """
    check_lists(indices, topk_length, num_keys)
    call = describe_visible_call(indices.device, indices.shape[1])
    arguments = KeyBitsInputs(indices, topk_length, num_keys, policy.workspace_bytes)
    return KEY_BITS.run(call, policy, arguments)


def visible_bits(layout: Layout, policy: Policy = Policy()) -> torch.Tensor:
    """Return the bits of visible keys, int32 ``[num_queries, ceil(num_keys / 128), 4]``.

    The bits take 128 MiB for 32k tokens. Up to :data:`MOST_KEPT` keys they are cached for the last
    two layouts.
    """

    def compute() -> torch.Tensor:
        slots = None if layout.key_indices is None else layout.slots_of_keys().int()
        inputs = VisibleBitsInputs(
            layout.start, layout.end, slots, layout.num_keys, policy.workspace_bytes
        )
        return VISIBLE_BITS.run(describe_visible_call(layout.start.device), policy, inputs)

    if layout.num_keys > MOST_KEPT:
        return compute()
    return layout.derive_large("visible bits", compute)


def describe_visible_call(device: torch.device | str, topk: int | None = None) -> OpCall:
    return describe_call(device, dtype=torch.int32, heads=1, qk_dim=0, v_dim=0, topk=topk)


class MaskedAttentionOutput(NamedTuple):
    #: Output ``[Sq, H, Dv]`` in q's dtype; 0 for queries without keys.
    out: torch.Tensor
    #: Natural log-sum-exp ``[Sq, H]``, fp32 (fp64), without the sink; ``-inf`` without keys.
    lse: torch.Tensor
    #: Probabilities ``[tokens of bits, topk]`` in the dtype of ``lse``, summed over all ranks'
    #: heads, ascending by key, then 0; or ``None``.
    p_sum: torch.Tensor | None


@dataclass(frozen=True)
class _Settings:
    softmax_scale: float
    policy: Policy
    call: OpCall
    want_p_sum: bool
    indexer: Taught | None
    group: Any

    def inputs(self, q, kv, k_pe, bits) -> MaskedAttentionInputs:
        bits = gather_tokens(bits, self.group)
        workspace, v_dim = self.policy.workspace_bytes, self.call.v_dim
        return MaskedAttentionInputs(q, kv, k_pe, bits, v_dim, self.softmax_scale, workspace)

    def listed(self, inputs: MaskedAttentionInputs, lse, tokens: slice) -> ListedProbabilities:
        width = self.call.topk
        assert width is not None
        if self.group is None:
            of_all = slice(0, tokens.stop - tokens.start)
            if tokens != slice(0, len(inputs.q)):  # a copy could not reuse the backward's buffers
                inputs, lse = inputs.of_queries(tokens), lse[tokens]
        else:
            of_all = slice(*(self.group.rank() * tokens.stop + x for x in (0, tokens.stop)))
        found = PROBABILITIES.run(self.call, self.policy, inputs, lse, width, of_all)
        return found._replace(p_sum=reduce_scatter_async(found.p_sum, self.group).wait())

    def listed_sample(
        self, inputs: MaskedAttentionInputs, lse, sample: QuerySample, local: int, head_group: Any
    ) -> ListedProbabilities:
        assert self.call.topk is not None
        tokens, some = sample.tokens, slice(0, len(sample.tokens))
        if self.group is not None:  # each rank samples different tokens
            rank = self.group.rank()
            tokens = gather_tokens(tokens + rank * local, self.group)
            some = slice(rank * len(sample.tokens), (rank + 1) * len(sample.tokens))
        if sample.parts > 1:
            return self._listed_parts(inputs, lse, sample, tokens, head_group)
        q, bits, lse = select_tokens(tokens, inputs.q, inputs.bits, lse)
        inputs = replace(inputs, q=q, bits=bits, kept={})
        found = PROBABILITIES.run(self.call, self.policy, inputs, lse, self.call.topk, some)
        return found._replace(p_sum=reduce_scatter_async(found.p_sum, self.group).wait())

    def _listed_parts(
        self, inputs: MaskedAttentionInputs, lse, sample: QuerySample, tokens, head_group: Any
    ) -> ListedProbabilities:
        group, width = self.group or head_group, self.call.topk
        ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        parts = sample.parts // ranks
        # Dims are token rank, head rank, part, and token of the part.
        tokens = tokens.view(-1, ranks, parts, len(sample.tokens) // sample.parts)
        local = tokens[:, rank].transpose(0, 1).flatten()
        heads = torch.arange(parts, device=local.device).repeat_interleave(len(local) // parts)
        q, lse = (x.unflatten(1, (parts, -1))[local, heads] for x in (inputs.q, lse))
        inputs = replace(inputs, q=q, bits=inputs.bits[local], part=len(local) // parts, kept={})
        call = replace(self.call, heads=q.shape[1])
        found = PROBABILITIES.run(call, self.policy, inputs, lse, width, slice(None))
        if group is None:
            return found
        return ListedProbabilities(*exchange_parts(found, len(tokens), parts, group))

    def part_size(self, tokens: int) -> int:
        """Return the number of tokens per teacher part.

        A part fits an eighth of the workspace, or a quarter if half of the tokens then fit.
        """
        if self.group is not None or self.call.topk is None:
            return tokens
        # Parts have whole groups, so no tile is read twice.
        budget, per_group = self.policy.workspace_bytes // 8, GROUP * self.call.topk * 8
        fewest, most = (GROUP * items_within(x, per_group) for x in (budget, 2 * budget))
        halves = -(-tokens // (2 * GROUP)) * GROUP
        return min(max(fewest, halves), most)

    def teachers(self, inputs: MaskedAttentionInputs, lse, tokens: int) -> Iterator[TeacherPart]:
        for some in slices(tokens, self.part_size(tokens)) if tokens else [slice(0, 0)]:
            found = self.listed(inputs, lse, some)
            yield TeacherPart(some, found.indices, found.length, found.p_sum)
            del found


def _add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Scale ``out`` in place by the keys' share of the softmax; return the lse with the sink."""
    if sink is None:
        return lse
    total = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    out.mul_(torch.exp(lse - _finite(total))[..., None])
    return total


def _finite(total: torch.Tensor) -> torch.Tensor:
    return total.clamp_min(torch.finfo(total.dtype).min)


def _sink_gradient(
    sink: torch.Tensor, out: torch.Tensor, total: torch.Tensor, dout: torch.Tensor, workspace: int
) -> torch.Tensor:
    """Return ``-sum_t p_sink * rowsum(dO * O)`` for each head."""
    grad = total.new_zeros(total.shape[1])
    per_token = 3 * out.shape[1:].numel() * total.element_size()
    for tokens in slices(len(out), items_within(workspace, per_token)):
        delta = (dout[tokens].to(total.dtype) * out[tokens].to(total.dtype)).sum(-1)
        grad -= (torch.exp(sink.to(total.dtype) - _finite(total[tokens])) * delta).sum(0)
    return grad.to(sink.dtype)


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, k_pe, k_pe_grad, sink, bits, s, *index_tensors):
        inputs = s.inputs(q, kv, k_pe, bits)
        out, lse = FORWARD.run(s.call, s.policy, inputs)
        total = _add_sink(out, lse, sink)
        p_sum = None
        if s.want_p_sum:
            p_sum = s.listed(inputs, total, slice(0, len(bits))).p_sum
        ctx.save_for_backward(q, kv, k_pe, sink, bits, out, total, *index_tensors)
        ctx.settings = s
        ctx.separate_k_pe_grad = k_pe_grad is not None
        ctx.mark_non_differentiable(*(x for x in (lse, p_sum) if x is not None))
        ctx.set_materialize_grads(False)
        return out, lse, p_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _dlse, _dp_sum):
        if dout is None:
            return (None,) * len(ctx.needs_input_grad)
        s: _Settings = ctx.settings
        q, kv, k_pe, sink, bits, out, lse, *index_tensors = ctx.saved_tensors
        inputs = s.inputs(q, kv, k_pe, bits)
        index_grads: tuple[torch.Tensor | None, ...] = (None,) * len(index_tensors)

        def train(indexer: Taught | None) -> None:
            nonlocal index_grads
            if indexer is None or not any(ctx.needs_input_grad[7:]):
                return
            sample = indexer.sample(len(bits), bits.device)
            parts: Iterable[TeacherPart]
            if sample is None:
                parts = s.teachers(inputs, lse, len(bits))
            else:
                found = s.listed_sample(inputs, lse, sample, len(bits), indexer.head_group)
                all_taken = slice(0, len(sample.tokens))
                parts = [TeacherPart(all_taken, found.indices, found.length, found.p_sum)]
            index_grads = indexer.gradients(index_tensors, parts, s.policy, sample)

        # Several parts reuse no backward results, so run them before dq and dkv are allocated.
        before = s.part_size(len(bits)) < len(bits)
        train(s.indexer if before else None)
        dq, dkv, dk_pe = BACKWARD.run(s.call, s.policy, inputs, out, lse, dout.contiguous())
        dsink = None
        if sink is not None:
            dsink = _sink_gradient(sink, out, lse, dout, s.policy.workspace_bytes)
        train(None if before else s.indexer)
        separate = ctx.separate_k_pe_grad
        to_k_pe, to_proxy = (None, dk_pe) if separate else (dk_pe.to(k_pe.dtype), None)
        return dq, dkv, to_k_pe, to_proxy, dsink, None, None, *index_grads


def masked_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    bits: torch.Tensor,
    *,
    softmax_scale: float,
    topk: int | None = None,
    attn_sink: torch.Tensor | None = None,
    k_pe_grad: torch.Tensor | None = None,
    want_p_sum: bool = False,
    indexer: Taught | None = None,
    group: Any = None,
    policy: Policy = Policy(),
) -> MaskedAttentionOutput:
    """Attend by plain MLA from each query to the keys selected by its bits.

    The result equals :func:`sparse_attention` on absorbed queries and latents. Reading all keys, of
    fewer dims than a latent, is faster if most keys are selected.

    Args:
        q: ``[Sq, H, Dn + R]``, bf16, fp16, fp32 or fp64, with the ``R`` rope dims last.
        kv: ``[Skv, H, Dn + Dv]``, same dtype: per head the key without rope, then the value.
            Unselected keys must also be finite.
        k_pe: ``[Skv, R]``, same dtype: rope key of all heads, finite.
        bits: int32 ``[Sq, ceil(Skv / 128), 4]`` from :func:`key_bits`, the only mask; with
            ``group``, only this rank's part of the tokens, in the order of ranks.
        softmax_scale: factor on ``q . k``.
        topk: maximum keys of a query, for ``want_p_sum`` and ``indexer``.
        attn_sink: ``[H]``, logits without a value.
        k_pe_grad: fp32 ``[Skv, R]``; gets the unrounded gradient instead of ``k_pe``.
        want_p_sum: also return the head sum of the probabilities.
        indexer: indexer that the backward trains on these probabilities for the tokens of ``bits``.
        group: ranks with the same tokens and different heads; forward and backward are collective.

    Returns:
        ``out`` is differentiable in q, kv, k_pe and attn_sink.

    Raises:
        ConfigError: shapes or dtypes do not fit; ``topk`` is missing or too small, which on a GPU
            fails the launch; both ``indexer.head_group`` and ``group`` are given.
    """
    require_scale(softmax_scale)
    check_queries_and_keys(q, kv, k_pe)
    check_bits(bits, q, kv, _local_tokens(q, indexer, group))
    if k_pe_grad is not None:
        wanted = accumulation_dtype(k_pe.dtype)
        fix = "pass the rope dims of the proxy of finish_with_proxy (layers/parallel/gather.py)"
        require_tensor("k_pe_grad", k_pe_grad, tuple(k_pe.shape), (wanted,), q, fix)
    check_topk(topk, want_p_sum or indexer is not None)
    require_sink(attn_sink, q)
    call = describe_attention(q, kv, k_pe, topk)
    if isinstance(indexer, IndexerTraining):
        indexer.check_parts(q.shape[1], group or indexer.head_group)
    indexer, trained = separate_tensors(indexer, bits=bits)
    settings = _Settings(softmax_scale, policy, call, want_p_sum, indexer, group)
    return MaskedAttentionOutput(
        *_MaskedAttention.apply(
            q, kv, k_pe, k_pe_grad, attn_sink, bits.contiguous(), settings, *trained
        )
    )


def check_lists(indices: torch.Tensor, topk_length: torch.Tensor | None, num_keys: int) -> None:
    require_tensor("indices", indices, ("Sq", "K"), (torch.int32,), fix="give one list per query")
    require_lists(indices, indices, topk_length)
    require(num_keys >= 0, f"num_keys must not be negative, got {num_keys}: pass len(kv)")


def check_topk(topk: int | None, wants_teacher: bool) -> None:
    rule = "the most keys that a query has"
    require(
        topk is not None or not wants_teacher,
        f"topk must be given with want_p_sum or indexer, got None: {rule}",
    )
    require(topk is None or topk >= 0, f"topk must not be negative, got {topk}: give {rule}")


def check_queries_and_keys(q: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor) -> None:
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, fix="flatten [s, b, H, D] to [s * b, H, D]")
    fix = "give it the H and dtype of q"
    require_tensor("kv", kv, ("Skv", q.shape[1], "Dn + Dv"), (q.dtype,), q, fix)
    fix = "give one rope key per token of kv"
    require_tensor("k_pe", k_pe, (kv.shape[0], "R"), (q.dtype,), q, fix)
    nope = q.shape[2] - k_pe.shape[1]
    require(
        0 < nope < kv.shape[2],
        f"q must have more than the {k_pe.shape[1]} dims of k_pe, and fewer beyond them than the "
        f"{kv.shape[2]} of kv (key and value), got {q.shape[2]}: give it those of a key with rope",
    )


def check_bits(bits: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, queries: int) -> None:
    shape = (queries, groups(kv.shape[0]), WORDS)
    require_tensor("bits", bits, shape, (torch.int32,), q, "make them of lists with key_bits")


def describe_attention(
    q: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor, topk: int | None
) -> OpCall:
    nope = q.shape[2] - k_pe.shape[1]
    return describe_call(
        q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        qk_dim=q.shape[2],
        v_dim=kv.shape[2] - nope,
        rope_dim=k_pe.shape[1],
        topk=topk,
    )


def _local_tokens(q: torch.Tensor, indexer: Taught | None, group: Any) -> int:
    if group is None:
        return len(q)
    local, rest = divmod(len(q), group.size())
    require(
        rest == 0,
        f"q must have equally many tokens for each of the {group.size()} ranks of group, got "
        f"{len(q)}: pad the sequences",
    )
    require(
        indexer is None or indexer.head_group is None,
        "indexer.head_group must be None with group, over which head sums are summed already: "
        "drop it",
    )
    return local


def gather_tokens(x: torch.Tensor, group: Any) -> torch.Tensor:
    return all_gather_async(x, group).wait()
