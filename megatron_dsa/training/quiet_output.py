"""Filters for messages of Megatron and torch that need no action."""

import argparse
import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron_dsa.training.launching import this_rank

#: Prefixes of warnings, and patterns of their modules.
WARNINGS = (
    # Preset flags handle missing packages.
    ("Transformer Engine and Apex are not installed. Falling back", r"megatron\."),
    ("Apex is not installed. Falling back to Torch Norm", r"megatron\."),
    (
        "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0",
        r"megatron\.",
    ),
    # Megatron imports the MIMO model, but this package does not use MIMO.
    ("MimoModelConfig is experimental", r"megatron\."),
    # One-process commands have no ranks.
    ("Could not determine rank from torch.distributed, RANK", r"megatron\."),
    ("full scope is deprecated. Use empty cuda_graph_modules", r"megatron\."),
    # The module of this warning is a path.
    ("invalid escape sequence", r".*[/\\]megatron[/\\]core[/\\]"),
    # This warning is harmless without a GPU.
    ("'pin_memory' argument is set as true but no accelerator", r"torch\.utils\.data"),
    ("The argument order of load has been changed", r"torch\.distributed\."),
    ("torch.distributed is disabled, unavailable or uninitialized", r"torch\.distributed\."),
    ("Please use DTensor instead and we are deprecating ShardedTensor", ""),
)
#: Loggers and message prefixes.
RECORDS = (
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    # Documents may be longer than a sample.
    ("transformers.tokenization_utils_base", "Token indices sequence length is longer than"),
    # Megatron logs this message for synchronous saves also.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
    ("megatron.core.rerun_state_machine", "RerunStateMachine initialized in mode"),
    ("megatron.core.rerun_state_machine", "Result validation enabled"),
    ("megatron.core.rerun_state_machine", "Setting RerunStateMachine mode"),
)
#: Log records that list all parameters or data-loading steps.
LONG_RECORDS = (
    ("megatron.core.distributed.param_and_grad_buffer", "Number of buckets for gradient"),
    ("megatron.core.datasets.indexed_dataset", "\tExtract the "),
)
#: Messages if ``--load`` holds no checkpoint.
_NO_CHECKPOINT = ("WARNING: could not find the metadata file", "    will not load any checkpoints")


def _is_shown(record: logging.LogRecord, table: tuple[tuple[str, str], ...] = RECORDS) -> bool:
    message = record.getMessage()
    return not any(name == record.name and message.startswith(text) for name, text in table)


def _is_shown_briefly(record: logging.LogRecord) -> bool:
    return logging.getLogger().isEnabledFor(logging.DEBUG) or _is_shown(record, LONG_RECORDS)


def silence_host_warnings() -> None:
    """Silence :data:`WARNINGS` and :data:`RECORDS`, unless the user enables warnings.

    Call before importing Megatron. Existing filters have priority.
    """
    if any(not option.startswith("i") for option in sys.warnoptions):
        return
    for beginning, module in WARNINGS:
        warnings.filterwarnings("ignore", re.escape(beginning), module=module, append=True)
    for logger, _ in RECORDS:
        logging.getLogger(logger).addFilter(_is_shown)


def _shows_all(args: argparse.Namespace) -> bool:
    level = args.logging_level
    if level is None:
        level = int(os.environ.get("MEGATRON_LOGGING_LEVEL", logging.INFO))
    return level <= logging.DEBUG


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Hide Megatron's arguments and parameter names, except at level DEBUG.

    Also hide theoretical memory, GPU memory without a GPU, and warnings of a first start.
    """
    import torch
    from megatron.training import arguments, checkpointing, get_args, training

    print_arguments, report_memory = arguments._print_args, training.report_theoretical_memory
    report_gpu_memory, print_line = training.report_memory, checkpointing.print_rank_0

    def summarise_arguments(title: str, args: argparse.Namespace) -> None:
        if _shows_all(args):
            print_arguments(title, args)
        elif this_rank() == 0:
            print(
                f"> not printed: the values of {len(vars(args))} arguments, names of parameters, "
                "Megatron's theoretical memory (which does not know sparse attention); "
                "--logging-level 10 prints them",
                flush=True,
            )

    def theoretical_memory(args: argparse.Namespace, *more: Any, **settings: Any) -> None:
        if _shows_all(args):
            report_memory(args, *more, **settings)

    def gpu_memory(*args: Any, **settings: Any) -> None:
        if torch.cuda.is_available():
            report_gpu_memory(*args, **settings)

    def checkpoint_line(message: str, *more: Any) -> None:
        args = get_args() if message.startswith(_NO_CHECKPOINT) else None
        if args is None or args.load != args.save or _shows_all(args):
            print_line(message, *more)
        elif message.startswith(_NO_CHECKPOINT[0]):
            print_line(f"> no checkpoint in {args.load} yet: this run begins", *more)

    with (
        mock.patch.object(arguments, "_print_args", summarise_arguments),
        mock.patch.object(training, "report_theoretical_memory", theoretical_memory),
        mock.patch.object(training, "report_memory", gpu_memory),
        mock.patch.object(checkpointing, "print_rank_0", checkpoint_line),
    ):
        for name, _ in LONG_RECORDS:
            logging.getLogger(name).addFilter(_is_shown_briefly)
        try:
            yield
        finally:
            for name, _ in LONG_RECORDS:
                logging.getLogger(name).removeFilter(_is_shown_briefly)
