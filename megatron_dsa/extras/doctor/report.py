"""Verdicts on implementations, and the report as tables or JSON."""

import dataclasses
import math
from dataclasses import dataclass, field

from megatron_dsa.ops.dispatch.support import short_dtype
from megatron_dsa.testing.cases import Shape
from megatron_dsa.testing.comparison import Comparison

OK, WRONG, NOT_PROVEN, NO_GPU = 0, 1, 2, 3
_FULL_SIZE = " at full size"


@dataclass(kw_only=True)
class Verdict(Comparison):
    """Verdict on one combination of implementations at one shape.

    Attributes:
        implementations: operation -> name.
        fused: at least one implementation is fused.
        deterministic: all are declared deterministic.
        chosen: dispatch picks exactly these implementations.
        crashed: the exception as text.
        same_bits: repeats agree bit for bit; ``None`` if not repeated.
        ms: median time.
        first_calls_s: seconds of the first calls, including imports and compilation.
        remarks: notes that do not fail the check.
    """

    check: str
    label: str
    shape: Shape
    implementations: dict[str, str]
    fused: bool
    deterministic: bool
    chosen: bool
    crashed: str | None = None
    same_bits: bool | None = None
    ms: float | None = None
    first_calls_s: float = 0.0
    remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " + ".join(self.implementations.values())

    def wrong(self) -> list[str]:
        said = super().wrong()
        if self.deterministic and self.same_bits is False:
            said.append("repeats differ, though declared deterministic")
        return said

    @property
    def ok(self) -> bool:
        return not (self.crashed or self.wrong())

    @property
    def verdict(self) -> str:
        said = [f"crashed {self.crashed}"] if self.crashed else []
        said += [f"WRONG {', '.join(self.wrong())}"] if self.wrong() else []
        return "; ".join(said) or "ok"


@dataclass(frozen=True)
class NotChecked:
    """An implementation that was skipped."""

    operation: str
    name: str
    label: str
    reason: str


@dataclass
class Report:
    """Result of one doctor run.

    Attributes:
        asked, shapes: requested and checked shapes.
        chosen: shape -> operation -> implementation that dispatch picks, with reasons.
        incomplete: checks that ran out of memory.
    """

    environment: dict
    asked: list[Shape]
    shapes: list[Shape]
    chosen: dict[str, dict[str, dict]] = field(default_factory=dict)
    results: list[Verdict] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)

    def wrong(self) -> list[Verdict]:
        return [result for result in self.results if not result.ok]

    def exit_code(self, allow_unfused: bool) -> int:
        """Return the exit code; see ``python -m megatron_dsa doctor --help``."""
        if self.wrong():
            return WRONG
        if self.incomplete or not self.results:
            return NOT_PROVEN
        fused = any(result.fused for result in self.results)
        if fused or allow_unfused:
            return OK
        return NO_GPU if self.environment["gpu"] is None else NOT_PROVEN


def print_report(report: Report, code: int) -> None:
    environment = report.environment
    print(_verdict(report, code))
    print(f"megatron_dsa {environment['megatron_dsa']}, torch {environment['torch']}")
    gpu = environment["gpu"]
    if gpu is None:
        print("  device: CPU")
    else:
        capability = ".".join(map(str, gpu["capability"]))
        print(f"  device: {gpu['name']}, compute capability {capability}, CUDA {gpu['cuda']}")
    for name, version in environment["packages"].items():
        print(f"  {name}: {version or 'not installed'}")
    print("\ndispatch would run")
    for label, choices in report.chosen.items():
        said = (f"{op} {choice['runs'] or choice['refused']}" for op, choice in choices.items())
        print(f"  {label}: {', '.join(said)}")
    for check in dict.fromkeys(result.check for result in report.results):
        print(f"\n{check} (relative error against float64; * is what dispatch would run)")
        print_table([_row(result) for result in report.results if result.check == check])
    if report.not_checked:
        print("\nnot checked")
    for line in dict.fromkeys(f"{x.operation} {x.name}: {x.reason}" for x in report.not_checked):
        print(f"  {line}")
    for remark in report.remarks:
        print(f"note: {remark}")


def _row(result: Verdict) -> dict[str, str]:
    row = {"": "*" if result.chosen else "", "shape": result.label, "runs": result.name}
    full_size = [error for figure, error in result.errors.items() if figure.endswith(_FULL_SIZE)]
    row |= {
        figure: f"{error:.1e}"
        for figure, error in result.errors.items()
        if not figure.endswith(_FULL_SIZE)
    }
    if full_size:
        worst = math.nan if any(map(math.isnan, full_size)) else max(full_size)
        row["full size"] = f"{worst:.1e}"
    row |= {figure: f"{value:.4f}" for figure, value in result.figures.items()}
    if result.same_bits is not None:
        declared = " (declared)" if result.deterministic else ""
        row["same bits"] = ("yes" if result.same_bits else "no") + declared
    if result.ms is not None:
        row["ms"] = f"{result.ms:.2f}"
    row["first calls s"] = f"{result.first_calls_s:.1f}"
    row["verdict"] = "; ".join([result.verdict, *result.remarks])
    return row


def print_table(rows: list[dict[str, str]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    columns.sort(key=lambda column: column == "verdict")
    widths = {c: max(len(c), *(len(row.get(c, "-")) for row in rows)) for c in columns}
    for row in [{c: c for c in columns}, *rows]:
        line = "  ".join(row.get(c, "-").ljust(widths[c]) for c in columns)
        print(f"  {line.rstrip()}")


def _verdict(report: Report, code: int) -> str:
    wrong, count = report.wrong(), len(report.results)
    if code == WRONG:
        chosen = sum(result.chosen for result in wrong)
        return (
            f"WRONG: {len(wrong)} of {count} combinations, {chosen} of them what dispatch would run"
        )
    if code == NOT_PROVEN:
        missing = "; ".join(report.incomplete) or "no fused implementation could be checked"
        return f"NOT PROVEN: {missing} ({count} combinations checked, all ok)"
    if code == NO_GPU:
        return (
            f"NO GPU: torch on the CPU is right ({count} combinations), no fused implementation ran"
        )
    return f"ok: all {count} combinations"


def as_json(report: Report, code: int) -> dict:
    """Convert a report to JSON types; non-finite numbers become strings."""
    results = [
        _plain(x) | {"ok": x.ok, "verdict": x.verdict, "wrong": x.wrong()} for x in report.results
    ]
    said = {"exit_code": code, "verdict": _verdict(report, code)}
    return said | _plain(report) | {"results": results}


def _plain(value):
    if isinstance(value, Shape):
        value = dataclasses.asdict(value) | {"dtype": short_dtype(value.dtype)}
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
