"""The table of operations and what runs them, printed once when the model is built."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.training import print_rank_0

from megatron_dsa.dispatch import Choice

_HEADER = ("operation", "implementation", "reason")


def start_table(choices: Iterable[Choice]) -> list[str]:
    """Return the lines of the table; a line per operation and implementation, sorted.

    The reason is empty for fused implementations that nobody named.
    """
    rows: dict[tuple[str, str], str] = {}
    for choice in choices:
        # Calls of several shapes may differ in their reasons: the first one stands.
        rows.setdefault((choice.operation, choice.candidate.name), choice.remark())
    table = [_HEADER, *sorted((*key, remark) for key, remark in rows.items())]
    widths = [max(len(row[column]) for row in table) for column in (0, 1)]
    return [
        f"{operation:{widths[0]}}  {implementation:{widths[1]}}  {remark}".rstrip()
        for operation, implementation, remark in table
    ]


def print_start_table(choices: Iterable[Choice]) -> None:
    """Print the table of rank 0's model; nothing if no operation was chosen."""
    choices = list(choices)
    if not choices:
        return
    print_rank_0("> megatron_dsa runs (--dsa-log-dispatch: all rejected candidates):")
    for line in start_table(choices):
        print_rank_0(f">   {line}")
