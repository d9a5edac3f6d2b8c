"""What the log says of choices: a short line each, or one table for those of a whole model.

At level DEBUG of the logger ``megatron_dsa.ops.dispatch``, lines name every rejected candidate.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_dsa.ops.dispatch.operation import Choice
    from megatron_dsa.ops.dispatch.policy import Policy
    from megatron_dsa.ops.dispatch.support import OpCall

logger = logging.getLogger("megatron_dsa.ops.dispatch")

#: Stands for all fallbacks on a machine without a GPU.
NO_GPU = "no GPU: torch runs everything"
_logged: set[str] = set()


def log_all_candidates() -> None:
    """Let lines name every rejected candidate with its reason (``--dsa-log-dispatch``)."""
    # Records of this level pass the root logger, whose own level is only for its own records.
    logger.setLevel(logging.DEBUG)


@contextlib.contextmanager
def choices_unlogged() -> Iterator[None]:
    """Log errors alone, while it lasts: a table says what the log would."""
    package = logging.getLogger("megatron_dsa")
    level = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(level)


def log_choice(choice: Choice, policy: Policy, call: OpCall, in_table: bool) -> None:
    """Log a choice that was made for the first time, and what its package warns of.

    ``in_table``: a table will have it, so only a fallback logs a line.
    """
    package = choice.candidate.support.package
    remark = package.untested() if package is not None else None
    if remark is not None:
        log_once(logging.WARNING, remark)
    # A fallback is a warning unless it was asked for: it must show at default log levels.
    level = logging.WARNING if policy.fused and choice.is_fallback else logging.INFO
    if level == logging.WARNING and _without_gpu(call):
        # The same reason for every operation: one line says it.
        log_once(level, NO_GPU)
        level = logging.DEBUG
    elif level == logging.INFO and in_table:
        level = logging.DEBUG
    in_full = logger.isEnabledFor(logging.DEBUG)
    log_once(level, choice.describe() if in_full else choice.summary())


def log_once(level: int, line: str) -> None:
    """Log a line on rank 0, unless it was logged before."""
    if line in _logged:
        return
    _logged.add(line)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        logger.log(level, "megatron_dsa %s", line)


def _without_gpu(call: OpCall) -> bool:
    """Whether the machine has no GPU; tensors on the CPU beside one are another matter."""
    return call.device == "cpu" and not torch.cuda.is_available()
