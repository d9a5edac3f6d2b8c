"""Split of tokens into blocks for absorbed attention."""

import torch

from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.sparse_attention.spec import BACKWARD

#: Maximum heads and tokens per thread block.
_HEADS, _TOGETHER = 64, 8
#: Minimum thread-block waves and tokens per slice: small slices leave SMs idle.
_WAVES, _TOKENS = 8, 1024
#: Minimum waves and tokens per slice if a thread block has several tokens.
_SHARED_WAVES, _SHARED_TOKENS = 4, 2048
#: Maximum keys per token of a slice whose backward returns gradients of all keys.
_KEY_GRADIENTS = 16


def token_blocks(
    tokens: int,
    keys: int,
    call: OpCall,
    policy: Policy,
    device: torch.device,
    backward: bool = True,
    kernel_heads: int = 0,
    least: int = 0,
) -> tuple[slice, ...]:
    """Split tokens into equal slices that fill whole waves of thread blocks.

    A slice's absorbed tensors fit the workspace unless the GPU would be underused. ``call``
    has the dims of latents; ``kernel_heads`` includes the forward kernel's padding heads; ``least``
    is about the fewest tokens of a slice on a GPU.
    """
    per_token = max(2 * call.heads, kernel_heads)
    per_token *= (call.qk_dim + call.v_dim) * call.dtype.itemsize
    wave, fewest = _wave(call.heads, device), 1
    if wave:
        together = _together(call.heads)
        waves, fewest = (_SHARED_WAVES, _SHARED_TOKENS) if together > 1 else (_WAVES, _TOKENS)
        fewest = max(waves * wave, _up(max(fewest, least), wave))
        if together > 1 and backward:
            # Temporary bytes per key: union ids and members, head sums with indices, teacher.
            per_token += (call.topk or 0) * (5 + 4 * together + 16 + 4)
        if backward and not BACKWARD.choose(call, policy).candidate.support.adds_keys:
            fewest = max(fewest, _up(-(-keys // _KEY_GRADIENTS), wave))
    wave = wave or 1
    most = max(fewest, policy.workspace_bytes // per_token // wave * wave)
    count = max(1, min(-(-tokens // most), round(tokens / fewest)))
    size = tokens if count == 1 else _up(-(-tokens // count), wave)
    return tuple(slices(tokens, size)) if tokens else (slice(0, 0),)


def _wave(heads: int, device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return processors(device) * _together(heads) // -(-heads // _HEADS)


def _together(heads: int) -> int:
    return max(1, min(_HEADS // heads, _TOGETHER))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
