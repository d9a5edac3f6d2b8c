"""Choosing an implementation per operation, saying so once, and counting what really ran.

An :class:`Operation` has a list of candidates. A candidate's declaration (:class:`Support`) answers
a :class:`OpCall`, the description of a call, with ``None`` (it can run) or with the reason why it
cannot. :meth:`Operation.choose` takes the first candidate that can; fused ones come first when the
policy prefers them, and the one that is measured to be the fastest for the call before the others.
Nothing falls back in silence: the choice is logged once (:mod:`.choice_log`), a strict policy
raises instead, an implementation that the user names runs or raises, and :func:`report` tells what
was called how often.

This package knows no operation: they are declared in :mod:`megatron_dsa.ops`.
"""

from megatron_dsa.ops.dispatch.choice_log import choices_unlogged, log_all_candidates, log_once
from megatron_dsa.ops.dispatch.counts import count, report, reset_report, uncounted
from megatron_dsa.ops.dispatch.operation import (
    Candidate,
    Choice,
    First,
    Operation,
    choices_are_collected,
    collect_choices,
    describe_call,
    deterministic_mode,
    forget_choices,
    meta_dispatch,
    on_meta,
)
from megatron_dsa.ops.dispatch.policy import DEFAULT_WORKSPACE_BYTES, Policy
from megatron_dsa.ops.dispatch.support import OpCall, Support

__all__ = [
    "Candidate",
    "Choice",
    "DEFAULT_WORKSPACE_BYTES",
    "First",
    "Operation",
    "Policy",
    "OpCall",
    "Support",
    "choices_unlogged",
    "choices_are_collected",
    "collect_choices",
    "count",
    "deterministic_mode",
    "describe_call",
    "forget_choices",
    "log_all_candidates",
    "log_once",
    "meta_dispatch",
    "on_meta",
    "report",
    "reset_report",
    "uncounted",
]
