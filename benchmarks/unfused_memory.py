"""Peak memory and time of the unfused core, forward and backward, against the sequence length.

The core is what a sparse layer runs between its projections: index scores and top-k, sparse
attention, sparse indexer loss, and all their gradients. Each length runs in its own process; peak
memory is the kernel's high-water mark of resident memory above what the inputs take.

    python benchmarks/unfused_memory.py            # measures, writes CSV and chart

Needs Linux; the chart needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LENGTHS = (1024, 2048, 4096, 8192)
SHAPE = {"heads": 16, "qk_dim": 576, "v_dim": 512, "topk": 256, "index_heads": 8, "index_dim": 128}


def resident(field: str) -> float:
    """A memory figure of this process in MiB: ``VmRSS`` (now) or ``VmHWM`` (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def measure(length: int, workspace_mib: int) -> dict:
    """Run the core once to warm up on a short input and once, measured, at ``length``."""
    import torch

    from megatron_dsa.dispatch import Policy
    from megatron_dsa.dsa_kernels import (
        IndexerInputs,
        indexer_topk,
        sparse_attention,
        sparse_indexer_loss,
    )
    from megatron_dsa.sequence.layout import bshd_layout

    policy = Policy(fused=False, workspace_bytes=workspace_mib * 2**20)
    s = SHAPE

    def leaf(*shape):
        return torch.randn(*shape).requires_grad_()

    def core(n):
        q, kv = leaf(n, s["heads"], s["qk_dim"]), leaf(n, s["qk_dim"])
        inputs = IndexerInputs(
            leaf(n, s["index_heads"], s["index_dim"]),
            leaf(n, s["index_dim"]),
            leaf(n, s["index_heads"]),
        )
        grad = torch.randn(n, s["heads"], s["v_dim"])
        layout = bshd_layout(n, 1, torch.device("cpu"))
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        begin = time.perf_counter()
        indices, count = indexer_topk(inputs, layout, s["topk"], policy=policy)
        result = sparse_attention(
            q, kv, indices, softmax_scale=0.05, v_dim=s["v_dim"], topk_length=count,
            want_p_sum=True, policy=policy,
        )  # fmt: skip
        loss = sparse_indexer_loss(
            inputs, indices, result.p_sum, layout, topk_length=count, policy=policy
        )
        torch.autograd.backward([result.out, loss], [grad, torch.ones_like(loss)])
        seconds = time.perf_counter() - begin
        results = [result.out, result.lse, result.p_sum, indices, q.grad, kv.grad]
        results += [inputs.q.grad, inputs.k.grad, inputs.weights.grad]
        kept = sum(x.numel() * x.element_size() for x in results) / 2**20
        return resident("VmHWM") - before, kept, seconds

    core(256)
    peak, kept, seconds = core(length)
    return {
        "length": length,
        "workspace_mib": workspace_mib,
        "peak_mib": round(peak, 1),
        "results_mib": round(kept, 1),
        "peak_minus_results_mib": round(peak - kept, 1),
        "seconds": round(seconds, 2),
        "torch": torch.__version__,
        "device": f"CPU, {torch.get_num_threads()} threads, {platform.machine()}",
        **{key: str(value) for key, value in SHAPE.items()},
    }


def chart(rows: list[dict], path: Path) -> None:
    """Draw peak memory against length, with the quadratic growth that is avoided."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for workspace in sorted({row["workspace_mib"] for row in rows}):
        mine = [row for row in rows if row["workspace_mib"] == workspace]
        axis.plot(
            [row["length"] for row in mine], [row["peak_mib"] for row in mine], "o-",
            label=f"peak, {workspace} MiB workspace",
        )  # fmt: skip
    mine = [row for row in rows if row["workspace_mib"] == rows[0]["workspace_mib"]]
    lengths = [row["length"] for row in mine]
    axis.plot(
        lengths, [row["results_mib"] for row in mine], "k:", label="results and gradients alone"
    )
    quadratic = [n * n * SHAPE["heads"] * 4 / 2**20 for n in lengths]
    axis.plot(lengths, quadratic, "r--", label="one S x S score buffer per head")
    axis.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="MiB above the inputs")
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_title("Unfused core, forward and backward")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every length in its own process and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, type=int, metavar=("LENGTH", "WORKSPACE_MIB"))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    rows = []
    # Large blocks go straight back to the system, so that the mark shows what is alive.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(HERE.parent)}
    for workspace in (64, 256):
        for length in LENGTHS:
            out = subprocess.run(
                [sys.executable, __file__, "--one", str(length), str(workspace)],
                env=environment, check=True, stdout=subprocess.PIPE, text=True,
            ).stdout  # fmt: skip
            rows.append(json.loads(out.splitlines()[-1]))
            row = rows[-1]
            print(
                f"workspace {workspace:4} MiB  S {length:5}  peak {row['peak_mib']:8.1f} MiB"
                f"  results {row['results_mib']:7.1f} MiB  {row['seconds']:6.2f} s"
            )
    with (HERE / "unfused_memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    try:
        chart(rows, HERE / "unfused_memory.png")
    except ImportError:
        print("no chart: pip install matplotlib")


if __name__ == "__main__":
    main()
