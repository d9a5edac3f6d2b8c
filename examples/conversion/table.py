"""Losses on held-out text of the runs of ``all.sh``, and the gaps to the dense model that went on.

``python table.py RUN_DIR --warmup-steps N --tokens-per-step N`` reads ``RUN_DIR/RUN/train.log``,
writes ``RUN_DIR/validation.csv`` and prints a table. Gaps are in nats per token, at equal steps and
so at equal tokens. A frozen warm-up does not train the model, so the gap of ``sparse`` is given at
equal updates of the model, too: to the dense model as many steps earlier as the warm-up took. The
last column is the share of dense attention's probability on the selected keys, as logged last.
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
)
REFERENCE = "dense_on"
LINE = re.compile(
    r"validation-held_out loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+) \|"
)

MASS = re.compile(r"dsa attention mass captured: (\S+)")


def losses(log: str) -> dict[int, float]:
    """Return the validation losses of a log by step; of one that was repeated, the later one."""
    return {int(step): float(value) for step, value in LINE.findall(log)}


def table(
    curves: dict[str, dict[int, float]], masses: dict[str, float], warmup_steps: int
) -> list[str]:
    """Return the lines of the table, of the runs that were trained.

    Args:
        curves: by run, losses by step.
        masses: by run, the share of attention on selected keys, of runs that select.
        warmup_steps: steps in which the model of ``sparse`` was frozen.
    """
    dense = curves.get(REFERENCE, {})
    lines = ["| run | step | held-out loss | gap | to step | mass |", "|---|---|---|---|---|---|"]
    for name, curve in curves.items():
        last = max(curve)
        others = [] if name == REFERENCE else [last]
        if name == "sparse":
            others.append(last - warmup_steps)
        mass = f"{masses[name]:.3f}" if name in masses else ""
        start = f"| {name} | {last} | {curve[last]:.4f} |"
        rows = [
            f"{start} {curve[last] - dense[step]:+.4f} "
            f"({(curve[last] - dense[step]) / dense[step]:+.2%}) | {step} | {mass} |"
            for step in others
            if step in dense
        ]
        lines += rows or [f"{start} | | {mass} |"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="RUN_DIR of the scripts")
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--tokens-per-step", type=int, required=True)
    arguments = parser.parse_args()
    files = {name: arguments.run / name / "train.log" for name in RUNS}
    logs = {
        name: file.read_text(encoding="utf-8", errors="replace")
        for name, file in files.items()
        if file.is_file()
    }
    curves = {name: curve for name, log in logs.items() if (curve := losses(log))}
    masses = {name: float(found[-1]) for name, log in logs.items() if (found := MASS.findall(log))}
    if not curves:
        sys.exit(f"error: no run in {arguments.run} has a validation loss yet")
    with open(arguments.run / "validation.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["run", "step", "tokens", "validation_loss"])
        for name, curve in curves.items():
            for step, loss in sorted(curve.items()):
                writer.writerow([name, step, step * arguments.tokens_per_step, loss])
    print("\n".join(table(curves, masses, arguments.warmup_steps)))


if __name__ == "__main__":
    main()
