"""What every implementation can run, as a Markdown page made from the declarations.

``python -m megatron_dsa info --support-table`` prints it.
"""

from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Operation
from megatron_dsa.ops.dispatch.packages import CUDNN, FLASH_ATTENTION_4, FLASH_MLA, TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import Support, short_dtype

_HEAD = """# What every implementation can run

Printed by `python -m megatron_dsa info --support-table` from `megatron_dsa/ops/*/declaration.py`.

Dispatch tries the implementations of an operation in the order of this table, torch last, but for
the numbers of heads for which the committed benchmark shows another one to be the fastest. "With
the teacher": the backward also returns the indexer's teacher, the head sum of the probabilities,
which other implementations compute as an operation of its own.
`--dsa-impl OPERATION=IMPLEMENTATION ...`, or `MEGATRON_DSA_IMPL=OPERATION=IMPLEMENTATION,...` in
the environment, names implementations: they run, or start-up stops with the reason. "-" means any,
except where the column "covers" names a condition.
"""

_COLUMNS = (
    "implementation", "package", "GPUs", "dtypes", "dims (qk, v)", "heads", "K", "packed", "sink",
    "deterministic", "tried first for heads", "covers", "bridged by the adapter",
)  # fmt: skip


def support_table() -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD]
    for operation in OPERATIONS.values():
        title = operation.title[0].upper() + operation.title[1:]
        parts.append(f"## {operation.name}\n\n{title}.\n")
        rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
        for c in operation.candidates:
            rows.append((c.name, *_cells(c.support, _first(operation, c.name))))
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
    parts.append(_versions())
    return "\n".join(parts)


def _span(limits: tuple[int, int] | None) -> str:
    return "-" if limits is None else f"{limits[0]}-{limits[1]}"


def _first(operation: Operation, name: str) -> str:
    rules = [rule for rule in operation.first if rule.name == name]
    with_teacher = ("", "with the teacher ")
    return "; ".join(with_teacher[rule.teacher] + _span(rule.heads) for rule in rules) or "-"


def _cells(support: Support, first: str) -> tuple[str, ...]:
    determinism = "yes" if support.deterministic else "no"
    if support.deterministic_mode:
        determinism = "on request"
    return (
        _package(support),
        _gpus(support),
        ", ".join(map(short_dtype, support.dtypes)) if support.dtypes else "-",
        ", ".join(map(str, support.dims)) if support.dims else "-",
        _span(support.heads),
        _span(support.topk),
        "yes" if support.packed else "no",
        "yes" if support.sink else "no",
        determinism,
        first,
        f"declined: {support.declined}" if support.declined else support.covers,
        support.bridged or "-",
    )


def _gpus(support: Support) -> str:
    if support.capabilities is None:
        return "-"
    run = [c for c in support.capabilities if c not in support.not_run]
    parts = [", ".join(f"sm{a}{b}" for a, b in part) for part in (run, support.not_run)]
    not_run = [f"compiled, not run: {parts[1]}"] if support.not_run else []
    return "; ".join([*filter(None, parts[:1]), *not_run])


def _package(support: Support) -> str:
    package = support.package
    if package is None:
        return "-"
    floor = support.minimum or package.minimum
    return f"{package.distribution or package.module}{f' >= {floor}' if floor else ''}"


def _versions() -> str:
    lines = ["## Versions of the packages\n"]
    for package in (FLASH_MLA, CUDNN, TILELANG, FLASH_ATTENTION_4, TRITON):
        install = package.install.format(floor=package.minimum)
        lines.append(f"**{package.module}**: {install}.\n")
        lines += [f"* before {fix.version}: {fix.what}" for fix in package.history]
        lines += [
            f"* from {n.since} it needs {n.distribution} >= {n.minimum}" for n in package.needs
        ]
        if package.tested:
            lines.append(f"* newest version that was run: {package.tested}")
        lines.append("")
    return "\n".join(lines).rstrip()
