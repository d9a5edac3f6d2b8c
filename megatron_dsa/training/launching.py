"""Checks of launcher variables and stale build locks before training.

torch is imported late, so that a message reports its absence.
"""

import os
import time
from pathlib import Path

from megatron_dsa.errors import require

_ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "0",
}  # fmt: skip
_OTHER_SIZES = (
    *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    *("JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE"),
)
_OTHER_RANKS = ("PMIX_RANK", "PALS_RANKID")
_LAUNCHER = "torchrun sets it (torchrun --nproc-per-node N -m megatron_dsa.pretrain ...)"
#: Lock file that processes hold while they compile Megatron's ``CheckpointWithoutOutput``.
_BUILD_LOCK, _STALE_MINUTES = "share_storage_ext/lock", 10


def this_rank() -> int:
    """Return this process's rank, also without a process group."""
    import torch

    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdigit() else 0


def world_size() -> int:
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def check_launch() -> None:
    """Check ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    If none is set, this process is the whole job, unless another launcher started several.

    Raises:
        ConfigError: a variable is missing or out of range.
    """
    import torch

    if torch.distributed.is_initialized():
        return
    several = any(os.environ.get(name, "1") != "1" for name in _OTHER_SIZES)
    several = several or any(name in os.environ for name in _OTHER_RANKS)
    require(
        not several or "WORLD_SIZE" in os.environ,
        f"WORLD_SIZE must be set where another launcher starts several processes: {_LAUNCHER}",
    )
    if not several and not set(_ALONE) & set(os.environ):
        os.environ.update(_ALONE)
    world = environment_number("WORLD_SIZE", 1, least=1)
    gpus = torch.cuda.device_count()
    required = ["MASTER_ADDR", "MASTER_PORT"]
    if world > 1:
        # A launcher may show each process only one GPU.
        required = ["RANK", *(["LOCAL_RANK"] if gpus > 1 else []), *required]
    for name in required:
        case = f" with WORLD_SIZE {world}" if "RANK" in name else ""
        require(os.environ.get(name), f"{name} must be set{case}: {_LAUNCHER}")
    fix = (
        f"start one process per GPU (--nproc-per-node {gpus}), or show it more of them "
        "(CUDA_VISIBLE_DEVICES)"
    )
    for name, limit, described, way in (
        ("RANK", world, f"WORLD_SIZE {world}", _LAUNCHER),
        ("LOCAL_RANK", world, f"WORLD_SIZE {world}", _LAUNCHER),
        ("LOCAL_RANK", gpus or world, f"the number of GPUs that this process sees ({gpus})", fix),
        ("MASTER_PORT", 2**16, "65536", _LAUNCHER),
    ):
        number = environment_number(name, 0)
        require(number < limit, f"{name} must be less than {described}, got {number}: {way}")
    if world > 1 and environment_number("RANK", 0) == 0:
        print(
            f"> waiting for {world} processes (WORLD_SIZE) at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, "
            "--distributed-timeout-minutes at the most",
            flush=True,
        )


def environment_number(name: str, default: int, least: int = 0) -> int:
    """Read an environment variable as a whole number.

    Raises:
        ConfigError: the value is no number or less than ``least``.
    """
    text = os.environ.get(name, str(default))
    require(
        text.isascii() and text.isdigit() and int(text) >= least,
        f"{name} must be a number of at least {least}, got {text!r}: {_LAUNCHER}",
    )
    return int(text)


def use_compiled_dataset_helper() -> None:
    """Skip Megatron's Makefile if the wheel lacks it."""
    from megatron.core.datasets import utils

    makefile = os.path.join(os.path.dirname(utils.__file__), "Makefile")
    if not os.path.exists(makefile):
        utils.compile_helpers = lambda: None


def remove_stale_build_lock() -> None:
    """Remove the lock of a killed build, which would block all processes."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in (*root.glob(_BUILD_LOCK), *root.glob(f"*/{_BUILD_LOCK}")):
        try:
            minutes = (time.time() - lock.stat().st_mtime) / 60
            if minutes > _STALE_MINUTES:
                lock.unlink()
                print(f"> removed {lock}: left {minutes:.0f} minutes ago by a killed process")
        except FileNotFoundError:
            pass
        except OSError as error:
            print(f"> warning: processes will wait for {lock} for ever: remove it ({error})")
