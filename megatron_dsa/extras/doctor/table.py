"""The report for people (a table per check) and for machines (JSON)."""

import dataclasses
import math

from megatron_dsa.extras.doctor.results import NOT_PROVEN, WRONG, Part, Report, Result
from megatron_dsa.ops.dispatch.support import short_dtype
from megatron_dsa.testing.cases import Shape

#: Headings and the figures under them: the errors of the small comparison, then the rest.
_ERRORS = {
    "sparse attention": ("out", "lse", "dq", "dkv", "dsink", "p_sum"),
    "teacher": ("p_sum",),
    "index selection": ("score shortfall", "score inversion"),
    "engine scores": ("engine scores", "score shortfall", "score inversion"),
    "indexer loss": ("loss", "dq", "dk", "dweights"),
}


def print_report(report: Report, code: int) -> None:
    """Print everything that was found out."""
    _print_environment(report.environment)
    _print_chosen(report)
    for check in _ERRORS:
        results = [result for result in report.results if result.check == check]
        if results:
            print(f"\n{check} (relative error against float64; * is what dispatch would run)")
            _print_rows([_row(result) for result in results])
    _print_not_checked(report)
    for remark in report.remarks:
        print(f"note: {remark}")
    print(_last_line(report, code))


def _print_environment(environment: dict) -> None:
    print(f"megatron_dsa {environment['megatron_dsa']}, torch {environment['torch']}")
    gpu = environment["gpu"]
    if gpu is None:
        print("  device: CPU")
    else:
        capability = ".".join(map(str, gpu["capability"]))
        print(f"  device: {gpu['name']}, compute capability {capability}, CUDA {gpu['cuda']}")
    for name, version in environment["packages"].items():
        print(f"  {name}: {version or 'not installed'}")


def _print_chosen(report: Report) -> None:
    print("\ndispatch would run")
    where: dict[str, list[str]] = {}
    for label, choices in report.chosen.items():
        said = [
            f"{_column(operation)}: {choice['runs'] or choice['refused']}"
            for operation, choice in choices.items()
        ]
        where.setdefault(", ".join(said), []).append(label)
    for line, labels in where.items():
        print(f"  {line} [{'; '.join(labels)}]")


def _row(result: Result) -> dict[str, str]:
    row = {"": "*" if result.chosen else "", "shape": result.label}
    for part in result.parts:
        for operation, name in part.implementations:
            row[_column(operation)] = name
    for figure in _ERRORS[result.check]:
        errors = [part.errors[figure] for part in result.parts if figure in part.errors]
        row[figure] = f"{_worst(errors):.1e}" if errors else "-"
    at_full_size = [
        error
        for part in result.parts
        for figure, error in part.errors.items()
        if figure.endswith("at full size")
    ]
    row["full size"] = f"{_worst(at_full_size):.1e}" if at_full_size else "-"
    for part in result.parts:
        row |= {figure: f"{value:.4f}" for figure, value in part.figures.items()}
    row["same bits"] = " ".join(map(_same_bits, result.parts))
    times = [f"{ms:.2f}" for part in result.parts for ms in part.ms.values()]
    row["ms"] = " + ".join(times) or "-"
    row["first calls s"] = f"{sum(part.warmup_s for part in result.parts):.1f}"
    remarks = [remark for part in result.parts for remark in part.remarks]
    row["verdict"] = "; ".join([result.verdict, *remarks])
    return row


def _column(operation: str) -> str:
    return {
        "sparse_attention_forward": "forward",
        "sparse_attention_backward": "backward",
        "sparse_attention_probabilities": "teacher",
        "indexer_scores": "scores",
        "indexer_engine_scores": "scores",
        "indexer_topk": "top-k",
        "sparse_indexer_loss": "loss of",
    }[operation]


def _worst(errors: list[float]) -> float:
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def _same_bits(part: Part) -> str:
    said = {True: "yes", False: "no", None: "-"}[part.same_bits]
    return said + (" (declared)" if part.deterministic and part.same_bits is not None else "")


def _print_rows(rows: list[dict[str, str]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    # What is empty in every row says nothing; the verdict comes last, it is of any length.
    columns = [c for c in columns if any(row.get(c, "-") not in ("", "-") for row in rows)]
    columns.sort(key=lambda column: column == "verdict")
    widths = {c: max(len(c), *(len(row.get(c, "-")) for row in rows)) for c in columns}
    for row in [{c: c for c in columns}, *rows]:
        line = "  ".join(row.get(c, "-").ljust(widths[c]) for c in columns)
        print(f"  {line.rstrip()}")


def _print_not_checked(report: Report) -> None:
    if report.not_checked:
        print("\nnot checked")
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for entry in report.not_checked:
        key = (entry.operation, entry.name, entry.reason)
        grouped.setdefault(key, []).append(entry.label)
    labels = {entry.label for entry in report.not_checked}
    for (operation, name, reason), where in grouped.items():
        # Most reasons hold for every shape; then the shapes are left out.
        some = f" [{'; '.join(where)}]" if len(labels) > 2 and len(where) == 1 else ""
        print(f"  {operation} {name}: {reason}{some}")


def _last_line(report: Report, code: int) -> str:
    wrong = report.wrong()
    if code == WRONG:
        chosen = sum(result.chosen for result in wrong)
        return (
            f"WRONG: {len(wrong)} of {len(report.results)} combinations, {chosen} of them what "
            "dispatch would run"
        )
    if code == NOT_PROVEN:
        missing = "; ".join(report.incomplete) or "no fused implementation could be checked"
        return f"NOT PROVEN: {missing} ({len(report.results)} combinations checked, all ok)"
    return f"ok: all {len(report.results)} combinations"


def as_json(report: Report, code: int) -> dict:
    """The report as plain data; numbers that JSON does not have become strings."""
    return _plain(
        {
            "exit_code": code,
            "verdict": _last_line(report, code),
            "environment": report.environment,
            "asked": report.asked,
            "shapes": report.shapes,
            "chosen": report.chosen,
            "results": [
                {
                    "check": result.check,
                    "label": result.label,
                    "ok": result.ok,
                    "chosen": result.chosen,
                    "verdict": result.verdict,
                    "shape": result.shape,
                    "parts": [
                        _plain(part)
                        | {"wrong": part.wrong(), "implementations": dict(part.implementations)}
                        for part in result.parts
                    ],
                }
                for result in report.results
            ],
            "not_checked": report.not_checked,
            "remarks": report.remarks,
            "incomplete": report.incomplete,
        }
    )


def _plain(value):
    if isinstance(value, Shape):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} | {
            "dtype": short_dtype(value.dtype)
        }
    if dataclasses.is_dataclass(value):
        return _plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
