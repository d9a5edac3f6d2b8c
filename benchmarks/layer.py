"""A whole attention layer of DeepSeek-V3.2, forward and backward, against its peers on one GPU.

    python -m benchmarks.layer                     # 4k to 128k tokens, writes layer.csv and charts
    python -m benchmarks.layer --heads 128 --rows 4096 131072 --ways ours dense
    python -m benchmarks.layer --quick             # tiny shapes, on the CPU
    python -m benchmarks.layer --charts layer.csv  # measures nothing: summary and charts of a file

A step is the forward in training mode of one causal sequence, and the backward of a random
gradient; in the sparse ways with the indexer, its sparse loss and the loss's backward. Ways
(:mod:`benchmarks.layer_ways`) have the same weights and inputs and run one after the other in one
process. Each compiles with a short step first. Of a case, the first step tells the peak memory of
torch's allocator above weights, input and their gradients; then steps are timed, the host's part
included where the GPU waits for it. ``out_error`` compares the output of the first rows, which
select every key that they see, with that of ``ours``: there all ways compute the same.
``end_error`` compares output and input gradient of the last rows in sparse ways. Some of their keys
differ, where scores nearly tie; addresses that overflow give something else altogether.

megatron-core's ways come last, few heads first: a kernel that faults takes the process with it.

The kernels of one more step of ``ours`` are put down to the operations that launch them
(:mod:`benchmarks.hybrid_layer`); what is outside of all is ``matrix products`` (projections) or
``other`` (rope, norms, copies).
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.attention import append_csv, draw, open_csv
from benchmarks.hybrid_layer import operation_rows
from benchmarks.layer_summary import print_summary
from benchmarks.layer_ways import WAYS, build, declined_hooks
from benchmarks.measure import PACKAGES, environment, outcome, still_works
from benchmarks.ranks_cases import Case
from benchmarks.ranks_costs import FEWEST
from benchmarks.timing import Clock, Peak, summary, what_ran
from benchmarks.verify import largest_error
from megatron_dsa.dispatch import reset_report

COLUMNS = (
    "date", "gpu", "torch", "cuda", "driver", "triton", "flash_mla", "cudnn_frontend",
    "cutlass_dsl", "tilelang", "megatron_core", "package", "preset", "heads", "rows", "way",
    "operation", "ran", "status", "reason", "median_ms", "p10_ms", "p90_ms", "tokens_per_s",
    "peak_mib", "share_of_time", "kernels", "out_error", "end_error",
    "warm_up_s", "repeats", "workspace_mib",
)  # fmt: skip
VERSIONS = PACKAGES | {
    "triton": ("triton", "triton"),
    "megatron_core": ("megatron-core", "megatron.core"),
}
CHARTS = "layer_charts.draw_layer"
#: Steps that only compile have so many tokens.
PREPARE_ROWS = 4096
#: Rows of the output that are compared between ways.
COMPARED_ROWS = 64
#: Several bf16 products lie between the weights and the output, and each way rounds its own.
OUT_ERROR_LIMIT = 5e-2
#: Other keys at the border of the selection make a tenth or two.
END_ERROR_LIMIT = 0.5


class Run:
    """One invocation: settings, and what is known of the ways so far."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device, self.clock = options, device, Clock(device)
        self.ends_at = time.time() + options.total
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.facts = {"date": date, "workspace_mib": options.workspace_mib}
        self.facts |= environment(device, VERSIONS)
        self._prepared: set[tuple] = set()
        self._failed: dict[tuple, int] = {}
        self._seconds: dict[tuple, tuple[int, float]] = {}  # of one step, at a length
        self._results: dict[tuple, dict[str, torch.Tensor]] = {}

    def rows_of(self, way: str, case: Case) -> Iterator[dict]:
        """Yield the rows of a case: the step's, and of ``ours`` one per operation of the step."""
        kind = (way, case.preset, case.heads)
        if reason := self._reason_to_skip(kind, case.rows):
            yield {"operation": "step", "status": "skipped", "reason": reason}
            return
        built: list = []
        row = outcome(self._step, way, case, built)
        yield {"operation": "step", **row}
        if row["status"] != "ok":
            self._failed[kind] = case.rows
        elif way == "ours":
            rows = outcome(operation_rows, built[0], self.device)
            yield from [{"operation": "step/profile", **rows}] if isinstance(rows, dict) else rows

    def _reason_to_skip(self, kind: tuple, rows: int) -> str | None:
        if kind in self._failed:
            return f"failed with {self._failed[kind]} tokens"
        shorter, seconds = self._seconds.get(kind, (rows, 0.0))
        # Of the operations, those that grow the most grow with the square.
        estimate = (FEWEST + 1) * seconds * (rows / shorter) ** 2
        if time.time() + estimate > self.ends_at:
            return f"might take {estimate:.0f} s: no time is left for it (--total)"
        return None

    def _step(self, way: str, case: Case, built: list) -> dict:
        """Measure the step of a layer, and leave the layer in ``built``."""
        clock, options, kind = self.clock, self.options, (way, case.preset, case.heads)
        begin = time.perf_counter()
        if kind not in self._prepared:
            short = Case("layers", case.preset, min(case.rows, PREPARE_ROWS), heads=case.heads)
            build(way, short, self.device, options.workspace_mib)[0].step()
            self._prepared.add(kind)
            self._release()
        layer, remark = build(way, case, self.device, options.workspace_mib)
        built.append(layer)
        for tensor in (*layer.module.parameters(), layer.x):
            tensor.grad = torch.zeros_like(tensor)
        gc.collect()
        row = {"warm_up_s": time.perf_counter() - begin}
        reset_report()
        begin = time.perf_counter()
        with declined_hooks() as declined, Peak(clock) as peak:
            out = layer.forward()
            first = out.detach()[: layer.config.dsa_indexer_topk]
            own = {"out": first[:: math.ceil(len(first) / COMPARED_ROWS)].clone()}
            own["end"] = out.detach()[-COMPARED_ROWS:].clone()
            out.backward(layer.gradient)
            del out, first
        own["end_gradient"] = layer.x.grad[-COMPARED_ROWS:].clone()
        once = time.perf_counter() - begin
        parts = (remark, declined and f"declined={'+'.join(declined)}", what_ran())
        row |= {"peak_mib": peak.mib, "ran": "; ".join(filter(None, parts))}
        row |= self._agreement(way, case, own)
        if row["status"] != "ok":
            return row
        count = max(min(FEWEST, options.repeats), min(options.repeats, int(options.budget / once)))
        times = summary(clock.milliseconds(layer.step, count))
        self._seconds[kind] = case.rows, times["median_ms"] / 1e3
        return row | times | {"tokens_per_s": case.rows / times["median_ms"] * 1e3}

    def _agreement(self, way: str, case: Case, own: dict[str, torch.Tensor]) -> dict:
        """Return status and errors of a way's results, and keep those of ours."""
        place = case.preset, case.heads, case.rows
        if not all(bool(tensor.isfinite().all()) for tensor in own.values()):
            return {"status": "failed", "reason": "output or gradient is not finite"}
        if way == "ours":
            self._results[place] = own
        if way == "ours" or place not in self._results:
            return {"status": "ok"}
        pairs = {name: (tensor, self._results[place][name]) for name, tensor in own.items()}
        row = {"status": "ok", "out_error": largest_error(pairs.pop("out"))}
        limits = {"out_error": OUT_ERROR_LIMIT}
        if way != "dense":
            row["end_error"] = largest_error(*pairs.values())
            limits["end_error"] = END_ERROR_LIMIT
        for name, limit in limits.items():
            if not row[name] <= limit:
                reason = f"not the results of ours: {name} {row[name]:.3g} is above {limit}"
                row |= {"status": "failed", "reason": reason}
        return row

    def _release(self) -> bool:
        """Give back the memory of the last layer; return whether the device still works."""
        return still_works(self.clock)

    def measure(self) -> list[dict]:
        """Measure everything that was asked for; every row is appended to the table at once."""
        rows = []
        for way, case in self._cases():
            for row in self.rows_of(way, case):
                row |= self.facts | {"preset": case.preset, "heads": case.heads,
                                     "rows": case.rows, "way": way}  # fmt: skip
                append_csv(self.options.output, row, COLUMNS)
                rows.append(row)
                print(describe(row), flush=True)
            if not self._release():
                print("the GPU does not answer any more: run what is missing again")
                break
        return rows

    def _cases(self) -> Iterator[tuple[str, Case]]:
        """Yield what to measure: short sequences first, and last what may fault."""
        options = self.options
        peers = [way for way in options.ways if WAYS[way]]
        for ways, heads in (
            ([way for way in options.ways if not WAYS[way]], options.heads),
            (peers, sorted(options.heads)),
        ):
            for count, tokens in itertools.product(heads, sorted(options.rows)):
                for way in ways:
                    yield way, Case("layers", options.preset, tokens, heads=count)


def describe(row: dict) -> str:
    """One line about one row."""
    line = f"{row['rows']:>7} H={row['heads']:<4}{row['way']:14} {row['operation']:36}"
    if row["status"] != "ok":
        return f"{line} {row['status']}: {row['reason']}"
    line += f" {row['median_ms']:10.4g} ms"
    if row.get("share_of_time") is not None:
        return f"{line}  {100 * row['share_of_time']:5.1f} %  {row['ran']}"
    line += f" ({row['p10_ms']:.4g} to {row['p90_ms']:.4g})  {row['tokens_per_s']:9.4g} tokens/s"
    names = (("peak_mib", "MiB"), ("out_error", "out error"), ("end_error", "end error"))
    for name, unit in names:
        if row.get(name) is not None:
            line += f"  {row[name]:.3g} {unit}"
    return f"{line}  {row['ran']}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--heads", type=int, nargs="+", help="128 16, with --quick 4")
    add("--rows", type=int, nargs="+", help="tokens: 4096, 8192, ... 131072, with --quick 64 128")
    add("--ways", nargs="+", choices=WAYS, default=["ours", "dense", "bundled"],
        help="default: ours dense bundled")  # fmt: skip
    add("--repeats", type=int, default=7, help="timed steps (7)")
    add("--budget", type=float, default=2, metavar="SECONDS",
        help=f"of timed steps per case (2), but {FEWEST} steps at least")  # fmt: skip
    add("--total", type=float, default=math.inf, metavar="SECONDS",
        help="start nothing that may end after that; it is recorded as skipped")  # fmt: skip
    add("--workspace-mib", type=int, default=256)
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="tiny shapes, for trying the benchmark")
    add("--charts", type=Path, metavar="CSV", help="measure nothing, draw the charts of a file")
    options = parser.parse_args(argv)
    options.preset = "tiny" if options.quick else "v3.2"
    options.heads = options.heads or ([4] if options.quick else [128, 16])
    if options.quick and options.heads != [4]:
        parser.error("--quick has 4 heads")
    lengths = [64, 128] if options.quick else [4096 * 2**i for i in range(6)]
    options.rows = options.rows or lengths
    return options


def main(argv: list[str] | None = None) -> None:
    """Measure everything that was asked for, print the summary, draw the charts."""
    options = parse(argv)
    if not options.charts:
        from tests.host import start

        open_csv(options.output, COLUMNS)
        Run(options, start()).measure()
    table = options.charts or options.output
    print_summary(table)
    draw(table, CHARTS)


if __name__ == "__main__":
    main()
