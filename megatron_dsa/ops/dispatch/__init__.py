"""Choice of an operation's implementation, logged once.

A fallback logs a warning, or raises under a strict policy.
"""

from megatron_dsa.ops.dispatch.choice_log import (
    Choice,
    choices_are_collected,
    choices_unlogged,
    collect_choices,
    log_all_candidates,
    log_once,
)
from megatron_dsa.ops.dispatch.operation import (
    First,
    Operation,
    count,
    describe_call,
    deterministic_mode,
    forget_choices,
    meta_dispatch,
    on_meta,
    report,
    reset_report,
    uncounted,
)
from megatron_dsa.ops.dispatch.packages import Reason
from megatron_dsa.ops.dispatch.policy import DEFAULT_WORKSPACE_BYTES, Policy
from megatron_dsa.ops.dispatch.support import Candidate, OpCall, Support

__all__ = [
    "Candidate", "Choice", "DEFAULT_WORKSPACE_BYTES", "First", "Operation", "OpCall", "Policy",
    "Reason", "Support", "choices_are_collected", "choices_unlogged", "collect_choices", "count",
    "describe_call", "deterministic_mode", "forget_choices", "log_all_candidates", "log_once",
    "meta_dispatch", "on_meta", "report", "reset_report", "uncounted",
]  # fmt: skip
