"""KDA in torch for any device, dims and documents, within the workspace.

The backward recomputes each part under autograd; the delta rule runs in segments of chunks and
saves the state before each segment. Decays come from differences of cumulative logs within a chunk,
which are never positive, so they cannot overflow.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad, rms_norm, silu

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, ceil_div, items_within, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.kda.spec import CHUNK, ConvolutionInputs, KDAInputs, NormInputs
from megatron_dsa.ops.naive import EPS


def _rerun(function: Callable, tensors: Sequence[torch.Tensor], grads: Any) -> Any:
    """Recompute ``function(*tensors)`` and return the gradients of ``tensors``."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grads)


def _document_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    token = torch.arange(tokens, device=cu_seqlens.device)
    return torch.bucketize(token, cu_seqlens[1:].long(), right=True)


def kda_convolution(inputs: ConvolutionInputs) -> torch.Tensor:
    return _Convolution.apply(inputs.x, inputs.weight, inputs)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, inputs):
        ctx.save_for_backward(x, weight)
        ctx.masks = _masks_of_taps(inputs)
        # Temporaries are input, product, sum, result, and the gradients of all four.
        size = 8 * x.shape[0] * x.shape[1] * weight.element_size()
        ctx.channels = items_within(inputs.workspace_bytes, size)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for part in slices(x.shape[2], ctx.channels):
            out[..., part] = _convolve(x[..., part], weight[part], ctx.masks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dweight = torch.empty_like(weight)
        for part in slices(x.shape[2], ctx.channels):
            dx[..., part], dweight[part] = _rerun(
                lambda x, weight: _convolve(x, weight, ctx.masks),
                (x[..., part], weight[part]),
                dout[..., part],
            )
        return dx, dweight, None


def _masks_of_taps(inputs: ConvolutionInputs) -> list[torch.Tensor | None]:
    """Return per tap a bool ``[tokens, 1]``, true if the tap reads another document's token."""
    tokens = inputs.x.shape[1]
    if inputs.cu_seqlens is None:
        return [None] * inputs.weight.shape[2]
    document = _document_of(inputs.cu_seqlens, tokens)
    before = (pad(document, (back, 0), value=-1)[:tokens] for back in range(inputs.weight.shape[2]))
    return [(each != document)[:, None] for each in before]


def _convolve(x: torch.Tensor, weight: torch.Tensor, masks) -> torch.Tensor:
    wide, width = x.to(weight.dtype), weight.shape[2]
    total = wide * weight[:, 0, -1]
    for back in range(1, width):
        shifted = pad(wide, (0, 0, back, 0))[:, : x.shape[1]]
        if masks[back] is not None:
            shifted = shifted.masked_fill(masks[back], 0.0)
        total = total + shifted * weight[:, 0, width - 1 - back]
    return silu(total).to(x.dtype)


def kda_norm(inputs: NormInputs) -> torch.Tensor:
    return _Norm.apply(inputs.x, inputs.gate, inputs.weight, inputs)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, inputs):
        ctx.save_for_backward(x, gate, weight)
        size = 10 * x[:, :1].numel() * accumulation_dtype(x.dtype).itemsize
        ctx.eps, ctx.tokens = inputs.eps, items_within(inputs.workspace_bytes, size)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for part in slices(x.shape[1], ctx.tokens):
            out[:, part] = _gated(x[:, part], gate[:, part], weight, ctx.eps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, gate, weight = ctx.saved_tensors
        dx, dgate = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, gate))
        dweight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for part in slices(x.shape[1], ctx.tokens):
            dx[:, part], dgate[:, part], added = _rerun(
                lambda x, gate, weight: _gated(x, gate, weight, ctx.eps),
                (x[:, part], gate[:, part], weight.to(dweight.dtype)),
                dout[:, part],
            )
            dweight += added
        return dx, dgate, dweight.to(weight.dtype), None


def _gated(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = accumulation_dtype(x.dtype)
    normed = rms_norm(x.to(dtype), x.shape[-1:], weight.to(dtype), eps)
    return (normed * gate.to(dtype).sigmoid()).to(x.dtype)


def kda_attention(inputs: KDAInputs) -> torch.Tensor:
    return _DeltaRule.apply(*inputs.tensors, inputs)


class _Masks(NamedTuple):
    """Bool masks that separate documents within chunks.

    Attributes:
        pairs: ``[chunks, CHUNK, CHUNK]``: query and key share a document, and the key is not later.
        first, last: ``[chunks, CHUNK]``: the token belongs to the document of the state before or
            after the chunk.
    """

    pairs: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, document: torch.Tensor, chunks: slice) -> "_Masks":
        """Return the masks of ``chunks`` from each token's ``document [all chunks, CHUNK]``."""
        last = document[:, -1:]
        before = torch.cat([document[:1, :1], last[:-1]])[chunks]
        document, last = document[chunks], last[chunks]
        pairs = (document[:, :, None] == document[:, None]).tril()
        return cls(pairs, document == before, document == last)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, A_log, dt_bias, inputs):
        batch, tokens, heads, dim = q.shape
        ctx.document = None
        if inputs.cu_seqlens is not None:
            padded = ceil_div(tokens, CHUNK) * CHUNK
            ctx.document = _document_of(inputs.cu_seqlens, padded).view(-1, CHUNK)
        ctx.lower_bound, ctx.segment = inputs.lower_bound, inputs.segment
        ctx.device = q.device
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        states, state = [], A_log.new_zeros(batch, heads, dim, dim)
        for part in slices(tokens, ctx.segment):
            states.append(state)
            out[:, part], state = _segment_of(ctx, part)(
                *(x[:, part] for x in (q, k, v, g, beta)), A_log, dt_bias, state
            )
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, *states)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        *by_token, A_log, dt_bias = ctx.saved_tensors[:7]
        states = ctx.saved_tensors[7:]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in by_token]
        dA_log, ddt_bias = torch.zeros_like(A_log), torch.zeros_like(dt_bias)
        parts = zip(slices(dout.shape[1], ctx.segment), states, strict=True)
        dstate: Any = None
        for part, state in reversed(list(parts)):
            dstate = torch.zeros_like(state) if dstate is None else dstate
            *found, dA, ddt, dstate = _rerun(
                _segment_of(ctx, part),
                (*(x[:, part] for x in by_token), A_log, dt_bias, state),
                (dout[:, part], dstate),
            )
            for grad, each in zip(grads, found, strict=True):
                grad[:, part] = each
            dA_log += dA
            ddt_bias += ddt
        return *grads, dA_log, ddt_bias, None


def _segment_of(ctx, part: slice) -> Callable:
    chunks, document = slice(part.start // CHUNK, ceil_div(part.stop, CHUNK)), ctx.document
    if document is None:
        chunks, document = slice(1), torch.zeros(1, CHUNK, device=ctx.device)
    masks = _Masks.of(document, chunks)
    return partial(_segment, masks=masks, lower_bound=ctx.lower_bound)


def _segment(
    q, k, v, g, beta, A_log, dt_bias, state, masks: _Masks, lower_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a segment's chunks and the state after them.

    ``G`` sums log decays from the chunk's first token on. One solve per chunk corrects all values:
    ``U = (I + tril(beta A))^-1 beta (v - (k exp(G)) S)``, ``A_ij = sum_d k_id k_jd
    exp(G_id - G_jd)``.
    """
    tokens, dim, dtype = q.shape[1], q.shape[3], v.dtype
    d = lower_bound * torch.sigmoid(
        A_log.exp()[:, None] * (g.to(A_log.dtype) + dt_bias.view(-1, dim))
    )
    beta = beta[..., None].to(A_log.dtype).sigmoid()
    q, k, v, d, beta = (_chunked(x.to(A_log.dtype)) for x in (q, k, v, d, beta))
    q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    q, total = q * dim**-0.5, d.cumsum(-2)
    first, last = masks.first[..., None], masks.last[..., None]
    # [B, H, chunks, query, key, D]
    decay = (
        (total[..., :, None, :] - total[..., None, :, :])
        .masked_fill(~masks.pairs[..., None], float("-inf"))
        .exp()
    )
    keys, queries = (decay * k[..., None, :, :] @ torch.stack([k, q], -1)).unbind(-1)
    begun = total.exp() * first
    right = torch.cat([v, k * begun], -1) * beta
    values, of_state = torch.linalg.solve_triangular(
        (keys * beta).tril(-1), right, upper=False, unitriangular=True
    ).chunk(2, -1)
    q, ends = q * begun, total[..., -1:, :]
    k = k * (ends - total).masked_fill(~last, float("-inf")).exp()
    kept = (ends.exp() * first[:, -1:]).transpose(-1, -2)
    out = []
    for n in range(q.shape[2]):
        new = values[:, :, n] - of_state[:, :, n] @ state
        out.append(q[:, :, n] @ state + queries[:, :, n] @ new)
        state = kept[:, :, n] * state + k[:, :, n].transpose(-1, -2) @ new
    outputs = torch.stack(out, 2).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return outputs[:, :tokens].to(dtype), state


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """Turn ``[B, tokens, H, D]`` into ``[B, H, chunks, CHUNK, D]``, padded with zeros."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)
