"""Choice of kernels for attention to one block of keys and values."""

from collections.abc import Callable
from functools import partial

from megatron_dsa.ops.dense_attention import flash2, flash4, torch_cudnn, torch_flash
from megatron_dsa.ops.dense_attention import torch as torch_block
from megatron_dsa.ops.dense_attention.flash_shapes import with_kernel_shapes
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION, BlockAttention
from megatron_dsa.ops.dispatch import OpCall, Policy

BLOCK_KERNELS = {
    name: BlockAttention(name, *functions)
    for name, functions in {
        "torch-cudnn": (torch_cudnn.forward, torch_cudnn.backward),
        "flash2": with_kernel_shapes(flash2),
        "torch-flash": with_kernel_shapes(torch_flash),
        "flash4": with_kernel_shapes(flash4, pads_values=False),
        "torch": (torch_block.forward, torch_block.backward),
    }.items()
}


def choose(call: OpCall, name: str | None = None) -> BlockAttention:
    """Return the kernel ``name``, by default the kernel that dispatch chooses."""
    policy = Policy() if name is None else Policy(named=((DENSE_ATTENTION.name, name),))
    return BLOCK_KERNELS[DENSE_ATTENTION.choose(call, policy).candidate.name]


def torch_kernel(workspace_bytes: int) -> BlockAttention:
    forward = partial(torch_block.forward, workspace_bytes=workspace_bytes)
    backward = partial(torch_block.backward, workspace_bytes=workspace_bytes)
    return BlockAttention("torch", forward, backward)


def _attend_with(name: str) -> Callable:
    def attend(attention: Callable, workspace_bytes: int, *args, **options):
        block = torch_kernel(workspace_bytes) if name == "torch" else BLOCK_KERNELS[name]
        return attention(*args, block=block, **options)

    return attend


with_torch_cudnn = _attend_with("torch-cudnn")
with_flash2 = _attend_with("flash2")
with_torch_flash = _attend_with("torch-flash")
with_flash4 = _attend_with("flash4")
with_torch = _attend_with("torch")
