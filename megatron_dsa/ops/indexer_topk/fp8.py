"""Vectors in fp8 (e4m3), with a scale each."""

import functools

import torch

from megatron_dsa.ops.common.scaling import has_triton

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x [..., D]`` as e4m3 and fp32 scales ``[...]``, so that ``x ~ e4m3 * scale``.

    The largest element of a vector becomes 448; a vector of zeros, or too small for a scale in
    fp32, has the scale 1. What is not finite makes products with its vector NaN.
    """
    dim = x.shape[-1]
    if dim & (dim - 1) == 0 and converts(x.device):
        from megatron_dsa.ops.indexer_topk.triton import quantize

        return quantize(x.contiguous())
    x = x.float()
    scales = torch.linalg.vector_norm(x, ord=float("inf"), dim=-1) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    # Divided in fp32: scales of the smallest bf16 have no finite inverse.
    return (x / scales[..., None]).clamp_(-LARGEST, LARGEST).to(DTYPE), scales


@functools.cache
def converts(device: torch.device) -> bool:
    """Return whether a Triton kernel can round to fp8 there."""
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return fits and has_triton()
