"""The flags of a plan, which are not the job's own."""

from __future__ import annotations

import argparse

from megatron_dsa.dispatch import rehearsing
from megatron_dsa.errors import ConfigError
from megatron_dsa.tools.planner.gpus import GPUS


def add_dry_run_arguments(group) -> None:
    """Add all flags of plans to a parser or to a group of one."""
    add_setting_arguments(group)
    group.add_argument(
        "--dsa-dry-run-attention-only",
        action="store_true",
        help="Plan the attention alone, for models of which the rest is not known: MLPs, experts, "
        "embedding and output layer are left out.",
    )


def add_setting_arguments(group) -> None:
    """Add the flags of what a plan is made for, which is not the model."""
    group.add_argument(
        "--dsa-dry-run",
        action="store_true",
        help="Check the job and print its plan (layers, kernels, memory, traffic), in one process "
        "and without a GPU; train nothing.",
    )
    group.add_argument(
        "--dsa-dry-run-world",
        type=int,
        metavar="N",
        help="GPUs of the planned job (default: the environment variable WORLD_SIZE, or 1).",
    )
    group.add_argument(
        "--dsa-dry-run-gpu",
        choices=GPUS,
        help="GPU of the planned job (default: this machine's, or h200).",
    )


def refuse_dry_run_flags(args: argparse.Namespace) -> None:
    """Raise for flags of plans in a training, which would go on as if they were not there."""
    if args.dsa_dry_run:
        raise ConfigError(
            "--dsa-dry-run: this script trains, it makes no plans; give the same flags to "
            "python -m megatron_dsa.pretrain"
        )
    for name in ("dsa_dry_run_world", "dsa_dry_run_gpu", "dsa_dry_run_attention_only"):
        # The last one is a flag of the planned model, too.
        if getattr(args, name) and not rehearsing():
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: has a meaning only with --dsa-dry-run, add that")
