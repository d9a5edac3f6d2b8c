"""Speed of the indexer on whole sequences: selection, and the sparse loss with its gradients.

    python -m benchmarks.indexer                       # 8k, 32k, 128k tokens, writes indexer.csv
    python -m benchmarks.indexer --rows 8192 --operations select --ways tilelang cudnn
    python -m benchmarks.indexer --quick               # tiny shapes, on the CPU

``select`` scores every visible pair and keeps the best keys, ``loss`` is the KL sum with all
gradients, ``dense`` that of the warm-up stage (:mod:`benchmarks.indexer_dense`), all through
dispatch as a layer calls them. A *way* names the implementations; what one lacks is left to
dispatch, and the column ``ran`` says what that took. ``fp8`` selects through fp8 scores
(:class:`megatron_dsa.ops.indexer_topk.api.Candidates`). The way ``megatron`` is megatron-core's
own (:mod:`benchmarks.indexer_bundled`): its TileLang indexer, and its unfused dense loss. Queries
see up to their own place (one causal sequence). FLOP count what is visible: 2 * heads * dim per
pair for ``select``, three products per selected pair for ``loss``; for ``dense`` the same per
visible pair, and the teacher's scores. Peak memory is that of the call above its inputs and
includes its results.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import indexer_bundled, indexer_dense
from benchmarks.attention import append_csv, open_csv
from benchmarks.cases import make_indices
from benchmarks.measure import environment, one_line
from benchmarks.timing import Clock, measure, measure_ceiling, what_ran
from megatron_dsa.dispatch import Policy, reset_report
from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.metrics.flops import Keys
from megatron_dsa.ops import OPERATIONS as DISPATCHED
from megatron_dsa.sequence.layout import bshd_layout

COLUMNS = (
    "date", "gpu", "torch", "cuda", "driver", "flash_mla", "cudnn_frontend", "cutlass_dsl",
    "tilelang", "package", "operation", "way", "ran", "rows", "heads", "dim", "topk", "lists",
    "status", "reason", "median_ms", "p10_ms", "p90_ms", "tflops", "share_of_gemm", "peak_mib",
    "rel_error", "warm_up_s", "repeats", "workspace_mib",
)  # fmt: skip
#: Operations of dispatch that a measurement runs.
OPERATIONS = {
    "select": ("indexer_scores", "indexer_topk"),
    "loss": ("sparse_indexer_loss",),
    "dense": ("dense_indexer_loss",),
}
#: Selection through fp8 candidates, with our kernels.
FP8 = "fp8"
WAYS = {
    "select": ("tilelang", FP8, "cudnn", "torch", indexer_dense.BUNDLED),
    "loss": ("tilelang", "cudnn", "torch", indexer_dense.BUNDLED),
    "dense": ("triton", "torch", indexer_dense.BUNDLED),
}
#: Query rows whose result is compared with float64.
CHECKED_ROWS = 4
#: The torch way of the loss gathers keys for every row: longer sequences take minutes.
LONGEST_TORCH_LOSS = 8192


def named(operation: str, way: str) -> tuple[tuple[str, str], ...]:
    """Return the implementations of a way; what it lacks is left to dispatch."""
    there = {name: {c.name for c in DISPATCHED[name].candidates} for name in OPERATIONS[operation]}
    return tuple((name, way) for name, names in there.items() if way in names)


def draw(rows: int, heads: int, dim: int, device) -> IndexerInputs:
    """Return random inputs with weights as large as the layers' (1 / sqrt(heads * dim))."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    weights = normal(rows, heads) * (heads * dim) ** -0.5
    return IndexerInputs(normal(rows, heads, dim), normal(rows, dim), weights)


def scores64(inputs: IndexerInputs, row: int) -> torch.Tensor:
    """Return the index scores of a row against the keys up to its own place, in float64."""
    products = inputs.k[: row + 1].double() @ inputs.q[row].double().t()
    return products.relu() @ inputs.weights[row].double()


def selection_error(
    inputs: IndexerInputs, topk: int, indices: torch.Tensor, ascending: bool = True
) -> float:
    """Return by how much a rejected key beats a selected one, relative to the largest score.

    fp32 sums may order nearly equal scores otherwise; any more is a wrong selection, and so is
    another order where lists have to be ``ascending``.
    """
    worst = 0.0
    rows = len(indices)
    for row in {rows * (i + 1) // CHECKED_ROWS - 1 for i in range(CHECKED_ROWS)}:
        scores, chosen = scores64(inputs, row), indices[row].long()
        chosen = chosen[chosen >= 0]
        if not ascending:
            chosen = chosen.sort().values
        if len(chosen) != min(topk, row + 1) or not bool((chosen.diff() > 0).all()):
            return float("inf")
        rest = scores.clone().index_fill_(0, chosen, float("-inf")).max()
        worst = max(worst, float((rest - scores[chosen].min()) / scores.abs().max()))
    return max(worst, 0.0)


def loss_error(inputs: IndexerInputs, indices, teacher, gradients) -> float:
    """Return the largest error of the gradients of q and weights of some rows against float64."""
    worst = 0.0
    rows = len(indices)
    for row in {rows * (i + 1) // CHECKED_ROWS - 1 for i in range(CHECKED_ROWS)}:
        chosen = indices[row][indices[row] >= 0].long()
        q = inputs.q[row].detach().double().requires_grad_()
        w = inputs.weights[row].detach().double().requires_grad_()
        scores = (inputs.k.detach()[chosen].double() @ q.t()).relu() @ w
        goal = teacher[row][indices[row] >= 0].double()
        goal = goal / goal.sum()
        (torch.xlogy(goal, goal) - goal * scores.log_softmax(0)).sum().backward()
        for got, want in ((gradients[0][row], q.grad), (gradients[2][row], w.grad)):
            worst = max(worst, float((got.double() - want).norm() / want.norm()))
    return worst


def case(operation: str, way: str, lists: str | None, inputs: IndexerInputs, options):
    """Return ``(call, check, flop)`` of a measurement."""
    rows, heads, dim = inputs.q.shape
    fp8 = way == FP8
    policy = Policy(
        workspace_bytes=options.workspace_mib * 2**20, fp8_selection=fp8,
        named=named(operation, "tilelang" if fp8 else way),
    )  # fmt: skip
    layout = bshd_layout(rows, 1, inputs.q.device)
    if operation == "dense":
        teacher = indexer_dense.Teacher.draw(rows, options.teacher_heads, inputs.q.device)
        for x in (inputs.q, inputs.k, inputs.weights):
            x.requires_grad_()

        def dense():
            if way == indexer_dense.BUNDLED:
                return indexer_dense.bundled(inputs, teacher)
            return indexer_dense.ours(inputs, teacher, layout, policy)

        return (
            dense, lambda gradients: indexer_dense.error(inputs, teacher, gradients),
            indexer_dense.flops(inputs, teacher),
        )  # fmt: skip
    bundled = way == indexer_dense.BUNDLED
    if operation == "select":

        def select():
            if bundled:
                return indexer_bundled.select(inputs, options.topk)
            return indexer_topk(inputs, layout, options.topk, policy=policy)[0]

        return (
            select, lambda indices: selection_error(inputs, options.topk, indices, not bundled),
            2 * heads * dim * Keys().pairs(rows),
        )  # fmt: skip
    indices = make_indices(lists, rows, rows, options.topk, inputs.q.device)
    generator = torch.Generator(inputs.q.device).manual_seed(1)
    teacher = torch.rand(indices.shape, generator=generator, device=indices.device)
    teacher.masked_fill_(indices < 0, 0.0)
    tensors = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.weights)]
    given = IndexerInputs(*tensors)
    scores = indexer_bundled.selected_scores(inputs, indices) if bundled else None

    def loss():
        if bundled:
            return indexer_bundled.loss_gradients(inputs, indices, teacher, scores)
        value = sparse_indexer_loss(given, indices, teacher, layout, policy=policy)
        return torch.autograd.grad(value, tensors)

    selected = int((indices >= 0).sum())
    return (
        loss, lambda gradients: loss_error(inputs, indices, teacher, gradients),
        6 * heads * dim * selected,
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure everything that was asked for; every row is appended to the table at once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device)
    facts = environment(device)
    peak = measure_ceiling("gemm", device, clock, options.repeats)["tflops"]
    print(f"GEMM {peak:.0f} TFLOP/s", flush=True)
    open_csv(options.output, COLUMNS)
    for rows in options.rows:
        inputs = draw(rows, options.heads, options.dim, device)
        for operation in options.operations:
            for lists in options.lists if operation == "loss" else (None,):
                for way in options.ways or WAYS[operation]:
                    row = facts | {
                        "date": datetime.now(UTC).isoformat(timespec="seconds"),
                        "operation": operation, "way": way, "rows": rows, "heads": options.heads,
                        "dim": options.dim, "topk": options.topk, "lists": lists,
                        "workspace_mib": options.workspace_mib,
                    }  # fmt: skip
                    row |= _outcome(operation, way, lists, inputs, clock, options, peak)
                    append_csv(options.output, row, COLUMNS)
                    shown = ("operation", "rows", "lists", "way", "status", "median_ms", "tflops",
                             "share_of_gemm", "peak_mib", "rel_error")  # fmt: skip
                    texts = (_text(row.get(name)) for name in shown)
                    print(*texts, row.get("reason") or "", flush=True)


def _text(value) -> str:
    return f"{value:.4g}".rjust(11) if isinstance(value, float) else f"{value or '':>11}"


def _outcome(operation, way, lists, inputs, clock, options, peak) -> dict:
    if operation == "loss" and way == "torch" and inputs.q.shape[0] > LONGEST_TORCH_LOSS:
        return {"status": "skipped", "reason": "torch gathers keys row by row: minutes"}
    if operation == "loss" and way == indexer_dense.BUNDLED and lists != "clustered":
        return {
            "status": "skipped",
            "reason": "it masks keys behind the query; these lists have such",
        }
    try:
        call, check, flop = case(operation, way, lists, inputs, options)
        reset_report()
        row = measure(call, check, clock, options.repeats, options.budget)
        row["ran"] = what_ran()
        if row["status"] == "ok":
            row["tflops"] = flop / row["median_ms"] / 1e9
            row["share_of_gemm"] = row["tflops"] / peak
        return row
    except Exception as error:  # a way that cannot run is a row, not the end
        return {"status": "failed", "reason": one_line(error)}
    finally:
        for x in (inputs.q, inputs.k, inputs.weights):
            x.requires_grad_(False)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.indexer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--rows", type=int, nargs="+", help="8192 32768 131072, with --quick 96")
    add("--operations", nargs="+", choices=OPERATIONS, default=list(OPERATIONS))
    ways = sorted({way for ways in WAYS.values() for way in ways})
    add("--ways", nargs="+", choices=ways, help="default: all of an operation")
    add("--lists", nargs="+", default=["sorted", "clustered"], help="of the loss")
    add("--heads", type=int, default=64)
    add("--teacher-heads", type=int, default=128, help="of the dense loss")
    add("--topk", type=int, help="2048, with --quick 16")
    add("--repeats", type=int, default=5)
    add("--budget", type=float, default=3, help="seconds of repeats per row, but one at least")
    add("--workspace-mib", type=int, default=256)
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="tiny shapes, for trying the benchmark")
    options = parser.parse_args(argv)
    options.dim = 128
    options.rows = options.rows or ([96] if options.quick else [8192, 32768, 131072])
    options.topk = options.topk or (16 if options.quick else 2048)
    return options


if __name__ == "__main__":
    run(parse())
