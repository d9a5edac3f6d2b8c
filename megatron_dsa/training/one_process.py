"""Megatron's process groups for one-process commands."""

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state

from megatron_dsa.patches import cpu_host


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Set up process groups of one rank over gloo, unless they exist."""
    if cpu_host.needed():
        cpu_host.activate()
    if torch.distributed.is_initialized():
        yield
        return
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
