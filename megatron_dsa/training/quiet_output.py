"""Leaves out the longest of what Megatron prints at every start; level DEBUG shows all of it.

The values of Megatron's arguments and the names of parameters make up nine hundred of a small
model's first thousand lines. Each entry here replaces one function or shortens one record of one
logger; everything else is shown as before.
"""

import argparse
import contextlib
import logging
import os
from collections.abc import Iterator
from unittest import mock

from megatron.training import arguments, training

from megatron_dsa.training.launching import this_rank

#: Logger, and the beginning of a record of which only the first line is shown.
_PARAMETERS = ("megatron.core.distributed.param_and_grad_buffer", "Number of buckets for gradient")
#: Loggers and beginnings of records about every file of data, which hold no value.
_STEPS = ("megatron.core.datasets.indexed_dataset", "\tExtract the ")

_print_arguments = arguments._print_args
_report_theoretical_memory = training.report_theoretical_memory


def _shows_all(args: argparse.Namespace) -> bool:
    """Whether the user asks for level DEBUG, in the ways that Megatron reads."""
    level = args.logging_level
    if level is None:
        level = int(os.environ.get("MEGATRON_LOGGING_LEVEL", logging.INFO))
    return level <= logging.DEBUG


def _summarise_arguments(title: str, args: argparse.Namespace) -> None:
    """Say that the arguments are not printed, and how to see them."""
    if _shows_all(args):
        _print_arguments(title, args)
    elif this_rank() == 0:
        print(
            f"> not printed: the values of {len(vars(args))} arguments, names of parameters, "
            "Megatron's theoretical memory (which does not know sparse attention); "
            "--logging-level 10 prints them",
            flush=True,
        )


def _theoretical_memory(args: argparse.Namespace, *more, **settings):
    """Print it at level DEBUG only: it is computed for dense attention."""
    if _shows_all(args):
        _report_theoretical_memory(args, *more, **settings)


def _shorten(record: logging.LogRecord) -> bool:
    """Cut a record of :data:`_PARAMETERS` after its first line; drop one of :data:`_STEPS`."""
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        return True
    message = record.getMessage()
    if record.name == _PARAMETERS[0] and message.startswith(_PARAMETERS[1]):
        record.msg, record.args = message.partition("\n")[0], ()
    return not (record.name == _STEPS[0] and message.startswith(_STEPS[1]))


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Inside, Megatron prints less, unless ``--logging-level 10`` is given."""
    loggers = [logging.getLogger(name) for name, _ in (_PARAMETERS, _STEPS)]
    with (
        mock.patch.object(arguments, "_print_args", _summarise_arguments),
        mock.patch.object(training, "report_theoretical_memory", _theoretical_memory),
    ):
        for logger in loggers:
            logger.addFilter(_shorten)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_shorten)
