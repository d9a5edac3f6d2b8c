"""Compressor pooling, stated as plainly as possible: loops over groups. Differentiable."""

import torch

from megatron_dsa.ops.compressor.api import CompressorInputs


def compress(inputs: CompressorInputs) -> torch.Tensor:
    """Return ``pooled [G, d]`` in the dtype of the values."""
    groups, ratio, dim = inputs.groups, inputs.ratio, inputs.dim
    own, previous = slice(inputs.values.shape[1] - dim, None), slice(0, dim)
    dtype = torch.promote_types(inputs.values.dtype, torch.float32)
    pooled = []
    for first, position in zip(groups.first_row.tolist(), groups.position.tolist(), strict=True):
        taken = []  # (row, place in its group, channels)
        if first >= 0:
            taken += [(first + i * groups.row_step, i, own) for i in range(ratio)]
        if first >= 0 and inputs.overlap and position > 0:
            taken += [(first + (i - ratio) * groups.row_step, i, previous) for i in range(ratio)]
        if not taken:
            pooled.append(inputs.values.new_zeros(dim))
            continue
        values = torch.stack([inputs.values[row, part].to(dtype) for row, _, part in taken])
        scores = torch.stack(
            [inputs.scores[row, part].to(dtype) + inputs.ape[i, part] for row, i, part in taken]
        )
        top = scores.detach().amax(0)
        weights = torch.exp(scores - torch.where(top == float("-inf"), 0.0, top))
        total = weights.sum(0)
        mean = (weights * values).sum(0) / torch.where(total == 0, 1.0, total)
        pooled.append(mean.to(inputs.values.dtype))
    return torch.stack(pooled) if pooled else inputs.values.new_zeros(0, dim)
