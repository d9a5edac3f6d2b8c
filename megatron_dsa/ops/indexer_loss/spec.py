"""Indexer losses: inputs, implementations, reference (DeepSeek-V3.2, eq. 4, 5).

Both losses *sum* ``KL(teacher || student)`` over query tokens; the score gradient is ``student -
teacher``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import HOPPER, PORTABLE
from megatron_dsa.ops.dispatch.packages import CUDNN, TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.meta import empty_sums, take_workspace


class IndexerGradients(NamedTuple):
    q: torch.Tensor  # [Sq, HI, DI], dtype of q
    k: torch.Tensor  # [Skv, DI], fp32 (fp64)
    weights: torch.Tensor  # [Sq, HI], fp32 (fp64) or the dtype of the weights


class IndexerLoss(NamedTuple):
    value: torch.Tensor
    gradients: IndexerGradients | None


@dataclass(frozen=True)
class SparseLossInputs:
    """Inputs of the loss over selected keys.

    Attributes:
        indices: int32 ``[Sq, K]``, indices into ``indexer.k``; entries out of range select nothing.
        topk_length: int32 ``[Sq]`` or ``None``.
        teacher: ``[Sq, K]``, summed over the heads of all ranks, not normalised, undefined at
            invalid entries. Tokens whose sum is 0 contribute nothing. **Overwritten**.
        dq: contiguous buffer ``[Sq, HI, DI]`` for the gradient of q; ``None``: allocate one.
    """

    indexer: IndexerInputs
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    teacher: torch.Tensor
    workspace_bytes: int
    want_gradients: bool = True
    dq: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentKeys:
    """Keys of all heads, expanded from shared latents a few heads at a time (plain MLA).

    Head ``h`` has the keys ``[latents[:, :R] @ w_uk[h].T, latents[:, R:]]``.

    Attributes:
        latents: ``[Skv, R + P]``: latent, then the rotated dims that all heads share.
        w_uk: ``[H, D - P, R]``, same dtype.
    """

    latents: torch.Tensor
    w_uk: torch.Tensor

    def detach(self) -> LatentKeys:
        return LatentKeys(self.latents.detach(), self.w_uk.detach())

    def expanded(self, heads: slice = slice(None)) -> torch.Tensor:
        w_uk = self.w_uk[heads]
        rank = w_uk.shape[2]
        nope = (self.latents[:, :rank] @ w_uk.flatten(0, 1).t()).unflatten(1, w_uk.shape[:2])
        shared = self.latents[:, None, rank:].expand(-1, w_uk.shape[0], -1)
        return torch.cat([nope, shared], dim=-1)


@dataclass(frozen=True)
class ExpandedKeys:
    """Keys ``[kv[:, h, :Dn], k_pe]`` of each head, as returned by MLA's up projection.

    Attributes:
        kv: ``[Skv, H, Dn + Dv]``, per head the key without rope, then the value.
        k_pe: ``[Skv, P]``, rotated, same dtype.
        v_dim: ``Dv``.
    """

    kv: torch.Tensor
    k_pe: torch.Tensor
    v_dim: int

    @property
    def nope(self) -> torch.Tensor:
        return self.kv[..., : self.kv.shape[2] - self.v_dim]

    def detach(self) -> ExpandedKeys:
        return ExpandedKeys(self.kv.detach(), self.k_pe.detach(), self.v_dim)

    def expanded(self, heads: slice = slice(None)) -> torch.Tensor:
        nope = self.nope[:, heads]
        return torch.cat([nope, self.k_pe[:, None].expand(-1, nope.shape[1], -1)], dim=-1)


TeacherKeys = torch.Tensor | LatentKeys | ExpandedKeys


@dataclass(frozen=True)
class DenseLossInputs:
    """Inputs of the loss over all visible keys.

    ``lse`` is undefined for tokens without visible keys.
    """

    indexer: IndexerInputs
    layout: Layout
    q: torch.Tensor
    k: TeacherKeys
    softmax_scale: float
    head_group: object | None
    workspace_bytes: int
    other_lse: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    want_gradients: bool = True


_HERE = __package__
_INDEXER: dict[str, Any] = {"dims": ((128, 0),), "heads": (1, 64), "dtypes": (torch.bfloat16,)}

SPARSE_LOSS = Operation(
    "sparse_indexer_loss",
    "indexer loss over the selected keys",
    (
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.launch:sparse",
            Support(
                covers="value and gradients in one kernel",
                package=TILELANG,
                capabilities=(HOPPER,),
                **_INDEXER,
                topk=(1, 2048),
                without_relu=False,
                **ATOMIC_SUMS,
            ),
        ),
        Candidate(
            "cudnn",
            f"{_HERE}.cudnn:sparse",
            Support(
                covers="value and gradients",
                package=CUDNN,
                capabilities=(HOPPER,),
                **_INDEXER,
                without_relu=False,
                deterministic=False,
                bridged="heads padded to 8, 16, 32 or 64, K in buckets; teacher copied; "
                "underflowed students kept",
            ),
        ),
        Candidate(
            "torch",
            f"{_HERE}.torch:sparse",
            Support(covers="any shape; gradients along with the value", **ATOMIC_SUMS),
            fused=False,
        ),
    ),
    fake=f"{_HERE}.spec:fake_sparse",
)

DENSE_LOSS = Operation(
    "dense_indexer_loss",
    "indexer loss over all visible keys",
    (
        # cuDNN is omitted because its kernel needs S x S fp32 scores.
        Candidate(
            "tilelang",
            f"{_HERE}.tilelang.dense:dense",
            Support(
                covers="teachers of plain MLA; the rest as triton",
                package=TILELANG,
                capabilities=(HOPPER,),
                teacher_dims=(192, 256),
                **_INDEXER,
            ),
        ),
        Candidate(
            "triton",
            f"{_HERE}.triton.dense:dense",
            Support(
                covers="value and gradients; teachers of any head dim",
                package=TRITON,
                **PORTABLE,
                **_INDEXER,
            ),
        ),
        Candidate("torch", f"{_HERE}.torch_dense:dense", Support(covers="any shape"), fused=False),
    ),
    fake=f"{_HERE}.spec:fake_dense",
)


def fake_sparse(candidate: Candidate, inputs: SparseLossInputs) -> IndexerLoss:
    loss = _empty_loss(inputs, inputs.dq)
    if loss.gradients is not None and candidate.fused:
        loss = loss._replace(gradients=loss.gradients._replace(k=loss.gradients.k.clone()))
    if not candidate.fused:
        take_workspace(inputs.indexer.q, inputs.workspace_bytes)
    return loss


def fake_dense(_candidate: Candidate, inputs: DenseLossInputs) -> IndexerLoss:
    loss = _empty_loss(inputs)
    take_workspace(inputs.indexer.q, inputs.workspace_bytes)
    return loss


def _empty_loss(
    inputs: SparseLossInputs | DenseLossInputs, dq: torch.Tensor | None = None
) -> IndexerLoss:
    x, gradients = inputs.indexer, None
    if inputs.want_gradients:
        dq = torch.empty_like(x.q) if dq is None else dq
        sums = (empty_sums(tensor, *tensor.shape) for tensor in (x.k, x.weights))
        gradients = IndexerGradients(dq, *sums)
    return IndexerLoss(empty_sums(x.q), gradients)


def kl_sum(student_scores, teacher, mask) -> torch.Tensor:
    """Sum ``KL(teacher / sum(teacher) || softmax(student_scores))`` over ``mask``.

    Arguments are ``[tokens, keys]``. Tokens whose teacher sums to 0 contribute 0.
    """
    teacher = teacher.masked_fill(~mask, 0.0).detach()
    mass = teacher.sum(-1, keepdim=True)
    has_mass = mass > 0
    teacher = teacher / torch.where(has_mass, mass, 1.0)
    logits = student_scores.masked_fill(~mask, float("-inf"))
    logits = torch.where(has_mass, logits, 0.0)
    log_student = torch.log_softmax(logits, dim=-1).masked_fill(~(mask & has_mass), 0.0)
    return (torch.xlogy(teacher, teacher) - teacher * log_student).sum()


def dense_teacher(q, k, visible, softmax_scale) -> torch.Tensor:
    k = k.expand(-1, q.shape[1], -1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    logits = logits.masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1)
    p = torch.softmax(logits.masked_fill(empty[:, None], 0.0), dim=-1)
    return p.masked_fill(empty[:, None], 0.0).sum(0)
