"""Losses on held-out text of the runs of ``all.sh``, and the gaps to the dense model that went on.

``python table.py RUN_DIR --warmup-steps N --tokens-per-step N`` reads ``RUN_DIR/RUN/train.log``,
writes ``RUN_DIR/validation.csv`` and prints a table. Gaps are in nats per token, at equal steps and
so at equal tokens. A frozen warm-up does not train the model, so the gap of ``sparse`` is given at
equal updates of the model, too: to the dense model as many steps earlier as the warm-up took.
"""

import argparse
import csv
import re
import sys
from pathlib import Path

RUNS = (
    "dense",
    "dense_on",
    "warmup",
    "sparse",
    "sparse_without_warmup",
    "scratch",
    "scratch_on",
)
REFERENCE = "dense_on"
LINE = re.compile(r"validation-0 loss at iteration (\d+) \| lm loss value: (\S+) \|")


def losses(log: Path) -> dict[int, float]:
    """Return the validation losses of a log by step; of one that was repeated, the later one."""
    found = LINE.findall(log.read_text(encoding="utf-8", errors="replace"))
    return {int(step): float(value) for step, value in found}


def gap_line(name: str, loss: float, reference: float | None, against: str) -> str:
    """Return a row of the table."""
    if reference is None:
        return f"| {name} | {loss:.4f} | | |"
    gap = loss - reference
    return f"| {name} | {loss:.4f} | {gap:+.4f} ({gap / reference:+.2%}) | {against} |"


def table(curves: dict[str, dict[int, float]], warmup_steps: int) -> list[str]:
    """Return the lines of the table, of the runs that were trained."""
    dense = curves.get(REFERENCE, {})
    lines = ["| run | held-out loss | gap | to |", "|---|---|---|---|"]
    for name, curve in curves.items():
        last = max(curve)
        reference = dense.get(last) if name != REFERENCE else None
        lines.append(gap_line(name, curve[last], reference, f"{REFERENCE}, step {last}"))
        earlier = last - warmup_steps
        if name == "sparse" and earlier in dense:
            against = f"{REFERENCE}, step {earlier}: equal updates"
            lines.append(gap_line(name, curve[last], dense[earlier], against))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="RUN_DIR of the scripts")
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--tokens-per-step", type=int, required=True)
    arguments = parser.parse_args()
    logs = {name: arguments.run / name / "train.log" for name in RUNS}
    curves = {name: losses(log) for name, log in logs.items() if log.is_file()}
    curves = {name: curve for name, curve in curves.items() if curve}
    if not curves:
        sys.exit(f"error: no run in {arguments.run} has a validation loss yet")
    with open(arguments.run / "validation.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", "tokens", "validation_loss"])
        for name, curve in curves.items():
            for step, loss in sorted(curve.items()):
                writer.writerow([name, step, step * arguments.tokens_per_step, loss])
    print("\n".join(table(curves, arguments.warmup_steps)))


if __name__ == "__main__":
    main()
