"""Speed of hybrid attention (DeepSeek-V4): its memory-bound pieces, and whole layers.

    python -m benchmarks.hybrid                      # both parts, writes hybrid.csv and charts
    python -m benchmarks.hybrid pieces --rows 4096   # compressor, rope, key lists
    python -m benchmarks.hybrid layers --preset v4-flash --impl fused
    python -m benchmarks.hybrid --charts hybrid.csv  # draws the charts again

``pieces`` compares every element-wise operation with the traffic it cannot avoid and with a plain
copy in the same run. ``layers`` runs whole attention layers, forward and backward, and says where
the time goes. As in :mod:`benchmarks.attention`, a child process measures
(:mod:`benchmarks.hybrid_measure`), every row is appended at once, and what fails, or kills the
child, costs one case.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import attention

CHILD = (sys.executable, "-P", "-m", "benchmarks.hybrid_measure")
CHARTS = "charts.draw_hybrid"
PARTS = ("pieces", "layers")
COLUMNS = (
    "date", "gpu", "torch", "cuda", "driver", "triton", "flash_mla", "cudnn_frontend",
    "cutlass_dsl", "tilelang", "package", "part", "preset", "operation", "ratio", "rows", "heads",
    "dim", "topk", "width", "implementation", "ran", "status", "reason", "median_ms", "p10_ms",
    "p90_ms", "bytes", "tb_per_s", "share_of_copy", "share_of_time", "kernels", "peak_mib",
    "rel_error", "warm_up_s", "repeats", "workspace_mib",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One layer's dims as the pieces see them."""

    heads: int
    dim: int
    index_dim: int
    rope: int
    topk: int
    window: int


SHAPES = {
    "v4-flash": Shape(64, 512, 128, 64, 512, 128),
    "v4-pro": Shape(128, 512, 128, 64, 1024, 128),
    # For trying the benchmark itself on any machine.
    "tiny": Shape(2, 32, 16, 8, 8, 8),
}
#: Compression ratios of the layers: window only, CSA, HCA.
RATIOS = (0, 4, 128)
#: Queries of more heads than this are not measured: several copies of them fill a GPU.
MOST_HEADS = 65536 * 64
#: What ``--impl`` calls them, and what the rows of the pieces say.
PIECE_NAMES = {"fused": "triton", "unfused": "torch", "eager": "eager"}
#: Unfused layers of more rows take seconds per step: only with a budget for that.
UNFUSED_ROWS, UNFUSED_BUDGET = 16384, 60.0


@dataclass(frozen=True)
class Case:
    """One measurement: a piece with one implementation, or a layer with all that belongs to it.

    Attributes:
        part: ``pieces`` or ``layers``.
        preset: of a piece that several presets share, the first of them.
        ratio: compression ratio; of a compressor and of key lists, too.
        topk: compressed keys that are selected for a list.
    """

    part: str
    preset: str
    operation: str
    implementation: str
    rows: int = 0
    ratio: int | None = None
    heads: int | None = None
    dim: int | None = None
    topk: int | None = None

    @property
    def overlap(self) -> bool:
        """Groups of a CSA compressor also pool the group before them."""
        return self.ratio == 4


def geometries(shape: Shape) -> Iterator[tuple[str, dict]]:
    """Yield the pieces of a preset: operation and what tells its inputs."""
    for ratio, dim in ((4, shape.dim), (4, shape.index_dim), (128, shape.dim)):
        for operation in ("compressor_forward", "compressor_backward"):
            yield operation, {"ratio": ratio, "dim": dim}
    for operation in ("norm_rope_forward", "norm_rope_backward", "rotate_forward"):
        yield operation, {"heads": shape.heads, "dim": shape.dim}
    for ratio in RATIOS:
        yield "key_lists", {"ratio": ratio, "topk": shape.topk if ratio == 4 else None}


def pieces(presets, lengths, wanted) -> Iterator[Case]:
    """Yield the copy, then every piece once, however many presets have it."""
    yield Case("pieces", "", "copy", "torch")
    seen = set()
    for rows in lengths:
        for preset in presets:
            for operation, given in geometries(SHAPES[preset]):
                key = (rows, operation, *given.items())
                if key in seen or rows * given.get("heads", 0) > MOST_HEADS:
                    continue
                seen.add(key)
                for name in wanted:
                    yield Case("pieces", preset, operation, PIECE_NAMES[name], rows, **given)


def layers(presets, lengths, wanted) -> Iterator[Case]:
    """Yield the layers, preset by preset, so that the first is complete if time runs out."""
    for preset in presets:
        shape = SHAPES[preset]
        for name in wanted:
            for rows in lengths if name != "eager" else ():
                for ratio in RATIOS:
                    topk = shape.topk if ratio == 4 else None
                    yield Case(
                        "layers", preset, "forward", name, rows, ratio, shape.heads, shape.dim, topk
                    )


class Run(attention.Run):
    """One invocation; the share of the copy bandwidth is that of the copy that came before."""

    _copy: float | None = None

    def _request(self, group: None, todo: list[Case]) -> dict:
        return {"cases": [asdict(case) for case in todo], "settings": self.settings}

    def _record(self, group: None, case: Case, result: dict) -> None:
        row = {
            "date": self.date,
            **self.environment,
            **{name: None if value == 0 and name == "rows" else value
               for name, value in asdict(case).items()},
            "workspace_mib": self.settings["workspace_mib"],
            **result,
        }  # fmt: skip
        if case.operation == "copy":
            self._copy = row.get("tb_per_s")
        elif self._copy and row.get("tb_per_s"):
            row["share_of_copy"] = row["tb_per_s"] / self._copy
        attention.append_csv(self.output, row, COLUMNS)
        self.rows.append(row)
        print(describe(row), flush=True)


def describe(row: dict) -> str:
    """One line about one row."""
    given = [f"{name} {row[name]}" for name in ("ratio", "heads", "dim", "topk")
             if row.get(name) is not None]  # fmt: skip
    where = f"{row['preset']:9} {row['rows'] or '':>6} {row['operation']:32} {' '.join(given):30}"
    line = f"{where} {row['implementation']:8} {row['status']:8}"
    if row["status"] != "ok":
        return f"{line} {row.get('reason', '')}"
    line += f" {row['median_ms']:9.4g} ms"
    if row.get("tb_per_s"):
        line += f"  {row['tb_per_s']:6.3g} TB/s"
    for column, what in (("share_of_copy", "of copy"), ("share_of_time", "of kernel time")):
        if row.get(column) is not None:
            line += f"  {100 * row[column]:5.1f} % {what}"
    if row.get("rel_error") is not None:
        line += f"  error {row['rel_error']:.1e}"
    if row.get("peak_mib") is not None and row["part"] == "layers":
        line += f"  peak {row['peak_mib']:.0f} MiB"
    return line + (f"  {row['ran']}" if row.get("ran") else "")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; ``cases`` of the result is what there is to measure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("part", nargs="?", choices=PARTS, help="default: both")
    add("--preset", nargs="+", choices=list(SHAPES), help="default: v4-flash v4-pro")
    add("--rows", nargs="+", type=int, help="default: 4096 16384 65536, multiples of 128")
    add("--impl", nargs="+", choices=list(PIECE_NAMES), default=list(PIECE_NAMES),
        help="default: all; eager, which users would write, is for pieces only")  # fmt: skip
    add("--repeats", type=int, help="timed calls of a piece (default 20, with --quick 2)")
    add("--budget", type=float, default=5.0, metavar="SECONDS",
        help="of timed calls per case (5); pieces take one second at most. Unfused layers of more "
        f"than {UNFUSED_ROWS} rows need {UNFUSED_BUDGET:g}")  # fmt: skip
    add("--total", type=float, default=math.inf, metavar="SECONDS",
        help="start no case after that; what is left is recorded as skipped")  # fmt: skip
    add("--timeout", type=float, default=120, help="seconds until a case is ended (120)")
    add("--workspace-mib", type=int, default=256, help="budget of torch implementations (256)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="tiny shapes, for trying the benchmark itself")
    add("--charts", type=Path, metavar="CSV", help="measure nothing, draw the charts of a file")
    options = parser.parse_args(argv)
    quick = options.quick
    options.preset = options.preset or (["tiny"] if quick else ["v4-flash", "v4-pro"])
    options.rows = options.rows or ([256] if quick else [4096, 16384, 65536])
    options.repeats = options.repeats or (2 if quick else 20)
    if bad := [n for n in options.rows if n < 128 or n % 128]:
        # The eager compressor has no groups that are cut off, and every layer has a group.
        parser.error(f"--rows must be positive multiples of 128, got {bad[0]}")
    options.cases = []
    for part, make in zip(PARTS, (pieces, layers), strict=True):
        if options.part in (None, part):
            options.cases += make(options.preset, options.rows, options.impl)
    return options


def main(argv: list[str] | None = None) -> None:
    """Measure everything that was asked for, then draw the charts."""
    begin = time.time()
    options = parse(argv)
    if options.charts:
        attention.draw(options.charts, CHARTS)
        return
    attention.open_csv(options.output, COLUMNS)
    settings = {
        "device": options.device,
        "repeats": options.repeats,
        "budget": options.budget,
        "workspace_mib": options.workspace_mib,
        "ends_at": begin + options.total,
    }
    run = Run(settings, options.output, options.timeout, CHILD)
    run.group(None, options.cases)
    count = {status: sum(row["status"] == status for row in run.rows)
             for status in ("ok", "skipped", "failed")}  # fmt: skip
    what = ", ".join(f"{number} {status}" for status, number in count.items())
    print(f"\n{what} in {time.time() - begin:.0f} s; rows are in {options.output}")
    attention.draw(options.output, CHARTS)


if __name__ == "__main__":
    main()
