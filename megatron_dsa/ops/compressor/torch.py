"""Compressor pooling in torch, in chunks of groups."""

from typing import Any

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, items_within, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.compressor.spec import CompressorInputs
from megatron_dsa.ops.layout.compressed import Groups


def compress(inputs: CompressorInputs) -> torch.Tensor:
    return _Compress.apply(inputs.values, inputs.scores, inputs.ape, inputs)


def _chunks(inputs: CompressorInputs):
    positions = inputs.ratio * (2 if inputs.overlap else 1)
    acc = accumulation_dtype(inputs.values.dtype).itemsize
    # Temporary bytes: values, scores, probabilities, both gradients, torch's intermediates.
    slots = items_within(inputs.workspace_bytes, positions * (inputs.dim * 8 * acc + 32))
    return slices(inputs.groups.first_token.shape[0], slots)


def _parts(inputs: CompressorInputs, slots: slice):
    """Yield channels, tokens and ``used [g, ratio]`` of groups, then of previous groups.

    Unused entries index token 0, which must not affect results.
    """
    groups, width = inputs.groups, inputs.values.shape[1]
    first = groups.first_token[slots].long()[:, None]
    position = torch.arange(inputs.ratio, device=first.device)
    used = (first >= 0).expand(-1, inputs.ratio)
    tokens = first + position * groups.token_step
    yield slice(width - inputs.dim, width), torch.where(used, tokens, 0), used
    if inputs.overlap:
        used = used & (groups.position[slots] > 0)[:, None]
        tokens = tokens - inputs.ratio * groups.token_step
        yield slice(0, inputs.dim), torch.where(used, tokens, 0), used


def _softmax(inputs: CompressorInputs, slots: slice):
    dtype = accumulation_dtype(inputs.values.dtype)
    parts = list(_parts(inputs, slots))
    values: list[torch.Tensor] = []
    scores: Any = []
    for channels, tokens, used in parts:
        unused = ~used[..., None]
        value = inputs.values[:, channels][tokens].to(dtype)
        score = inputs.scores[:, channels][tokens].to(dtype) + inputs.ape[:, channels]
        values.append(value.masked_fill_(unused, 0.0))
        scores.append(score.masked_fill_(unused, float("-inf")))
    scores = torch.cat(scores, 1)
    top = scores.amax(1, keepdim=True)
    # Without finite scores, probabilities are 0 instead of 0/0.
    probs = scores.sub_(torch.where(top == float("-inf"), 0.0, top)).exp_()
    total = probs.sum(1, keepdim=True)
    return torch.cat(values, 1), probs.div_(torch.where(total == 0, 1.0, total)), parts


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scores, ape, inputs):
        groups = inputs.groups
        ctx.save_for_backward(values, scores, ape, groups.first_token, groups.position)
        ctx.rest = (groups.token_step, inputs.ratio, inputs.overlap, inputs.workspace_bytes)
        pooled = values.new_zeros(groups.first_token.shape[0], inputs.dim)
        if values.shape[0] == 0:
            return pooled
        for slots in _chunks(inputs):
            chunk, probs, _ = _softmax(inputs, slots)
            pooled[slots] = chunk.mul_(probs).sum(1).to(values.dtype)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx, dpooled):
        values, scores, ape, first_token, position = ctx.saved_tensors
        token_step, *rest = ctx.rest
        groups = Groups(first_token, position, token_step)
        inputs = CompressorInputs(values, scores, ape, groups, *rest)
        dvalues = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
        dscores, dape = torch.zeros_like(dvalues), torch.zeros_like(ape)
        if values.shape[0] == 0:
            return dvalues, dscores, dape, None
        dtype = accumulation_dtype(values.dtype)
        for slots in _chunks(inputs):
            chunk, probs, parts = _softmax(inputs, slots)
            dvalue = probs * dpooled[slots].to(dtype)[:, None]
            dscore = chunk.sub_((chunk * probs).sum(1, keepdim=True)).mul_(dvalue)
            begin = 0
            for channels, index, used in parts:
                positions, begin = slice(begin, begin + inputs.ratio), begin + inputs.ratio
                # A token is in one group per channel part, so sums have one term.
                index, unused = index.flatten(), ~used[..., None]
                for total, part in ((dvalues, dvalue), (dscores, dscore)):
                    part = part[:, positions].masked_fill_(unused, 0.0)
                    total[:, channels].index_add_(0, index, part.to(total.dtype).flatten(0, 1))
                dape[:, channels] += dscore[:, positions].sum(0)
        return dvalues, dscores, dape, None
