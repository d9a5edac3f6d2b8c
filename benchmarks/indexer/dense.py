"""The indexer's dense (warm-up) loss for the benchmark of the indexer, ours and Megatron's bundled.

The teacher is plain MLA: 192-dim keys of all heads, which ours expands from latents tile by tile
and the bundled function takes whole. Both compute value and gradients from given projections; the
bundled one returns the mean over rows, which is brought back to the sum.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch

from megatron_dsa.dispatch import Policy
from megatron_dsa.dsa_kernels import IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.metrics.flops import Keys
from megatron_dsa.sequence.layout import Layout

#: A way of the operation ``dense``: megatron-core's unfused function. The others are dispatch's.
BUNDLED = "megatron"


@dataclasses.dataclass(frozen=True)
class Teacher:
    """MLA's queries and what its keys are made of.

    Attributes:
        q: ``[S, H, 128 + 64]``.
        keys: latents ``[S, 512 + 64]`` and ``w_uk [H, 128, 512]``.
        scale: factor on ``q . k``.
    """

    q: torch.Tensor
    keys: LatentKeys
    scale: float

    @classmethod
    def draw(cls, rows: int, heads: int, device: torch.device) -> Teacher:
        """Return random tensors whose scores have a deviation of about 1."""
        generator = torch.Generator(device).manual_seed(2)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=device).bfloat16()

        w_uk = normal(heads, 128, 512) * 512**-0.5
        return cls(normal(rows, heads, 192), LatentKeys(normal(rows, 576), w_uk), 192**-0.5)


def flops(inputs: IndexerInputs, teacher: Teacher) -> int:
    """Return the FLOP of visible pairs: scores, their two gradients, and the teacher's scores."""
    rows, heads, dim = inputs.q.shape
    return 2 * Keys().pairs(rows) * (3 * heads * dim + teacher.q.shape[1] * teacher.q.shape[2])


def ours(inputs: IndexerInputs, teacher: Teacher, layout: Layout, policy: Policy):
    """Return the gradients of q, k and weights."""
    tensors = (inputs.q, inputs.k, inputs.weights)
    value = dense_indexer_loss(
        inputs, teacher.q, teacher.keys, layout, softmax_scale=teacher.scale, policy=policy
    )
    return torch.autograd.grad(value, tensors)


def bundled(inputs: IndexerInputs, teacher: Teacher):
    """Return the gradients of q, k and weights by megatron-core's own functions."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    rows, device = inputs.q.shape[0], inputs.q.device
    tensors = (inputs.q, inputs.k, inputs.weights)
    scores = dsa._compute_index_scores(
        inputs.q[:, None], inputs.weights[:, None], inputs.k[:, None]
    )
    heads = teacher.q.shape[1]
    keys = torch.cat([teacher.keys.expanded(slice(first, min(first + 8, heads)))
                      for first in range(0, heads, 8)], 1)  # fmt: skip
    mask = torch.full((rows, rows), float("-inf"), device=device).triu_(1)
    value = dsa.compute_dsa_indexer_loss(
        scores,
        torch.zeros(1, rows, 1, dtype=torch.int64, device=device),  # not read by the dense loss
        teacher.q[:, None],
        keys[:, None],
        teacher.scale,
        1.0,
        False,
        SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
        mask=mask,
    )
    return torch.autograd.grad(value * rows, tensors)


def error(inputs: IndexerInputs, teacher: Teacher, gradients) -> float:
    """Return the largest error of the gradients of q and weights of two rows against float64."""
    worst, rows = 0.0, len(inputs.q)
    for row in (rows // 2, rows - 1):
        q = inputs.q[row].detach().double().requires_grad_()
        w = inputs.weights[row].detach().double().requires_grad_()
        scores = (inputs.k[: row + 1].detach().double() @ q.t()).relu() @ w
        goal = 0.0
        for head, w_uk in enumerate(teacher.keys.w_uk.double()):
            latents = teacher.keys.latents[: row + 1].double()
            # As in training, keys are rounded to the dtype of the activations.
            own = (latents[:, :512] @ w_uk.t()).to(teacher.q.dtype).double()
            keys = torch.cat([own, latents[:, 512:]], 1)
            goal = goal + (keys @ teacher.q[row, head].double() * teacher.scale).softmax(0)
        goal = goal / goal.sum()
        (torch.xlogy(goal, goal) - goal * scores.log_softmax(0)).sum().backward()
        for got, want in ((gradients[0][row], q.grad), (gradients[2][row], w.grad)):
            worst = max(worst, float((got.double() - want).norm() / want.norm()))
    return worst
