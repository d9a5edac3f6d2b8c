"""KL divergence from the attention's own distribution to the indexer's (DeepSeek-V3.2, eq. 4, 5).

Both losses return the *sum* over query rows of ``KL(teacher || student)``; the mean, the
coefficient and the scale of an auxiliary loss are applied by the caller. The gradient of a token on
its scores is ``student - teacher``, so an implementation forms the gradients along with the value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout


class IndexerGradients(NamedTuple):
    """Gradients of a KL sum on the indexer's tensors."""

    q: torch.Tensor  # [Sq, HI, DI], dtype of q
    k: torch.Tensor  # [Skv, DI], fp32 (fp64 for fp64 inputs)
    weights: torch.Tensor  # [Sq, HI], fp32 (fp64) or the dtype of the weights


class SparseLoss(NamedTuple):
    """What an implementation of ``sparse_indexer_loss`` returns."""

    value: torch.Tensor  # scalar, the KL sum
    gradients: IndexerGradients | None  # if they were wanted


@dataclass(frozen=True)
class SparseLossInputs:
    """Loss over the selected keys.

    Attributes:
        indexer: the indexer's tensors.
        indices: int32 ``[Sq, K]``, rows of ``indexer.k``; -1 (or out of range) selects nothing.
        topk_length: int32 ``[Sq]`` or ``None``.
        teacher: ``[Sq, K]``, attention probabilities summed over all heads (of all tensor-parallel
            ranks), not yet normalised. Rows that sum to 0 contribute nothing. **Overwritten** with
            anything.
        workspace_bytes: budget for temporary memory.
        want_gradients: whether the gradients are wanted.
        dq: ``[Sq, HI, DI]``, contiguous, in the dtype of ``indexer.q``: takes the
            gradient of q; ``None``: a new tensor does.
    """

    indexer: IndexerInputs
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    teacher: torch.Tensor
    workspace_bytes: int
    want_gradients: bool = True
    dq: torch.Tensor | None = None

    def query_gradient(self) -> torch.Tensor:
        """Return the tensor to write the gradient of q to; it may hold anything."""
        return torch.empty_like(self.indexer.q) if self.dq is None else self.dq


@dataclass(frozen=True)
class LatentKeys:
    """Keys of all heads, to be made from shared latents a few at a time (multi-head latent
    attention, not absorbed).

    Head ``h`` has the keys ``[latents[:, :R] @ w_uk[h].T, latents[:, R:]]``, ``D`` wide.

    Attributes:
        latents: ``[Skv, R + P]``: the latent, then the ``P`` dims that all heads share, rotated.
        w_uk: ``[H, D - P, R]``, in the dtype of the latents.
    """

    latents: torch.Tensor
    w_uk: torch.Tensor

    def detach(self) -> LatentKeys:
        """Return the same keys outside of the autograd graph."""
        return LatentKeys(self.latents.detach(), self.w_uk.detach())

    def expanded(self, heads: slice = slice(None)) -> torch.Tensor:
        """Return the keys ``[Skv, h, D]`` of some heads, rounded to the dtype of the latents."""
        w_uk = self.w_uk[heads]
        rank = w_uk.shape[2]
        own = (self.latents[:, :rank] @ w_uk.flatten(0, 1).t()).unflatten(1, w_uk.shape[:2])
        shared = self.latents[:, None, rank:].expand(-1, w_uk.shape[0], -1)
        return torch.cat([own, shared], dim=-1)


@dataclass(frozen=True)
class ExpandedKeys:
    """Keys of all heads as MLA's up projection returns them, and the rope key that they share.

    Head ``h`` has the keys ``[kv[:, h, :Dn], k_pe]``, ``D = Dn + P`` wide: what masked dense
    attention reads, without a copy.

    Attributes:
        kv: ``[Skv, H, Dn + Dv]``, per head the key without rope, then the value.
        k_pe: ``[Skv, P]``, the dims that all heads share, rotated; same dtype.
        v_dim: dims of the value, ``Dv``.
    """

    kv: torch.Tensor
    k_pe: torch.Tensor
    v_dim: int

    @property
    def own(self) -> torch.Tensor:
        """The dims that each head has for itself, ``[Skv, H, Dn]``, a view."""
        return self.kv[..., : self.kv.shape[2] - self.v_dim]

    def detach(self) -> ExpandedKeys:
        """Return the same keys outside of the autograd graph."""
        return ExpandedKeys(self.kv.detach(), self.k_pe.detach(), self.v_dim)

    def expanded(self, heads: slice = slice(None)) -> torch.Tensor:
        """Return a copy of the keys ``[Skv, h, D]`` of some heads."""
        own = self.own[:, heads]
        return torch.cat([own, self.k_pe[:, None].expand(-1, own.shape[1], -1)], dim=-1)


#: Keys from which the dense loss forms its teacher: ``[Skv, Hk, D]``, or what they come from.
TeacherKeys = torch.Tensor | LatentKeys | ExpandedKeys


@dataclass(frozen=True)
class DenseLossInputs:
    """Loss over all visible keys.

    Attributes:
        indexer: the indexer's tensors; gradients flow to q, k and weights.
        layout: which slots each query token sees.
        q: ``[Sq, H, D]`` and k: ``[Skv, Hk, D]`` with ``Hk`` 1 or ``H``, :class:`LatentKeys` or
            :class:`ExpandedKeys`: what the attention scores are made of (the teacher). No gradient
            flows to them.
        softmax_scale: factor on ``q . k``.
        head_group: process group over which the teacher's head sum is completed, or ``None``.
        workspace_bytes: budget for temporary memory.
        other_lse: ``[Sq, H]``, log of what the teacher's softmax has in its denominator besides
            these keys, or ``None``.
        lse: ``[Sq, H]``, natural log-sum-exp of the scaled attention scores over the visible keys
            (without ``other_lse``), as dense attention returns it; anything in rows that see
            nothing. ``None``: it is computed.
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
