"""Index scores and selection, stated as plainly as possible. Materialises everything."""

import torch


def index_scores(q, k, weights, relu=True) -> torch.Tensor:
    """``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` as ``[Sq, Skv]``."""
    products = torch.einsum("qhd,kd->qhk", q, k)
    return torch.einsum("qh,qhk->qk", weights, products.relu() if relu else products)


def topk(scores, visible, k) -> torch.Tensor:
    """Ascending ids of the ``k`` best visible keys per row, ties to the smallest; ``-1`` padded."""
    rows = []
    for row, seen in zip(scores.tolist(), visible.tolist(), strict=True):
        ids = sorted((i for i, ok in enumerate(seen) if ok), key=lambda i: (-row[i], i))[:k]
        rows.append(sorted(ids) + [-1] * (k - len(ids)))
    return torch.tensor(rows, dtype=torch.int32, device=scores.device)
