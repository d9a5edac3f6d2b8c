"""Blocks of tokens in which absorbed attention runs."""

import torch

from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.sparse_attention.spec import BACKWARD

#: Query tokens times heads, and tokens, of a kernel's thread block, at most.
_ROWS, _TOGETHER = 64, 8
#: Waves of thread blocks, at least: the last one of a launch leaves processors idle. And tokens, at
#: least: the fp32 gradients of the weights are read and written once per block.
_WAVES, _TOKENS = 8, 1024
#: The same where a thread block has several tokens: a wave is long there, and takes much memory.
_SHARED_WAVES, _SHARED_TOKENS = 4, 2048
#: Blocks at most, where each backward returns a gradient of all keys.
_KEY_GRADIENTS = 16


def token_blocks(
    tokens: int,
    keys: int,
    call: OpCall,
    policy: Policy,
    device: torch.device,
    backward: bool = True,
    kernel_heads: int = 0,
) -> tuple[slice, ...]:
    """Return the blocks of tokens in which absorbed attention runs: slices of equal length.

    Absorbed queries, latent outputs and their gradients, and lists and head sums where tokens share
    a thread block, fit the workspace, unless kernels would not fill the GPU then. A block has whole
    waves of thread blocks.

    Args:
        tokens, keys: of the call.
        call: of sparse attention, with the dims of latents.
        policy: the workspace, and the choice of the backward.
        device: of the tensors.
        backward: a backward follows.
        kernel_heads: heads of the forward's kernel, if more than the call's.
    """
    # The forward has queries and outputs, the backward their gradients as well.
    per_token = max(2 * call.heads, kernel_heads)
    per_token *= (call.qk_dim + call.v_dim) * call.dtype.itemsize
    wave, fewest = _wave(call.heads, device), 1
    if wave:
        together = _together(call.heads)
        waves, least = (_SHARED_WAVES, _SHARED_TOKENS) if together > 1 else (_WAVES, _TOKENS)
        fewest = max(waves * wave, _up(least, wave))
        if together > 1 and backward:
            # Ids and members of the union, head sums, where they go (and a copy), the teacher.
            per_token += (call.topk or 0) * (5 + 4 * together + 16 + 4)
        if backward and not BACKWARD.choose(call, policy).candidate.support.adds_keys:
            fewest = max(fewest, _up(-(-keys // _KEY_GRADIENTS), wave))
    wave = wave or 1
    most = max(fewest, policy.workspace_bytes // per_token // wave * wave)
    # At most half as many tokens again as wanted, or a third less.
    count = max(1, min(-(-tokens // most), round(tokens / fewest)))
    size = tokens if count == 1 else _up(-(-tokens // count), wave)
    return tuple(slices(tokens, size)) if tokens else (slice(0, 0),)


def _wave(heads: int, device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return processors(device) * _together(heads) // -(-heads // _ROWS)


def _together(heads: int) -> int:
    return max(1, min(_ROWS // heads, _TOGETHER))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
