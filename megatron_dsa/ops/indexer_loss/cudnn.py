"""Sparse indexer loss with gradients through cuDNN's front end (Hopper, bf16).

The adapter cancels cuDNN's division by the number of tokens and clamps underflowed students, which
cuDNN would ignore.
"""

import torch

from megatron_dsa.ops.common.arithmetic import items_within, lengths
from megatron_dsa.ops.indexer_loss.spec import IndexerGradients, IndexerLoss, SparseLossInputs
from megatron_dsa.ops.padding import masked_indices, padded_heads, widened, with_heads

_TINY = torch.finfo(torch.float32).tiny


def sparse(inputs: SparseLossInputs) -> IndexerLoss:
    from cudnn import DSA

    x, width = inputs.indexer, inputs.indices.shape[1]
    heads = padded_heads(x.q.shape[1], (8, 16, 32, 64))
    valid, indices = masked_indices(inputs.indices, inputs.topk_length, x.k.shape[0])
    student = DSA.sparse_indexer_score_recompute_wrapper(
        with_heads(x.q, heads, -2)[None],
        x.k.contiguous()[None],
        with_heads(x.weights, heads, -1)[None],
        indices[None],
        qhead_per_kv_head=heads,
        topk_length=lengths(inputs.indices, inputs.topk_length)[None],
        topk_indices_global=False,
    )["predict"][0, :, :width].contiguous()
    value = student.new_zeros(())
    step = items_within(inputs.workspace_bytes, width * 24)
    for first in range(0, student.shape[0], step):
        tokens = slice(first, first + step)
        value += _kl_sum(student[tokens], inputs.teacher[tokens], valid[tokens])
    return IndexerLoss(value, _gradients(inputs, student) if inputs.want_gradients else None)


def _kl_sum(student: torch.Tensor, teacher: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the KL sum; normalise the teacher and mask the student in place."""
    teacher.masked_fill_(~valid, 0.0)
    mass = teacher.sum(-1, keepdim=True)
    has_mass = mass > 0
    teacher.div_(torch.where(has_mass, mass, 1.0))
    # cuDNN leaves invalid entries undefined.
    student.masked_fill_(~(valid & has_mass), 0.0)
    log_ratio = torch.log(teacher.clamp_min(_TINY)) - torch.log(student.clamp_min(_TINY))
    return (teacher * log_ratio).sum()


def _gradients(inputs: SparseLossInputs, student: torch.Tensor) -> IndexerGradients:
    from cudnn import DSA

    x = inputs.indexer
    tokens, heads = x.q.shape[:2]
    padded = padded_heads(heads, (64,))
    valid, indices = masked_indices(inputs.indices, inputs.topk_length, x.k.shape[0])
    trained = valid & (inputs.teacher.sum(-1, keepdim=True) > 0)
    result = DSA.indexer_backward_wrapper(
        with_heads(x.q, padded, -2)[None],
        with_heads(x.weights, padded, -1)[None],
        x.k.contiguous()[None],
        widened(inputs.teacher, 0.0)[None],
        widened(torch.where(trained, student.clamp_min(_TINY), 0.0), 0.0)[None],
        indices[None],
        torch.ones(1, dtype=torch.float32, device=x.q.device),
        sm_scale=1.0,
        loss_coeff=float(tokens),
        topk_indices_global=False,
        d_index_k=torch.empty(1, *x.k.shape, dtype=torch.float32, device=x.q.device),
    )
    dq = result["d_index_q"][0, :, :heads]
    return IndexerGradients(
        dq if inputs.dq is None else inputs.dq.copy_(dq),
        result["d_index_k"][0],
        result["d_weights"][0, :, :heads],
    )
