"""Muon in float64, from the formulas: one step, one matrix at a time.

Jordan 2024 (iteration and momentum), Liu et al. 2025 (scale and weight decay), DeepSeek-V4
(coefficients of ten iterations).
"""

import torch

DEEPSEEK_V4 = [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
COEFFICIENTS = {"deepseekv4": DEEPSEEK_V4, "quintic": QUINTIC}


def orthogonalised(matrix, coefficients):
    """Return the iteration's result: singular values near 1."""
    x = matrix.double() / matrix.double().norm()
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def scaled_blocks(matrix, sizes, coefficients, extra):
    """Return the update of a matrix with blocks of heights ``sizes``, each scaled by its shape."""
    updates = [
        orthogonalised(block, coefficients) * max(block.shape) ** 0.5 * extra
        for block in matrix.split(sizes)
    ]
    return torch.cat(updates)
