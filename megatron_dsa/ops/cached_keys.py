"""Keys rounded as in the fp8 caches of inference engines, with straight-through gradients.

Engines cache blocks of e4m3 numbers with a scale per block, and rope dims in bf16; their kernels
dequantize the blocks to bf16 (``docs/guide/rl.md``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_dsa.ops.common.arithmetic import items_within, slices
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.indexer_topk import engine, fp8

#: Temporary bytes per element: two fp32 copies, one bf16, one fp8.
_BYTES = 11


@dataclass(frozen=True)
class CacheFormat:
    """Format of the dims without rope: ``block`` dims share a scale.

    ``quantize`` maps ``x [..., block]`` to e4m3 values and fp32 scales ``[...]``.
    """

    block: int
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


#: V3.2's latents: a scale is the block's largest magnitude over 448.
MLA_CACHE = CacheFormat(128, fp8.quantized)
#: V4's keys: scales are powers of two.
CSA_CACHE = CacheFormat(64, engine.quantized)


def as_cached(
    x: torch.Tensor, form: CacheFormat, workspace_bytes: int, rope_dims: int = 0
) -> torch.Tensor:
    """Quantize and dequantize bf16 keys ``[..., D]``, with straight-through gradient.

    The last ``rope_dims`` are unchanged; the number of other dims is a multiple of ``form.block``.
    """
    return _AsCached.apply(x, form, workspace_bytes, rope_dims)


class _AsCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, form, workspace_bytes, rope_dims):
        tokens = x.flatten(0, -2)
        dims = tokens.shape[1] - rope_dims
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        out[:, dims:] = tokens[:, dims:]
        for part in slices(len(tokens), items_within(workspace_bytes, _BYTES * dims)):
            blocks = tokens[part, :dims].unflatten(1, (-1, form.block))
            values, scales = form.quantize(blocks)
            out[part, :dims] = (values.float() * scales[..., None]).flatten(1)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None, None, None
