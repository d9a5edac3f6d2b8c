"""Index scores of inference engines, from public descriptions, in numpy.

Sources: DeepSeek-V3.2's ``inference/kernel.py`` (scales, weights) and DeepGEMM's
``sm90_fp8_mqa_logits.cuh`` (order of the sum over heads; fusion by nvcc of CUDA 12.1 to 13.0).
Roundings to bf16 and e4m3 are explicit; neither package code nor torch's float8 is used.
"""

import numpy as np


def rounded(x, mantissa, smallest, largest):
    """Round float64 to a binary format, ties to even: mantissa bits, least exponent, largest
    number.
    """
    _, exponent = np.frexp(x)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, smallest) - mantissa)
    return np.clip(np.rint(x / unit) * unit, -largest, largest)


def to_bf16(x):
    return rounded(np.asarray(x, np.float64), 7, -126, 3.4e38)


def to_e4m3(x):
    return rounded(x, 3, -6, 448.0)


def quantised(x):
    """Return e4m3 values and power-of-two scales, in float64, of bf16 vectors ``[..., D]``."""
    largest = np.maximum(np.abs(x).max(-1), np.float32(1e-4))
    raw = (largest.astype(np.float32) * np.float32(1 / 448)).astype(np.float64)
    mantissa, exponent = np.frexp(raw)  # raw = mantissa * 2^exponent, mantissa in [0.5, 1)
    scale = np.ldexp(1.0, exponent - (mantissa == 0.5))
    return to_e4m3(x / scale[..., None]), scale


def scores(q, k, weights):
    """Return fp32 scores ``[Sq, Skv]``.

    Args:
        q: ``[Sq, HI, D]``, k: ``[Skv, D]``, float64 arrays of bf16 numbers.
        weights: ``[Sq, HI]`` fp32, including constants; HI a multiple of 8.
    """
    (q, q_scale), (k, k_scale) = quantised(q), quantised(k)
    weights = (weights.astype(np.float64) * q_scale).astype(np.float32)
    out = np.empty((len(q), len(k)), np.float32)
    for i, query in enumerate(q):
        # Exact, then rounded once; longdouble rounds a product and a sum once.
        products = np.maximum((query @ k.T).astype(np.float32), 0).astype(np.longdouble)
        weighted = weights[i].astype(np.longdouble)[:, None] * products
        lanes = []
        for lane in range(4):
            sums = []
            for head in (2 * lane, 2 * lane + 1):
                # A sum of two products: one is rounded, the other fused with it.
                total = np.zeros(len(k), np.float32)
                second, first = head + 8, head
                for later in (second, first, *range(head + 16, len(query), 8)):
                    if later < len(query):
                        total = (total + weighted[later]).astype(np.float32)
                sums.append(total)
            lanes.append((sums[0] + sums[1]) * k_scale.astype(np.float32))
        out[i] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    return out


def best(scores, seen, topk):
    """Return ascending keys of the best scores among each query's first ``seen``; ties to the
    first; -1 padded.
    """
    lists = np.full((len(scores), topk), -1, np.int32)
    for row, count, out in zip(scores, seen, lists, strict=True):
        order = np.lexsort((np.arange(count), -row[:count]))[:topk]
        out[: len(order)] = np.sort(order)
    return lists


def hadamard(x):
    """Transform the last dim, normalised, in float64, rounded to bf16."""
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return to_bf16(x @ matrix * np.float64(np.float32(x.shape[-1] ** -0.5)))


def as_cached(x, block, power_of_two):
    """Round bf16 vectors ``[..., D]`` like an fp8 cache; return float64."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    if power_of_two:
        values, scale = quantised(blocks)
    else:
        scale = np.abs(blocks).max(-1).astype(np.float32) / np.float32(448)
        scale[scale == 0] = 1
        values = to_e4m3((blocks.astype(np.float32) / scale[..., None]).astype(np.float64))
        values, scale = values.astype(np.float32), scale.astype(np.float32)
    return to_bf16(values * scale[..., None]).reshape(x.shape)
