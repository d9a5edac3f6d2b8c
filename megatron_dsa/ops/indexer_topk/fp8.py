"""Quantization of vectors to fp8 (e4m3) with one scale per vector."""

import functools

import torch

from megatron_dsa.ops.common.scaling import has_triton

DTYPE = torch.float8_e4m3fn
#: Lower bound of the vector maximum from which a power-of-two scale is computed.
LEAST = 1e-4
_LARGEST = torch.finfo(DTYPE).max
_MANTISSA = 0x7FFFFF


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x [..., D]`` as e4m3 and fp32 scales ``[...]``: ``x ~ e4m3 * scale``.

    The scale maps a vector's largest magnitude to 448; non-finite vectors give NaN products.
    """
    if _is_fused(x):
        from megatron_dsa.ops.indexer_topk.triton import quantize

        return quantize(x.contiguous())
    x = x.float()
    scales = torch.linalg.vector_norm(x, ord=float("inf"), dim=-1) / _LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    # Divide by scales, since the smallest scales have no finite inverse.
    return (x / scales[..., None]).clamp_(-_LARGEST, _LARGEST).to(DTYPE), scales


def quantized_by_powers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``x [..., D]`` to bf16 and return it as e4m3 and fp32 scales ``[...]``.

    Scales are ``2^ceil(log2(max(|x|max, 1e-4) / 448))``.
    """
    x = x.bfloat16()
    if _is_fused(x):
        from megatron_dsa.ops.indexer_topk.triton import quantize

        return quantize(x.contiguous(), least=LEAST)
    x = x.float()
    largest = torch.linalg.vector_norm(x, ord=float("inf"), dim=-1).clamp_min(LEAST)
    # Round up to a power of two: a nonzero mantissa carries into the exponent.
    bits = (largest * (1 / _LARGEST)).view(torch.int32)
    scales = ((bits + _MANTISSA) & ~_MANTISSA).view(torch.float32)
    return (x / scales[..., None]).to(DTYPE), scales


def _is_fused(x: torch.Tensor) -> bool:
    dim = x.shape[-1]
    return dim & (dim - 1) == 0 and _converts(x.device)


@functools.cache
def _converts(device: torch.device) -> bool:
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return fits and has_triton()
