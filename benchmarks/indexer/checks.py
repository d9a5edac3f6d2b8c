"""Random inputs of the indexer, and errors of its results against float64 on a few tokens."""

from __future__ import annotations

import torch

from megatron_dsa.dsa_kernels import IndexerInputs

#: Query tokens whose result is compared with float64.
CHECKED_ROWS = 4


def draw(tokens: int, heads: int, dim: int, device) -> IndexerInputs:
    """Return random inputs with weights as large as the layers' (1 / sqrt(heads * dim))."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    weights = normal(tokens, heads) * (heads * dim) ** -0.5
    return IndexerInputs(normal(tokens, heads, dim), normal(tokens, dim), weights)


def scores64(inputs: IndexerInputs, row: int) -> torch.Tensor:
    """Return the index scores of a row against the keys up to its own place, in float64."""
    products = inputs.k[: row + 1].double() @ inputs.q[row].double().t()
    return products.relu() @ inputs.weights[row].double()


def selection_error(
    inputs: IndexerInputs, topk: int, indices: torch.Tensor, ascending: bool = True
) -> float:
    """Return by how much a rejected key beats a selected one, relative to the largest score.

    fp32 sums may order nearly equal scores otherwise; any more is a wrong selection, and so is
    another order where lists have to be ``ascending``.
    """
    worst = 0.0
    rows = len(indices)
    for row in {rows * (i + 1) // CHECKED_ROWS - 1 for i in range(CHECKED_ROWS)}:
        scores, chosen = scores64(inputs, row), indices[row].long()
        chosen = chosen[chosen >= 0]
        if not ascending:
            chosen = chosen.sort().values
        if len(chosen) != min(topk, row + 1) or not bool((chosen.diff() > 0).all()):
            return float("inf")
        rest = scores.clone().index_fill_(0, chosen, float("-inf")).max()
        worst = max(worst, float((rest - scores[chosen].min()) / scores.abs().max()))
    return max(worst, 0.0)


def loss_error(inputs: IndexerInputs, indices, teacher, gradients) -> float:
    """Return the largest error of the gradients of q and weights of some rows against float64."""
    worst = 0.0
    rows = len(indices)
    for row in {rows * (i + 1) // CHECKED_ROWS - 1 for i in range(CHECKED_ROWS)}:
        chosen = indices[row][indices[row] >= 0].long()
        q = inputs.q[row].detach().double().requires_grad_()
        w = inputs.weights[row].detach().double().requires_grad_()
        scores = (inputs.k.detach()[chosen].double() @ q.t()).relu() @ w
        goal = teacher[row][indices[row] >= 0].double()
        goal = goal / goal.sum()
        (torch.xlogy(goal, goal) - goal * scores.log_softmax(0)).sum().backward()
        for got, want in ((gradients[0][row], q.grad), (gradients[2][row], w.grad)):
            worst = max(worst, float((got.double() - want).norm() / want.norm()))
    return worst
