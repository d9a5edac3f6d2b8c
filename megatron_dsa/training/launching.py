"""Check the launcher's variables: the rank of a process, their number, and where they meet.

A number that does not fit leaves the other processes waiting, for minutes and without a word.
"""

import os
import time
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_default_build_root

from megatron_dsa.errors import require

#: Lock of the extension of ``CheckpointWithoutOutput``, below the folder of the Python version.
_BUILD_LOCK, _STALE_MINUTES = "share_storage_ext/lock", 10
_LAUNCHER = "torchrun sets it (torchrun --nproc-per-node N -m megatron_dsa.pretrain ...)"


def this_rank() -> int:
    """Return the rank of this process, which need not have joined a process group."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def world_size() -> int:
    """Return the number of processes of the job, as the launcher says."""
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def check_launch() -> None:
    """Check ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    Rank 0 of several says where it waits for the others.

    Raises:
        ConfigError: a variable is missing, or says what cannot be.
    """
    if torch.distributed.is_initialized():
        return
    world = environment_number("WORLD_SIZE", 1, least=1)
    gpus = torch.cuda.device_count()
    # A launcher may show every process one GPU of its own.
    for name, needed in (("RANK", world > 1), ("LOCAL_RANK", world > 1 and gpus > 1)):
        require(
            not needed or name in os.environ,
            f"{name} must be set with WORLD_SIZE {world}: {_LAUNCHER}",
        )
    rank = environment_number("RANK", 0)
    require(rank < world, f"RANK must be less than WORLD_SIZE {world}, got {rank}: {_LAUNCHER}")
    local = environment_number("LOCAL_RANK", 0)
    require(
        local < world, f"LOCAL_RANK must be less than WORLD_SIZE {world}, got {local}: {_LAUNCHER}"
    )
    require(
        not gpus or local < gpus,
        f"LOCAL_RANK must be less than the number of GPUs that this process sees ({gpus}), got "
        f"{local}: start one process per GPU (--nproc-per-node {gpus}), or show it more of them "
        "(CUDA_VISIBLE_DEVICES)",
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        require(os.environ.get(name), f"{name} must be set: {_LAUNCHER}")
    port = environment_number("MASTER_PORT", 0)
    require(port < 2**16, f"MASTER_PORT must be less than 65536, got {port}")
    if world > 1 and rank == 0:
        print(
            f"> waiting for {world} processes (WORLD_SIZE) at {os.environ['MASTER_ADDR']}:{port}, "
            "--distributed-timeout-minutes at the most",
            flush=True,
        )


def environment_number(name: str, default: int, least: int = 0) -> int:
    """Return a variable of the environment that must be a whole number.

    Raises:
        ConfigError: it is none, or less than ``least``.
    """
    text = os.environ.get(name, str(default))
    require(
        text.isascii() and text.isdigit() and int(text) >= least,
        f"{name} must be a number of at least {least}, got {text!r}: {_LAUNCHER}",
    )
    return int(text)


def use_compiled_dataset_helper() -> None:
    """The wheel holds the compiled helper but not the Makefile that Megatron would run."""
    from megatron.core.datasets import utils  # Megatron, which not all callers have imported yet

    makefile = os.path.join(os.path.dirname(utils.__file__), "Makefile")
    if not os.path.exists(makefile):
        utils.compile_helpers = lambda: None


def remove_stale_build_lock() -> None:
    """Remove the lock that a process left which was killed while it built Megatron's extension.

    Later processes wait for it for ever, without a word. Building takes half a minute.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob(_BUILD_LOCK), *root.glob(f"*/{_BUILD_LOCK}")):
        try:
            minutes = (time.time() - lock.stat().st_mtime) / 60
            if minutes > _STALE_MINUTES:
                lock.unlink()
                print(f"> removed {lock}: whoever built it was killed {minutes:.0f} minutes ago")
        except FileNotFoundError:
            pass  # another rank has removed it
        except OSError as error:
            print(f"> warning: processes will wait for {lock} for ever: remove it ({error})")
