"""Machine and software of a run, as arguments that Megatron logs to TensorBoard and W&B."""

import argparse
import os
import subprocess
from pathlib import Path

import torch

import megatron_dsa
from megatron_dsa.training.launching import world_size
from megatron_dsa.versions import host_described

MACHINE, SOFTWARE = "dsa_machine", "dsa_software"


def record_provenance(args: argparse.Namespace) -> None:
    """Set the provenance arguments on all ranks, since Megatron compares arguments."""
    if args.tensorboard_dir or args.wandb_project:
        setattr(args, MACHINE, machine())
        setattr(args, SOFTWARE, software())


def machine() -> str:
    if torch.cuda.is_available():
        return f"{world_size()} x {torch.cuda.get_device_name()}"
    return f"CPU, {world_size()} process(es) on {os.cpu_count()} cores"


def software() -> str:
    commit = f" (commit {found})" if (found := _commit()) else ""
    megatron = f"megatron-core {host_described()}"
    return f"megatron_dsa {megatron_dsa.__version__}{commit}, {megatron}, torch {torch.__version__}"


def _commit() -> str:
    root = Path(megatron_dsa.__file__).parents[1]
    if not (root / ".git").exists():
        return ""  # a parent's .git may be another project's
    try:
        done = subprocess.run(
            ["git", "-C", root, "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip()
