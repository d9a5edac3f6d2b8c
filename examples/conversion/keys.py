"""The chart of ``docs/evidence.md``: loss over dense attention by the share of selected keys.

``python keys.py LONGER SHORTER TARGET`` reads two folders that ``seeds.py`` wrote.
"""

import argparse
import re
from pathlib import Path

from seeds import gap_of, sessions

from benchmarks.charts import Chart

#: Number of selected keys at 8192 tokens -> run.
RUNS = {2048: "sparse", 1024: "sparse_1024", 512: "sparse_512", 256: "sparse_256"}


def ratios(folder: Path) -> tuple[list, list]:
    """Return points (position, loss over dense attention, False) at equal tokens and updates."""
    found, settings, warmup = sessions([folder])
    steps = [int(n) for n in re.search(r"steps (\d+) (\d+) (\d+)", settings).groups()]
    end = steps[0] + warmup + steps[2]
    lines = ([], [])
    for position, run in enumerate(RUNS.values()):
        for line, at in zip(lines, (end, end - warmup), strict=True):
            if gap := gap_of(found, run, end, "dense_on", at):
                line.append((position, 1 + gap.value / gap.reference, False))
    return lines


def chart(longer: Path, shorter: Path) -> Chart:
    long_tokens, long_updates = ratios(longer)
    short_tokens, short_updates = ratios(shorter)
    tokens, updates = (100 * (line[0][1] - 1) for line in (long_tokens, long_updates))
    return Chart(
        title=f"A quarter of the keys raises the loss by {tokens:.2f} %, "
        f"by {updates:.2f} % at equal updates",
        axis="held-out loss over dense attention",
        along="share of keys selected",
        lines={
            "27.5 M tokens": short_tokens,
            "27.5 M, at equal updates": short_updates,
            "49.2 M tokens": long_tokens,
            "49.2 M, at equal updates": long_updates,
        },
        ticks={position: f"1/{8192 // keys}" for position, keys in enumerate(RUNS)},
        low=0.999,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("longer", "shorter", "target"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    print(f"wrote {chart(arguments.longer, arguments.shorter).draw(arguments.target)}")
