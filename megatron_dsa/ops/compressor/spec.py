"""Compressor pooling: inputs, implementations, reference."""

from dataclasses import dataclass

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON
from megatron_dsa.ops.dispatch.support import HALF
from megatron_dsa.ops.layout.compressed import Groups
from megatron_dsa.ops.meta import differentiable

_HERE = __package__

COMPRESSOR = Operation(
    "compressor",
    "pooling of positions, forward and backward",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton.launch:compress",
            Support(
                covers="pooled keys; values, scores, ape",
                package=TRITON,
                **PORTABLE,
                dtypes=(*HALF, torch.float32),
            ),
        ),
        Candidate("torch", f"{_HERE}.torch:compress", Support(covers="any shape"), fused=False),
    ),
    fake=f"{_HERE}.spec:fake",
)


@dataclass(frozen=True)
class CompressorInputs:
    """Inputs of compressor pooling.

    Group ``g`` pools the tokens ``first_token + i * token_step``, ``0 <= i < ratio``, in the *last*
    ``d`` channels of ``values`` and of ``scores + ape[i]``, and with overlap, if ``position[g] >
    0``, the tokens ``first_token + (i - ratio) * token_step`` in the *first* ``d``. Channels whose
    scores are all ``-inf`` give 0. Tokens in no group are never read.
    """

    values: torch.Tensor
    scores: torch.Tensor
    ape: torch.Tensor
    groups: Groups
    ratio: int
    overlap: bool
    workspace_bytes: int

    @property
    def dim(self) -> int:
        return self.values.shape[1] // (2 if self.overlap else 1)

    def check(self) -> None:
        values, scores, groups = self.values, self.scores, self.groups
        require(
            self.ratio >= 2, f"ratio must be at least 2, got {self.ratio}: pass the layer's ratio"
        )
        fix = "pass both halves of the compressor's projection"
        require_tensor("values", values, ("tokens", "c * d"), FLOATS, fix=fix)
        require_tensor("scores", scores, tuple(values.shape), (values.dtype,), values, fix)
        require(
            values.stride(1) == 1 == scores.stride(1),
            "the last dim of values and scores must be contiguous, got strides "
            f"{values.stride()} and {scores.stride()}: call .contiguous() on them",
        )
        require(
            not self.overlap or values.shape[1] % 2 == 0,
            "with overlap the width of values must be even (two halves of d channels), got "
            f"{values.shape[1]}: project to 2 * d channels",
        )
        shape, dtypes = (self.ratio, values.shape[1]), (accumulation_dtype(values.dtype),)
        require_tensor("ape", self.ape, shape, dtypes, values, "pass the ape of this layer's ratio")
        shapes = tuple(groups.first_token.shape), tuple(groups.position.shape)
        require(
            len(shapes[0]) == 1 and shapes[0] == shapes[1],
            "groups.first_token and groups.position must be 1-dimensional and of one length, got "
            f"{shapes[0]} and {shapes[1]}: give both one entry per slot",
        )
        slots = shapes[0][0]
        require(
            groups.token_step >= 1 and slots % groups.token_step == 0,
            "groups.token_step must be positive and divide the number of slots (every batch "
            f"element has equally many), got {groups.token_step} for {slots} slots: pass the "
            "micro-batch size",
        )


def fake(candidate: Candidate, inputs: CompressorInputs) -> torch.Tensor:
    groups = inputs.groups

    def forward(values, scores, ape):
        pooled = values.new_empty(groups.first_token.shape[0], inputs.dim)
        return (pooled,), (values, scores, ape, groups.first_token, groups.position)

    def backward(values, scores, ape, *_groups):
        return torch.empty_like(values), torch.empty_like(scores), torch.empty_like(ape)

    workspace_bytes = 0 if candidate.fused else inputs.workspace_bytes
    tensors = (inputs.values, inputs.scores, inputs.ape)
    return differentiable(tensors, forward, backward, workspace_bytes)


def reference(inputs: CompressorInputs) -> torch.Tensor:
    groups, ratio, dim = inputs.groups, inputs.ratio, inputs.dim
    last, front = slice(inputs.values.shape[1] - dim, None), slice(0, dim)
    dtype = torch.promote_types(inputs.values.dtype, torch.float32)
    pooled = []
    for first, position in zip(groups.first_token.tolist(), groups.position.tolist(), strict=True):
        taken = []
        if first >= 0:
            taken += [(first + i * groups.token_step, i, last) for i in range(ratio)]
        if first >= 0 and inputs.overlap and position > 0:
            taken += [(first + (i - ratio) * groups.token_step, i, front) for i in range(ratio)]
        if not taken:
            pooled.append(inputs.values.new_zeros(dim))
            continue
        values = torch.stack([inputs.values[token, part].to(dtype) for token, _, part in taken])
        scores = torch.stack(
            [inputs.scores[token, part].to(dtype) + inputs.ape[i, part] for token, i, part in taken]
        )
        top = scores.detach().amax(0)
        weights = torch.exp(scores - torch.where(top == float("-inf"), 0.0, top))
        total = weights.sum(0)
        mean = (weights * values).sum(0) / torch.where(total == 0, 1.0, total)
        pooled.append(mean.to(inputs.values.dtype))
    return torch.stack(pooled) if pooled else inputs.values.new_zeros(0, dim)
