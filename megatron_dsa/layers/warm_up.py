"""Choice and compilation of kernels before training.

cuDNN takes seconds to compile a kernel for a head count, dims, list width and softmax scale.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from megatron_dsa.dsa_kernels import (
    ExpandedKeys,
    IndexerInputs,
    dense_indexer_loss,
    indexer_topk,
    key_bits,
    masked_attention,
    sparse_indexer_loss,
    visible_bits,
)
from megatron_dsa.layers.required_ops import RequiredOp, called_ops
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Policy, on_meta, uncounted
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.kda.api import delta_attention, gated_norm, short_convolution
from megatron_dsa.ops.kda.spec import LOWEST_GATE
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.sparse_attention.spec import (
    BACKWARD,
    FORWARD,
    PROBABILITIES,
    SparseAttentionInputs,
)

_DEVICE, _TOKENS, _KEYS = "cuda", 64, 256
_resolving = True


def resolve_kernels(ops: list[RequiredOp], policy: Policy, softmax_scale: float | None) -> None:
    """Choose and compile the kernels of a layer, or raise :class:`DSAError`.

    Kernels are compiled for ``softmax_scale``; with ``None`` they are only chosen.
    """
    if not _resolving:
        return
    calls = tuple(called_ops(ops, policy))
    for operation, inputs in calls:
        OPERATIONS[operation].choose(inputs, policy)
    if softmax_scale is not None:
        warm_up(calls, policy, softmax_scale)


def resolving() -> bool:
    return _resolving


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Skip the choice of kernels for models that are built but never run."""
    global _resolving
    before, _resolving = _resolving, False
    try:
        yield
    finally:
        _resolving = before


@lru_cache(maxsize=64)
def warm_up(calls: tuple[tuple[str, OpCall], ...], policy: Policy, softmax_scale: float) -> None:
    """Run a training step's fused operations on a few tokens, without counters or random draws."""
    if on_meta():
        return
    fused = {
        operation: inputs
        for operation, inputs in reversed(calls)  # keep the first call of each operation
        if inputs.device == "cuda" and OPERATIONS[operation].choose(inputs, policy).candidate.fused
    }
    with uncounted(), torch.no_grad():
        attention = [name for name in fused if name.startswith("sparse_attention")]
        if attention:
            _attend(fused, fused[attention[0]], policy, softmax_scale)
    if "masked_attention_forward" in fused:
        with uncounted(), torch.enable_grad():
            _attend_masked(fused, fused["masked_attention_forward"], policy, softmax_scale)
    if fused.keys() & {"indexer_topk", "indexer_scores", "sparse_indexer_loss"}:
        inputs = next(x for name, x in calls if name in ("sparse_indexer_loss", "indexer_topk"))
        with uncounted():
            _index(fused, inputs, policy)
    if "kda_attention" in fused:
        with uncounted(), torch.enable_grad():
            _delta_rule(fused["kda_attention"], policy)


def _delta_rule(call: OpCall, policy: Policy) -> None:
    shape, dtype = (1, _TOKENS, call.heads * call.qk_dim), call.dtype
    weight = _values(shape[2], 1, 4, dtype=torch.float32).requires_grad_()
    x = short_convolution(_values(*shape, dtype=dtype), weight, policy=policy)
    x = x.unflatten(2, (call.heads, -1))
    ones = torch.ones(call.heads, device=_DEVICE), torch.ones(shape[2], device=_DEVICE)
    out = delta_attention(x, x, x, x, x[..., 0], *ones, lower_bound=LOWEST_GATE, policy=policy)
    out = gated_norm(out, x, torch.ones_like(x[0, 0, 0]), 1e-6, policy=policy)
    torch.autograd.grad(out, weight, out.detach())


def _device() -> torch.device:
    if _DEVICE != "cuda":
        return torch.device(_DEVICE)
    return torch.device(_DEVICE, torch.cuda.current_device())


def _values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, device=_DEVICE).float()).view(shape).to(dtype)


def _attend(fused: dict, call: OpCall, policy: Policy, softmax_scale: float) -> None:
    assert call.topk is not None
    q = _values(_TOKENS, call.heads, call.qk_dim, dtype=call.dtype)
    kv = _values(_KEYS, call.qk_dim, dtype=call.dtype)
    indices = _first_keys(call.topk)
    sink = torch.zeros(call.heads, device=_DEVICE) if call.sink else None
    sp = SparseAttentionInputs(
        q, kv, indices, call.v_dim, softmax_scale, None, sink, policy.workspace_bytes
    )
    out, lse, _ = FORWARD.run(call, policy, sp)
    if "sparse_attention_backward" in fused:
        backward = fused["sparse_attention_backward"]
        sp = replace(sp, want_p_sum=backward.teacher)
        BACKWARD.run(backward, policy, sp, out, lse, out)
    if "sparse_attention_probabilities" in fused:
        PROBABILITIES.run(call, policy, sp, lse)


def _attend_masked(fused: dict, call: OpCall, policy: Policy, softmax_scale: float) -> None:
    assert call.rope_dim is not None
    rope, topk = call.rope_dim, call.topk
    # Copy the layout, since a cached layout would keep the mask bits.
    layout = replace(bshd_layout(_KEYS, 1, _device()))
    tokens = _KEYS if topk is None else _TOKENS
    q = _values(tokens, call.heads, call.qk_dim, dtype=call.dtype).requires_grad_()
    kv = _values(_KEYS, call.heads, call.qk_dim - rope + call.v_dim, dtype=call.dtype)
    k_pe = _values(_KEYS, rope, dtype=call.dtype)
    if topk is None:
        bits = visible_bits(layout, policy)
    else:
        bits = key_bits(_first_keys(topk), None, _KEYS, policy=policy)
    result = masked_attention(
        q, kv, k_pe, bits, softmax_scale=softmax_scale, topk=topk,
        want_p_sum="masked_attention_probabilities" in fused, policy=policy,
    )  # fmt: skip
    if "masked_attention_backward" in fused:
        torch.autograd.grad(result.out, q, result.out.detach())
    if "dense_indexer_loss" in fused and topk is None:
        dense_indexer_loss(
            _index_inputs(fused["dense_indexer_loss"], _KEYS), q,
            ExpandedKeys(kv, k_pe, call.v_dim), layout, softmax_scale=softmax_scale,
            lse=result.lse, policy=policy,
        )  # fmt: skip


def _first_keys(topk: int) -> torch.Tensor:
    index = torch.arange(topk, dtype=torch.int32, device=_DEVICE)
    return torch.where(index < _KEYS, index, -1).expand(_TOKENS, -1).contiguous()


def _index_inputs(call: OpCall, tokens: int) -> IndexerInputs:
    return IndexerInputs(
        _values(tokens, call.heads, call.qk_dim, dtype=call.dtype).requires_grad_(),
        _values(tokens, call.qk_dim, dtype=call.dtype),
        _values(tokens, call.heads, dtype=call.dtype),
        call.relu,
    )


def _index(fused: dict, call: OpCall, policy: Policy) -> None:
    assert call.topk is not None
    # Index scores are computed only if more keys are visible than selected.
    tokens = _TOKENS + call.topk
    inputs = _index_inputs(call, tokens)
    layout = bshd_layout(tokens, 1, _device())
    with torch.no_grad():
        indices, length = indexer_topk(inputs, layout, call.topk, policy=policy)
    if "sparse_indexer_loss" in fused:
        teacher = torch.ones(indices.shape, device=_DEVICE)
        with torch.enable_grad():
            sparse_indexer_loss(inputs, indices, teacher, layout, topk_length=length, policy=policy)
