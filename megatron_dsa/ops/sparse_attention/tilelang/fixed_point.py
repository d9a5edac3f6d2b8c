"""Key gradients summed in 64-bit integers: the order of the sum does not matter, so it repeats.

Every contribution (of a tile of rows, or of all heads of a query) is a fp32 number; times
``units``, a power of two, and rounded to an integer it is added atomically. Integer addition is
associative, so any order gives the same bits.

Overflow is impossible by construction. From one query row r, key k gets ``dS Q_r + P dO_r`` with
``|dS| = scale P |dO_r . (V_k - O_r)|``, and all P of a row sum to at most 1, so each element of the
whole sum is at most

    rows * (scale * v_dim * max|dO| * (max|V| + max|O|) * max|Q| + max|dO|)

and ``units`` puts twice that (the products come from bf16 roundings) below 2^62. The rounding error
of a contribution is at most half an integer: for n contributions ``n / (2 units)``, or about
``sqrt(n / 12) / units``, since the errors are independent. With 2^18 rows of ordinary data the
gradient differs from the fp32 sum by less than 1e-6 (relative norm), the error of fp32 itself.
"""

from __future__ import annotations

import torch

from megatron_dsa.ops.hopper.sums import largest, units_for
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs


def units_per_one(
    inputs: SparseAttentionInputs, out: torch.Tensor, dout: torch.Tensor
) -> torch.Tensor:
    """Return the fixed-point scale: fp32 ``[1]``, a power of two, without synchronisation.

    It is NaN or 0 where an input is not finite, and so are all gradients then. Keys that are not
    finite do not count: a query that selected one has such an output. With ``inputs.key_sum`` it
    holds for all calls that add to that sum, and ``out`` is not read.
    """
    values = inputs.kv[:, : inputs.v_dim]
    values = largest(torch.where(values.isfinite(), values, 0.0))
    if inputs.key_sum is None:
        rows, queries, gradient = inputs.q.shape[:2].numel(), largest(inputs.q), largest(dout)
        outputs = largest(out)
    else:
        rows, (queries, gradient) = inputs.key_sum.rows, inputs.key_sum.bounds()
        outputs = values  # an output is a mean of values
    per_row = inputs.softmax_scale * inputs.v_dim * gradient * (values + outputs)
    return units_for(rows, per_row * queries + gradient)


def to_float(fixed: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Return integers ``[rows, dim]`` of Hopper's one kernel as fp32 in column order.

    It stores 16 columns as ``[2 halves, 2, 4 threads]`` instead of ``[2 halves, 4 threads, 2]``.
    """
    rows, dim = fixed.shape
    ordered = torch.empty(rows, dim, dtype=torch.float32, device=fixed.device)
    ordered.view(rows, dim // 16, 2, 4, 2).copy_(
        fixed.view(rows, dim // 16, 2, 2, 4).transpose(-1, -2)
    )
    return ordered.div_(units)
