"""What stands in for kernels on the meta device: their results, what they keep, what they use.

One function per operation, with the signature of its implementations. Temporary memory of an
implementation is taken and given back, so that it counts towards the peak. It follows what the
implementations allocate; those of other packages as measured. Our sparse attention runs as it is,
around kernels that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from megatron_dsa.dispatch import Candidate
from megatron_dsa.numerics.arithmetic import accumulation_dtype
from megatron_dsa.numerics.autograd import once_differentiable
from megatron_dsa.ops.dense_attention.blocks import BlockAttention
from megatron_dsa.ops.indexer_loss.inputs import IndexerGradients, SparseLoss
from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.ops.sparse_attention.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels, kernels_for


def fake_kernel(operation: str, candidate: Candidate, *args, **kwargs) -> Any:
    """Return meta tensors like those that ``candidate`` would; see
    :class:`dispatch.MetaDispatch`.
    """
    return _FAKE_KERNELS[operation](candidate, *args, **kwargs)


def _temporary(like: torch.Tensor, size: int) -> None:
    like.new_empty(max(size, 0), dtype=torch.uint8)


def _acc(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


class NoOpKernels(Kernels):
    """Kernels that write nothing; what is around them allocates as it does on a GPU."""

    def _compiled(self, part, arguments):
        return _write_nothing


def _write_nothing(*_tensors):
    pass


def _own_sparse_attention(adapter: Callable, *args):
    """Run our forward or backward around silent kernels of the GPU that is rehearsed."""
    from megatron_dsa.ops.sparse_attention.tilelang.hopper import unions

    found = kernels_for(torch.device("cuda"))
    with mock.patch.object(unions, "compiled", lambda *_: _write_nothing):
        return adapter(*args, kernels=NoOpKernels(found.target, found.tiles))


def _sparse_forward(candidate, inputs):
    q = inputs.q.contiguous()
    (rows, heads), width = q.shape[:2], inputs.indices.shape[1]
    p_sum = None
    if candidate.name == "tilelang":
        return _own_sparse_attention(tilelang_kernels.forward, inputs)
    if candidate.name == "flashmla":
        padded = flashmla.padded_heads(heads)
        if heads < padded:
            q = q.new_empty(rows, padded, q.shape[2])
        indices = inputs.indices
        if width % flashmla.WIDTH:
            indices = indices.new_empty(rows, width + -width % flashmla.WIDTH)
        out, lse = q.new_empty(rows, padded, inputs.v_dim), _acc(q, rows, padded)
        out, lse = out[:, :heads].contiguous(), lse[:, :heads].clone()
        return out, lse, None
    out, lse = q.new_empty(rows, heads, inputs.v_dim), _acc(q, rows, heads)
    if not candidate.fused:
        _temporary(q, inputs.workspace_bytes)
        p_sum = _acc(q, rows, width) if inputs.want_p_sum else None
    return out, lse, p_sum


def _sparse_backward(candidate, inputs, out, lse, dout):
    if candidate.name == "tilelang":
        return _own_sparse_attention(tilelang_kernels.backward, inputs, out, lse, dout)
    q, kv = inputs.q.contiguous(), inputs.kv.contiguous()
    out, dout = out.contiguous(), dout.to(q.dtype).contiguous()
    total = lse if inputs.sink is None else lse.clone()
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    p_sum = None
    if inputs.want_p_sum and candidate.name != "cudnn":
        p_sum = _acc(q, *inputs.indices.shape)
    if candidate.name == "cudnn":
        dkv, rounded = _acc(kv, *kv.shape), torch.empty_like(kv)
        dkv = dkv.clone()
        del rounded
    else:
        dkv = _acc(kv, *kv.shape)
        _temporary(q, inputs.workspace_bytes)
    del total, delta
    dsink = None if inputs.sink is None else torch.empty_like(inputs.sink)
    return dq, dkv, dsink, p_sum


def _probabilities(candidate, inputs, lse):
    rows, width = inputs.indices.shape
    if not candidate.fused:
        _temporary(inputs.q, inputs.workspace_bytes)
        return _acc(inputs.q, rows, width)
    masked, target = torch.empty_like(inputs.indices), _acc(inputs.q, rows, width)
    result = target.clone()
    del masked
    return result


def _index_gradients(x, candidate, inputs) -> IndexerGradients:
    gradients = IndexerGradients(
        torch.empty_like(x.q), _acc(x.k, *x.k.shape), _acc(x.weights, *x.weights.shape)
    )
    if candidate.fused:
        gradients = gradients._replace(k=gradients.k.clone())
    else:
        _temporary(x.q, inputs.workspace_bytes)
    return gradients


def _sparse_loss(candidate, inputs):
    x, value = inputs.indexer, _acc(inputs.indexer.q)
    if inputs.want_gradients:
        return SparseLoss(value, _index_gradients(x, candidate, inputs))
    if not candidate.fused:
        _temporary(x.q, inputs.workspace_bytes)
    return SparseLoss(value, None)


def _scores(_candidate, inputs, block, keys, _seen):
    rows = inputs.q[block.rows].shape[0]
    return inputs.q.new_empty(rows, block.width, dtype=_score_dtype(inputs.q))


def _score_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float32 if q.dtype.itemsize == 1 else accumulation_dtype(q.dtype)


def _topk(candidate, scores, _seen, topk):
    if not candidate.fused:
        _temporary(scores, scores.numel() * candidate.load().bytes_per_score())
    return scores.new_empty(scores.shape[0], topk, dtype=torch.int32)


def _listed_scores(_candidate, inputs, columns, _workspace):
    return inputs.q.new_empty(columns.shape, dtype=_score_dtype(inputs.q))


def _key_lists(_candidate, inputs):
    rows = inputs.start.shape[0]
    return inputs.start.new_empty(rows, inputs.width), inputs.start.new_empty(rows)


class _Kept(torch.autograd.Function):
    """``result`` of a computation on ``tensors`` that keeps ``kept`` and takes ``workspace``."""

    @staticmethod
    def forward(ctx, make, kept, workspace, gradients, *tensors):
        results = make(*tensors)
        ctx.save_for_backward(*kept(results, *tensors))
        ctx.rest = workspace, gradients
        _temporary(tensors[0], workspace)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *_grads):
        (workspace, gradients), saved = ctx.rest, ctx.saved_tensors
        _temporary(saved[0], workspace)
        return None, None, None, None, *gradients(*saved)


def _differentiable(tensors, make, kept, gradients, workspace: int = 0):
    """Return the first result of ``make(*tensors)``, whose backward forms ``gradients(*saved)``."""
    return _Kept.apply(make, kept, workspace, gradients, *tensors)[0]


def _compressor(candidate, inputs):
    groups = inputs.groups

    def make(values, scores, ape):
        return (values.new_empty(groups.first_row.shape[0], inputs.dim),)

    def kept(results, values, scores, ape):
        return values, scores, ape, groups.first_row, groups.position

    def gradients(values, scores, ape, *_rest):
        return torch.empty_like(values), torch.empty_like(scores), torch.empty_like(ape)

    workspace = 0 if candidate.fused else inputs.workspace_bytes
    tensors = (inputs.values, inputs.scores, inputs.ape)
    return _differentiable(tensors, make, kept, gradients, workspace)


def _norm_rope(candidate, x, cos, sin, _eps, inplace, workspace_bytes):
    # In place the result has the memory of x; torch's has its own.
    in_place = inplace and candidate.fused

    def make(x):
        return x.detach() if in_place else torch.empty_like(x), _acc(x, *x.shape[:2])

    def kept(results, _x):
        return *results, cos, sin

    workspace = 0 if candidate.fused else workspace_bytes
    return _differentiable(
        (x.contiguous(),), make, kept, lambda y, *_: (torch.empty_like(y),), workspace
    )


def _rotate(candidate, x, cos, sin, _inverse, workspace_bytes):
    shape, dtype = x.shape, x.dtype
    return _differentiable(
        (x.contiguous(),),
        lambda x: (torch.empty_like(x),),
        lambda _results, _x: (cos, sin),
        lambda cos, _sin: (cos.new_empty(shape, dtype=dtype),),
        0 if candidate.fused else workspace_bytes,
    )


def _dense_gradients(q, k, v, *_rest):
    wide = _acc(q, *q.shape)  # kernels add dq up in fp32
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    del wide
    return gradients


def _dense_attention(candidate, attention, workspace_bytes, *args, **options):
    def forward(q, k, v, causal, scale, sequences):
        _temporary(q, 0 if candidate.fused else workspace_bytes)
        return q.new_empty(*q.shape[:2], v.shape[2]), _acc(q, *q.shape[:2])

    def backward(dout, q, k, v, *_rest):
        _temporary(q, 0 if candidate.fused else workspace_bytes)
        return _dense_gradients(q, k, v)

    kernel = BlockAttention(
        candidate.name, candidate.fused, False, lambda call: None, forward, backward
    )
    return attention(*args, block=kernel, **options)


def _dense_loss(_candidate, inputs):
    x = inputs.indexer

    def make(q, k, weights):
        wide = _acc(k, *k.shape), _acc(weights, *weights.shape)
        gradients = torch.empty_like(q), wide[0].to(k.dtype), wide[1].to(weights.dtype)
        return _acc(q), *gradients

    return _differentiable(
        (x.q, x.k, x.weights),
        make,
        lambda results, *_: results[1:],
        lambda *saved: tuple(torch.empty_like(gradient) for gradient in saved),
        inputs.workspace_bytes,
    )


_FAKE_KERNELS: dict[str, Callable] = {
    "compressor": _compressor,
    "norm_rope": _norm_rope,
    "rotate": _rotate,
    "key_lists": _key_lists,
    "indexer_scores": _scores,
    "indexer_listed_scores": _listed_scores,
    "indexer_topk": _topk,
    "sparse_attention_forward": _sparse_forward,
    "sparse_attention_backward": _sparse_backward,
    "sparse_attention_probabilities": _probabilities,
    "dense_attention": _dense_attention,
    "sparse_indexer_loss": _sparse_loss,
    "dense_indexer_loss": _dense_loss,
}


class _RMSNorm(torch.autograd.Function):
    """torch's fused RMSNorm of GPUs: keeps its input and one number per row."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = _acc(x, *x.shape[:-1], 1)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def fused_rms_norm(x, _shape, weight=None, eps=None) -> torch.Tensor:
    """Stand in for :func:`torch.nn.functional.rms_norm`."""
    return _RMSNorm.apply(x, weight)
