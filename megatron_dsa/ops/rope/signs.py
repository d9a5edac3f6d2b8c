"""The matrix of signs of the Walsh-Hadamard transform."""

import torch

from megatron_dsa.ops.common.capture import tensor_cache


@tensor_cache(8)
def hadamard_signs(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the symmetric matrix ``[size, size]`` of 1 and -1; ``size`` is a power of two.

    Its product with itself is ``size`` times the identity.
    """
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix
