"""``--dsa-dry-run``: prints a job's plan or its first error."""

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron_dsa.arguments import add_dry_run_arguments, add_dsa_arguments
from megatron_dsa.config.gpus import GPU, GPUS, gpu_here
from megatron_dsa.config.rules.ranges import FLAGS, range_rules
from megatron_dsa.errors import TRACEBACK_FLAG, ConfigError, DSAError, require
from megatron_dsa.extras.planner.host import META, host
from megatron_dsa.extras.planner.plan import Plan, make_plan
from megatron_dsa.extras.planner.text import describe, shortage
from megatron_dsa.training.entry_errors import explain
from megatron_dsa.training.launching import environment_number
from megatron_dsa.training.preset_flags import preset_flags
from megatron_dsa.training.setup import model_config_from_args

#: Plans of more layers print an estimate of their duration.
_MANY_LAYERS = 100


def dry_run(argv: list[str]) -> int:
    """Plan and print the job of ``argv``, which begins with the program's name.

    Returns:
        0 if the job fits, 1 if its memory does not, 2 if it would not start.
    """
    if environment_number("RANK", 0):
        return 0
    flags, job = _planner_flags(argv)
    world = flags.dsa_dry_run_world or environment_number("WORLD_SIZE", 1, least=1)
    gpu = GPUS[flags.dsa_dry_run_gpu or gpu_here()]
    try:
        with _silence():
            plan = plan_of(job, world, gpu)
    except (DSAError, ValueError, AssertionError) as error:
        if TRACEBACK_FLAG in argv:
            raise
        # Megatron reports user errors by assertions.
        known = explain(error, "validate_args")
        assert known is not None
        notes: tuple[str, ...] = ()
        if flags.dsa_dry_run_world is None and "WORLD_SIZE" not in os.environ:
            notes = ("(planned for one GPU: --dsa-dry-run-world names another number)",)
        print("error:", known.message, *notes, file=sys.stderr)
        return known.code
    print(describe(plan))
    reason = shortage(plan)
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


@contextlib.contextmanager
def _silence():
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _planner_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_dry_run_arguments(parser)
    flags, job = parser.parse_known_args(argv[1:])
    for ok, message in range_rules(vars(flags), FLAGS):
        require(ok, message)
    return flags, [argv[0], *job]


def plan_of(argv: list[str], world: int, gpu: GPU, device: torch.device = META) -> Plan:
    """Plan a command line for ``world`` GPUs; raise the errors of start-up."""
    with host(gpu.capability, device), parsed(argv, world) as args:
        if args.num_layers > _MANY_LAYERS:
            print(
                f"> planning {args.num_layers} layers, each of which runs once without memory: up "
                "to a minute per 100",
                file=sys.stderr,
            )
        return make_plan(args, model_config_from_args(args), gpu)


@contextlib.contextmanager
def parsed(
    argv: list[str],
    world: int,
    planning: bool = True,
    add_arguments: Callable[[argparse.ArgumentParser], Any] = add_dsa_arguments,
) -> Iterator[Any]:
    """Yield Megatron's validated arguments for rank 0; ``planning`` emulates a GPU."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import arguments

    argv, quiet = list(argv), io.StringIO()
    with contextlib.redirect_stdout(quiet), _environment(world), _arguments(argv):
        preset_flags(argv, planning)
        args = arguments.parse_args(add_arguments)
        _refuse_files(args)
        _check_batch(args)
        arguments.validate_args(args)
        init_num_microbatches_calculator(
            rank=args.rank,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
            decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
            step_batch_size_schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,
        )
        yield args


def _refuse_files(args) -> None:
    if args.padded_vocab_size is None and args.vocab_size is None:
        raise ConfigError(
            "--vocab-size or --padded-vocab-size is required with --dsa-dry-run, which does not "
            "read the tokenizer: add one of them"
        )
    for name in ("use_checkpoint_args", "yaml_cfg"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be planned: --dsa-dry-run reads no files. Give "
                "the flags that it stands for"
            )
    args.dsa_load_hf, args.dsa_hf_without = None, []


def _check_batch(args) -> None:
    model_ranks = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    total, micro = args.global_batch_size, args.micro_batch_size
    if None in (total, micro) or args.world_size % model_ranks:
        return  # Megatron rejects an indivisible world size
    data_ranks = args.world_size // model_ranks
    require(
        total % (micro * data_ranks) == 0 or args.decrease_batch_size_if_needed,
        f"--global-batch-size ({total}) must be a multiple of --micro-batch-size ({micro}) times "
        f"{data_ranks} data-parallel ranks ({args.world_size} GPUs / {model_ranks} that share a "
        f"model): give a multiple of {micro * data_ranks}, or another --micro-batch-size",
    )


@contextlib.contextmanager
def _environment(world: int):
    ours = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with mock.patch.dict(os.environ, ours):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextlib.contextmanager
def _arguments(argv: list[str]):
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator

    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before
        unset_num_microbatches_calculator()
