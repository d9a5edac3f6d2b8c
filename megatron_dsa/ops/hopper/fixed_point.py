"""Scale of the integers in which key gradients are summed."""

import torch


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude in ``x`` as an fp32 scalar, 0 if it is empty."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x, ord=float("inf")).float()


def units_for(rows: int, per_row: torch.Tensor) -> torch.Tensor:
    """Return the scale: fp32 ``[1]``, a power of two, without synchronisation.

    ``rows`` rows of at most ``per_row`` each reach 2^61, with room for the roundings of bf16.
    """
    exponent = torch.floor(62 - torch.log2(2 * rows * per_row)).clamp(max=100)
    return torch.exp2(exponent).view(1)
