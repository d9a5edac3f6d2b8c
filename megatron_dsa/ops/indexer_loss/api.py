"""Indexer losses over selected keys and over all visible keys (DeepSeek-V3.2)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.checks import (
    FLOATS,
    require_layout,
    require_lists,
    require_on_device,
    require_scale,
    require_tensor,
)
from megatron_dsa.ops.common.scaling import scaled_together
from megatron_dsa.ops.dispatch import OpCall, Policy, on_meta
from megatron_dsa.ops.indexer_loss.sample import QuerySample
from megatron_dsa.ops.indexer_loss.spec import (
    DENSE_LOSS,
    SPARSE_LOSS,
    DenseLossInputs,
    ExpandedKeys,
    IndexerLoss,
    LatentKeys,
    SparseLossInputs,
    TeacherKeys,
)
from megatron_dsa.ops.indexer_topk.api import require_finite_scores
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, check_indexer, describe_index_call
from megatron_dsa.ops.layout.layout import Layout


def selected_keys_loss(
    inputs: IndexerInputs,
    layout: Layout,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    teacher: torch.Tensor,
    policy: Policy,
    head_group: Any = None,
    *,
    want_gradients: bool = False,
    dq: torch.Tensor | None = None,
) -> IndexerLoss:
    """Compute :func:`sparse_indexer_loss` and its gradients without autograd.

    ``teacher``, a sum over local heads, is overwritten. ``dq`` receives the gradient of q, in fp32
    for fp16 inputs.
    """
    inputs = _without_fp16(inputs)
    if head_group is not None:
        torch.distributed.all_reduce(teacher, group=head_group)
    call = describe_index_call(inputs, layout, indices.shape[1])
    arguments = SparseLossInputs(
        inputs, indices, topk_length, teacher, policy.workspace_bytes, want_gradients, dq
    )
    return SPARSE_LOSS.run(call, policy, arguments)


def _differentiable(inputs: IndexerInputs, run: Callable[[bool], IndexerLoss]) -> torch.Tensor:
    tensors = inputs.tensors()
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _WithBackward.apply(*tensors, run)
    return run(False).value


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, weights, run):
        value, gradients = run(True)
        ctx.save_for_backward(
            *(g.to(x.dtype) for g, x in zip(gradients, (q, k, weights), strict=True))
        )
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalue):
        gradients = ctx.saved_tensors
        return *scaled_together(gradients, dvalue, [g.dtype for g in gradients]), None


def _without_fp16(inputs: IndexerInputs) -> IndexerInputs:
    if inputs.q.dtype != torch.float16:
        return inputs
    return inputs.with_tensors([x.float() for x in inputs.tensors()])


def query_gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype in which unscaled query gradients do not underflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def checked_teacher(teacher: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Check and copy a caller's teacher without GPU synchronisation."""
    teacher = teacher.detach().to(dtype, copy=True)
    if on_meta() or teacher.numel() == 0:
        return teacher
    least, most = teacher.aminmax()
    rule = "teacher must have no entry that is negative, NaN or infinite"
    fix = "pass p_sum of the attention, with 0 where nothing is selected"
    require_on_device(
        (least >= 0) & (most < float("inf")), f"{rule}: {fix}",
        lambda: f"{rule}, got {float(least):.3g} to {float(most):.3g}: {fix}",
    )  # fmt: skip
    return teacher


def sparse_indexer_loss(
    inputs: IndexerInputs,
    indices: torch.Tensor,
    teacher: torch.Tensor,
    layout: Layout,
    *,
    topk_length: torch.Tensor | None = None,
    head_group=None,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Sum ``KL(teacher || student)`` over the selected keys of all query tokens.

    Args:
        inputs: the indexer's tensors; the result is differentiable in q, k and weights.
        indices: int32 ``[Sq, K]``, indices into ``inputs.k``, as from :func:`indexer_topk`.
        teacher: ``[Sq, K]``, ``p_sum`` of :func:`sparse_attention`: finite and not negative, also
            at invalid entries; normalised here, without gradient.
        layout: layout with which the keys were selected.
        topk_length: int32 ``[Sq]`` or ``None``.
        head_group: process group that splits the heads; the teacher is summed over it.

    Returns:
        fp32 scalar, to be divided by the number of real tokens.

    Raises:
        ConfigError: shapes, dtypes or the layout do not fit, or the teacher is invalid (a device
            assert on GPUs).
    """
    check_indexer(inputs, layout)
    require_lists(indices, inputs.q, topk_length)
    fix = "give one entry per entry of indices"
    require_tensor("teacher", teacher, tuple(indices.shape), FLOATS, inputs.q, fix)
    teacher = checked_teacher(teacher, accumulation_dtype(inputs.q.dtype))
    return _differentiable(
        inputs,
        lambda wanted: selected_keys_loss(
            inputs, layout, indices, topk_length, teacher, policy, head_group, want_gradients=wanted
        ),
    )


def dense_indexer_loss(
    inputs: IndexerInputs,
    q: torch.Tensor,
    k: TeacherKeys,
    layout: Layout,
    *,
    softmax_scale: float,
    other_lse: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    head_group=None,
    sample: QuerySample | None = None,
    policy: Policy = Policy(),
) -> torch.Tensor:
    """Sum ``KL(teacher || student)`` over the visible keys of all query tokens.

    For other arguments and results see :func:`sparse_indexer_loss`.

    Args:
        q: ``[Sq, H, D]``, queries of the teacher's attention, absorbed or plain MLA.
        k: keys of the teacher's attention: a tensor ``[Skv, 1 or H, D]``, :class:`LatentKeys`
            (expanded some heads at a time) or :class:`ExpandedKeys`.
        softmax_scale: factor on ``q . k``, positive.
        other_lse: ``[Sq, H]``, log of the teacher's mass outside these keys (V4's window and sink),
            ``-inf`` for none.
        lse: ``[Sq, H]``, natural log-sum-exp of the scaled scores over visible keys; ``None`` costs
            another pass over the keys.
        sample: query tokens for an unbiased estimate, from
            :func:`~megatron_dsa.ops.indexer_loss.sample.draw_sample`; ``None``: all.

    Raises:
        ConfigError: shapes, dtypes or the layout do not fit, or scores are not finite (a device
            assert on GPUs).
    """
    require_tensor("q", q, ("Sq", "H", "D"), FLOATS, inputs.q, "flatten sequence and batch")
    check_indexer(inputs, layout, q=q)
    _check_teacher_keys(q, k, layout)
    require_scale(softmax_scale)
    for name, value in (("other_lse", other_lse), ("lse", lse)):
        if value is not None:
            fix = "give one value per query token and head"
            require_tensor(name, value, tuple(q.shape[:2]), FLOATS, q, fix)
    inputs = require_finite_scores(inputs, layout, "dense_indexer_loss")
    call = describe_index_call(inputs, layout, None)
    dtype = torch.promote_types(call.dtype, q.dtype)
    call = replace(call, dtype=dtype, teacher_dim=q.shape[2])
    inputs = _without_fp16(inputs)
    arguments = DenseLossInputs(
        inputs, layout, q.detach(), k.detach(), softmax_scale, head_group, policy.workspace_bytes,
        None if other_lse is None else other_lse.detach(), None if lse is None else lse.detach(),
    )  # fmt: skip
    if sample is None:
        return _dense_loss(arguments, call, policy)
    _check_sample(sample, q, head_group)
    heads = slices(q.shape[1], q.shape[1] // sample.parts)
    values = [
        _dense_loss(_of_part(arguments, part, some), call, policy)
        for part, some in zip(sample.by_part(), heads, strict=True)
    ]
    return sum(values[1:], values[0]) * sample.factor


def _dense_loss(arguments: DenseLossInputs, call: OpCall, policy: Policy) -> torch.Tensor:
    inputs = arguments.indexer
    arguments = replace(arguments, indexer=inputs.detach())
    return _differentiable(
        inputs,
        lambda wanted: DENSE_LOSS.run(call, policy, replace(arguments, want_gradients=wanted)),
    )


def _check_sample(sample: QuerySample, q: torch.Tensor, head_group: Any) -> None:
    require(
        sample.total == len(q),
        f"sample must be of the {len(q)} query tokens, got one of {sample.total}: draw it with "
        "this number of tokens",
    )
    require(
        q.shape[1] % sample.parts == 0,
        f"sample must have parts that divide the {q.shape[1]} heads, got {sample.parts}: draw it "
        "with fewer",
    )
    require(
        sample.parts == 1 or head_group is None,
        f"sample must have one part with head_group, got {sample.parts}: a tile's teacher is "
        "summed over all ranks",
    )


def _of_part(x: DenseLossInputs, part: QuerySample, heads: slice) -> DenseLossInputs:
    taken, indexer = part.tokens, x.indexer
    some = IndexerInputs(
        indexer.q.index_select(0, taken), indexer.k, indexer.weights.index_select(0, taken),
        indexer.relu,
    )  # fmt: skip
    other_lse, lse = (y if y is None else y[taken][:, heads] for y in (x.other_lse, x.lse))
    return replace(
        x, indexer=some, layout=part.layout(x.layout), q=x.q[taken][:, heads],
        k=_of_heads(x.k, heads), other_lse=other_lse, lse=lse,
    )  # fmt: skip


def _of_heads(k: TeacherKeys, heads: slice) -> TeacherKeys:
    if isinstance(k, LatentKeys):
        return replace(k, w_uk=k.w_uk[heads])
    if isinstance(k, ExpandedKeys):
        return replace(k, kv=k.kv[:, heads])
    return k if k.shape[1] == 1 else k[:, heads]


def _check_teacher_keys(q: torch.Tensor, k: TeacherKeys, layout: Layout) -> None:
    heads, dim = q.shape[1:]
    if isinstance(k, ExpandedKeys):
        width = dim - k.k_pe.shape[-1] + k.v_dim
        fix = "split q and kv by heads"
        require_tensor("k.kv", k.kv, ("Skv", heads, width), (q.dtype,), q, fix)
        fix = "give one rope key per token of kv"
        require_tensor("k.k_pe", k.k_pe, (len(k.kv), "P"), (q.dtype,), q, fix)
        require_layout(layout, {}, {"k.kv": k.kv})
        return
    if not isinstance(k, LatentKeys):
        shape = ("Skv", f"1 or {heads}", dim)
        require_tensor("k", k, shape, (q.dtype,), q, "give it the D of q")
        require(
            k.shape[1] in (1, heads),
            f"k must have 1 or {heads} heads, got {k.shape[1]}: repeat those that queries share",
        )
        require_layout(layout, {}, {"k": k})
        return
    latents, w_uk = k.latents, k.w_uk
    require(
        latents.dim() == 2 and w_uk.dim() == 3 and w_uk.shape[0] == heads
        and latents.shape[1] - w_uk.shape[2] == dim - w_uk.shape[1] >= 0,
        f"k must have latents [Skv, R + P] and w_uk [{heads}, {dim} - P, R], got shapes "
        f"{tuple(latents.shape)} and {tuple(w_uk.shape)}",
    )  # fmt: skip
    require(
        latents.dtype == w_uk.dtype == q.dtype,
        f"k must have latents and w_uk in q's dtype {q.dtype}, got {latents.dtype} and "
        f"{w_uk.dtype}: cast them",
    )
    require_layout(layout, {}, {"k.latents": latents})
