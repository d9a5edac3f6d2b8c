"""Index scores and selection, stated as plainly as possible. Materialises everything."""

import torch


def index_scores(q, k, weights, relu=True) -> torch.Tensor:
    """``I[t, s] = sum_h w[t, h] * relu(q[t, h] . k[s])`` as ``[Sq, Skv]``."""
    products = torch.einsum("qhd,kd->qhk", q, k)
    return torch.einsum("qh,qhk->qk", weights, products.relu() if relu else products)


def engine_scores(q, k, weights) -> torch.Tensor:
    """Scores by the rule of :mod:`.engine`, fp32 ``[Sq, Skv]``.

    Every rounding is written out in float64: neither torch's fp8 dtypes nor code of the package
    takes part.

    Args:
        q, k: ``[Sq, HI, DI]`` and ``[Skv, DI]``, rounded to bf16 here.
        weights: ``[Sq, HI]``, constants included, rounded to fp32 here.
    """
    (q, q_scale), (k, k_scale) = _engine_quantized(q), _engine_quantized(k)
    weights = (weights.float().double() * q_scale).float().double()
    sums = [weights.new_zeros(len(q), len(k)) for _ in range(8)]
    heads = list(range(q.shape[1]))
    for head in heads[8:16] + heads[:8] + heads[16:]:
        products = (q[:, head] @ k.T).float().double().clamp_min(0)
        # A product of two fp32 numbers is exact in float64: product and sum round once.
        fused = sums[head % 8] + weights[:, head, None] * products
        sums[head % 8] = fused.float().double()
    while len(sums) > 1:
        sums = [(a + b).float().double() for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return (sums[0] * k_scale).float()


def _engine_quantized(x) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 numbers and power-of-two scales of vectors ``[..., D]``, both float64."""
    x = x.bfloat16().double()
    largest = x.abs().amax(-1).clamp_min(float(torch.tensor(1e-4)))  # 1e-4 is rounded to fp32
    ratio = (largest.float() * (1 / 448)).double()
    mantissa = torch.frexp(ratio).mantissa  # ratio = mantissa * 2^n, mantissa in [0.5, 1)
    scale = torch.where(mantissa == 0.5, ratio, ratio / mantissa)
    x = x / scale[..., None]
    power = torch.where(x == 0, 0, x / torch.frexp(x).mantissa)
    unit = (power / 16).clamp_min(2.0**-9)  # three bits behind the first one, subnormal below 2^-6
    return (x / unit).round() * unit, scale


def topk(scores, visible, k) -> torch.Tensor:
    """Ascending ids of the ``k`` best visible keys per row, ties to the smallest; ``-1`` padded."""
    rows = []
    for row, seen in zip(scores.tolist(), visible.tolist(), strict=True):
        ids = sorted((i for i, ok in enumerate(seen) if ok), key=lambda i: (-row[i], i))[:k]
        rows.append(sorted(ids) + [-1] * (k - len(ids)))
    return torch.tensor(rows, dtype=torch.int32, device=scores.device)
