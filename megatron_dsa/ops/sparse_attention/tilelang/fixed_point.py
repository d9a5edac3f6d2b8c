"""Key gradients summed in 64-bit integers, independent of the order of atomics.

Contributions are multiplied by ``units``, a power of two, and rounded. Query head r adds ``dS Q_r +
P dO_r`` to key k, where ``|dS| = scale P |dO_r . (V_k - O_r)|`` and P sums to 1 over keys. No
element exceeds

    query heads * (scale * v_dim * max|dO| * (max|V| + max|O|) * max|Q| + max|dO|)

and ``units`` keeps twice this bound, for bf16 roundings, below 2^62. The rounding error of n
contributions, about ``sqrt(n / 12) / units``, is below 1e-6 of the norm for 2^18 query heads, as in
fp32.
"""

from __future__ import annotations

import torch

from megatron_dsa.ops.hopper.sums import largest, units_for
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs


def units_per_one(
    inputs: SparseAttentionInputs, out: torch.Tensor, dout: torch.Tensor
) -> torch.Tensor:
    """Return the key gradient's fixed-point scale without GPU synchronisation.

    The scale is NaN or 0 if an input other than the keys is not finite. With ``inputs.key_sum``,
    one scale serves all calls.
    """
    values = inputs.kv[:, : inputs.v_dim]
    values = largest(torch.where(values.isfinite(), values, 0.0))
    if inputs.key_sum is None:
        count, queries, gradient = inputs.q.shape[:2].numel(), largest(inputs.q), largest(dout)
        outputs = largest(out)
    else:
        count, (queries, gradient) = inputs.key_sum.query_heads, inputs.key_sum.bounds()
        outputs = values  # attention outputs are averages of values
    per_query_head = inputs.softmax_scale * inputs.v_dim * gradient * (values + outputs)
    return units_for(count, per_query_head * queries + gradient)


def to_float(fixed: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Convert integer key gradients ``[keys, dim]`` to fp32 in column order.

    The backward stores 16 columns ``[2 halves, 4 threads, 2]`` as ``[2 halves, 2, 4 threads]``.
    """
    keys, dim = fixed.shape
    ordered = torch.empty(keys, dim, dtype=torch.float32, device=fixed.device)
    ordered.view(keys, dim // 16, 2, 4, 2).copy_(
        fixed.view(keys, dim // 16, 2, 2, 4).transpose(-1, -2)
    )
    return ordered.div_(units)
