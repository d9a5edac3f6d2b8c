"""Index scores of inference engines, written from public descriptions with numpy alone.

DeepSeek-V3.2's ``inference/kernel.py`` (scales, weights) and DeepGEMM's
``sm90_fp8_mqa_logits.cuh`` (order of the sum over heads; what nvcc of CUDA 12.1 to 13.0 fuses in
it). Roundings to bf16 and e4m3 are explicit;
no code of the package and no float8 of torch takes part.
"""

import numpy as np


def rounded(x, mantissa, smallest, largest):
    """Round float64 to a binary format, ties to even: bits of mantissa, least exponent, largest."""
    _, exponent = np.frexp(x)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, smallest) - mantissa)
    return np.clip(np.rint(x / unit) * unit, -largest, largest)


def to_bf16(x):
    return rounded(np.asarray(x, np.float64), 7, -126, 3.4e38)


def to_e4m3(x):
    return rounded(x, 3, -6, 448.0)


def quantised(x):
    """e4m3 values and power-of-two scales of vectors ``[..., D]`` that bf16 holds, as float64."""
    largest = np.maximum(np.abs(x).max(-1), np.float32(1e-4))
    raw = (largest.astype(np.float32) * np.float32(1 / 448)).astype(np.float64)
    mantissa, exponent = np.frexp(raw)  # raw = mantissa * 2^exponent, mantissa in [0.5, 1)
    scale = np.ldexp(1.0, exponent - (mantissa == 0.5))
    return to_e4m3(x / scale[..., None]), scale


def scores(q, k, weights):
    """fp32 scores ``[Sq, Skv]``.

    Args:
        q: ``[Sq, HI, D]``, k: ``[Skv, D]``, float64 arrays of numbers that bf16 holds.
        weights: ``[Sq, HI]`` fp32, constants included; HI a multiple of 8.
    """
    (q, q_scale), (k, k_scale) = quantised(q), quantised(k)
    weights = (weights.astype(np.float64) * q_scale).astype(np.float32)
    out = np.empty((len(q), len(k)), np.float32)
    for i, query in enumerate(q):
        # Exact, then rounded once; longdouble makes a product and a sum one rounding.
        products = np.maximum((query @ k.T).astype(np.float32), 0).astype(np.longdouble)
        weighted = weights[i].astype(np.longdouble)[:, None] * products
        lanes = []
        for lane in range(4):
            sums = []
            for head in (2 * lane, 2 * lane + 1):
                # A sum of two products: one is rounded, then the other is fused with it.
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
    """Ascending keys of the best scores among the first ``seen`` of each query; ties to the first;
    -1 padded."""
    lists = np.full((len(scores), topk), -1, np.int32)
    for row, count, out in zip(scores, seen, lists, strict=True):
        order = np.lexsort((np.arange(count), -row[:count]))[:topk]
        out[: len(order)] = np.sort(order)
    return lists


def hadamard(x):
    """Normalised transform of the last dim, in float64, rounded to bf16."""
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return to_bf16(x @ matrix * np.float64(np.float32(x.shape[-1] ** -0.5)))


def as_cached(x, block, power_of_two):
    """Vectors ``[..., D]`` that bf16 holds as an fp8 cache holds them, float64."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    if power_of_two:
        values, scale = quantised(blocks)
    else:
        scale = np.abs(blocks).max(-1).astype(np.float32) / np.float32(448)
        scale[scale == 0] = 1
        values = to_e4m3((blocks.astype(np.float32) / scale[..., None]).astype(np.float64))
        values, scale = values.astype(np.float32), scale.astype(np.float32)
    return to_bf16(values * scale[..., None]).reshape(x.shape)
