"""Compressor pooling, stated as plainly as possible: loops over groups. Differentiable."""

import torch

from megatron_dsa.ops.compressor.inputs import CompressorProblem


def compress(problem: CompressorProblem) -> torch.Tensor:
    """Return ``pooled [G, d]`` in the dtype of the values."""
    groups, ratio, dim = problem.groups, problem.ratio, problem.dim
    own, previous = slice(problem.values.shape[1] - dim, None), slice(0, dim)
    dtype = torch.promote_types(problem.values.dtype, torch.float32)
    pooled = []
    for first, position in zip(groups.first_row.tolist(), groups.position.tolist(), strict=True):
        taken = []  # (row, place in its group, channels)
        if first >= 0:
            taken += [(first + i * groups.row_step, i, own) for i in range(ratio)]
        if first >= 0 and problem.overlap and position > 0:
            taken += [(first + (i - ratio) * groups.row_step, i, previous) for i in range(ratio)]
        if not taken:
            pooled.append(problem.values.new_zeros(dim))
            continue
        values = torch.stack([problem.values[row, part].to(dtype) for row, _, part in taken])
        scores = torch.stack(
            [problem.scores[row, part].to(dtype) + problem.ape[i, part] for row, i, part in taken]
        )
        top = scores.detach().amax(0)
        weights = torch.exp(scores - torch.where(top == float("-inf"), 0.0, top))
        total = weights.sum(0)
        mean = (weights * values).sum(0) / torch.where(total == 0, 1.0, total)
        pooled.append(mean.to(problem.values.dtype))
    return torch.stack(pooled) if pooled else problem.values.new_zeros(0, dim)
