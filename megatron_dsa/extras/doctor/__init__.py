"""``python -m megatron_dsa doctor``: which implementations are right on this machine?

Every forward of sparse attention that can run here is combined with every backward, every pair of
index scores and top-k and every indexer loss with its gradients likewise, at the user's shape,
and compared with float64; index scores in the arithmetic of inference engines, with its rule. The
inputs hold what kernels are known to fail on: empty rows, holes,
ids out of range, stale ids, lists of different lengths, keys that are NaN and must not be touched.

``options`` and ``shapes`` are what is asked for, ``attention``, ``indexer`` and ``engine`` the
checks (run by ``session``, in the order of ``examine``) by :mod:`megatron_dsa.testing`,
``results`` what they say, ``table`` how it is printed.
"""

import argparse
import contextlib
import json
import sys

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.doctor.options import add_arguments

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Check, print the report, return the exit code (:mod:`.options` says which)."""
    # Imported late: the command line must be able to say that torch is missing.
    from megatron_dsa.extras.doctor.examine import examine
    from megatron_dsa.extras.doctor.results import NOT_PROVEN
    from megatron_dsa.extras.doctor.table import as_json, print_report

    try:
        # Compilers of kernels log to the standard output, which belongs to the report.
        with contextlib.redirect_stdout(sys.stderr):
            report = examine(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return NOT_PROVEN
    code = report.exit_code(arguments.allow_unfused)
    if arguments.json:
        print(json.dumps(as_json(report, code), indent=2))
    else:
        print_report(report, code)
    return code
