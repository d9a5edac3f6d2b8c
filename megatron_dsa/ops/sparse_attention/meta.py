"""Fake sparse attention for meta tensors: our adapters with no-op kernels."""

import torch

from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.meta import empty_sums, take_workspace
from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang import launch
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels, kernels_for


def forward(candidate: Candidate, inputs: SparseAttentionInputs):
    if candidate.name == "tilelang":
        return launch.forward(inputs, _no_op_kernels())
    (queries, heads), v_dim, p_sum = inputs.q.shape[:2], inputs.v_dim, None
    if candidate.name == "flashmla":
        q, _indices = flashmla.padded(inputs)
        out, lse = q.new_empty(*q.shape[:2], v_dim), empty_sums(q, *q.shape[:2])
        return out[:, :heads], lse[:, :heads].clone(memory_format=torch.contiguous_format), None
    q = inputs.q.contiguous()
    out, lse = q.new_empty(queries, heads, v_dim), empty_sums(q, queries, heads)
    if not candidate.fused:
        take_workspace(q, inputs.workspace_bytes)
        p_sum = empty_sums(q, *inputs.indices.shape) if inputs.want_p_sum else None
    return out, lse, p_sum


def backward(candidate: Candidate, inputs: SparseAttentionInputs, out, lse, dout):
    if candidate.name == "tilelang":
        return launch.backward(inputs, out, lse, dout, _no_op_kernels())
    q, kv = inputs.q.contiguous(), inputs.kv.contiguous()
    out, dout = out.contiguous(), dout.to(q.dtype).contiguous()
    total = lse if inputs.sink is None else lse.clone()
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    dkv, p_sum = empty_sums(kv, *kv.shape), None
    if candidate.name == "cudnn":
        rounded = torch.empty_like(kv)
        dkv = dkv.clone()
        del rounded
    else:
        p_sum = empty_sums(q, *inputs.indices.shape) if inputs.want_p_sum else None
        take_workspace(q, inputs.workspace_bytes)
    del total, delta
    dsink = None if inputs.sink is None else torch.empty_like(inputs.sink)
    return dq, dkv, dsink, p_sum


def probabilities(candidate: Candidate, inputs: SparseAttentionInputs, lse) -> torch.Tensor:
    if not candidate.fused:
        take_workspace(inputs.q, inputs.workspace_bytes)
        return empty_sums(inputs.q, *inputs.indices.shape)
    if candidate.name == "triton":
        denominator = lse.clone()
        p_sum = empty_sums(inputs.q, *inputs.indices.shape)
        del denominator
        return p_sum
    masked, target = torch.empty_like(inputs.indices), empty_sums(inputs.q, *inputs.indices.shape)
    result = target.clone()
    del masked
    return result


class NoOpKernels(Kernels):
    def compiled(self, part, *arguments):
        return lambda *_tensors: None

    def unions(self, *arguments):
        return lambda *_tensors: None


def _no_op_kernels() -> NoOpKernels:
    found = kernels_for(torch.device("cuda"))
    return NoOpKernels(found.target, found.tiles)
