"""Dense causal attention over several GPUs: ways for keys and values to reach the queries.

    python -m benchmarks.ring                       # all GPUs, writes ring.csv
    python -m benchmarks.ring --rows 32768 --heads 16

Compared are the zigzag ring of keys and values, the ring of MLA's latent and its all-gather, and a
ring over contiguous parts, in which the last rank sees every key: all ranks do what that one has
to, which is how long the others would wait for it. One GPU, in the same run, is what efficiency
refers to.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.ranks_cases import Grid

#: MLA of DeepSeek-V3.2: widths of a key without rope, of rope, of a value and of the latent.
NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512
VARIANTS = ("ring", "ring of latents", "gathered latents", "contiguous ring")
FIELDS = (
    "date", "gpu", "torch", "cuda", "driver", "gpus", "rows", "heads", "variant", "block",
    "operation", "median_ms", "p10_ms", "p90_ms", "tflops_per_gpu", "efficiency", "difference",
    "repeats",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What one process measures: ``rows`` on all ranks together, ``heads`` on each."""

    grid: Grid
    rows: int
    heads: int
    repeats: int


def serve(rank: int, setups: list[Setup], store: str, answers) -> None:
    """Measure every setup on this rank and put the rows of the table into ``answers``."""
    import torch

    from benchmarks.measure import environment
    from benchmarks.ranks_worker import join

    device = join(rank, setups[0].grid, store)
    found = {"environment": environment(device), "rows": []}
    for setup in setups:
        for variant in VARIANTS if setup.grid.cp > 1 else VARIANTS[:1]:
            torch.cuda.empty_cache()
            found["rows"] += measure(setup, variant, rank, device)
    answers.put((rank, found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(setup: Setup, variant: str, rank: int, device) -> list[dict]:
    """Time forward and forward with backward of one variant."""
    import torch

    from benchmarks.ranks_layer import timed
    from benchmarks.timing import Clock

    inputs = tensors(setup, rank, device)
    clock = Clock(device)
    call, block = attention(setup, variant, rank, inputs)
    gradient = torch.ones(inputs["q"].shape[0], setup.heads, VALUE, device=device).bfloat16()

    def step():
        call().backward(gradient)

    out = call().detach().float()
    plain, _ = attention(setup, VARIANTS[0], rank, inputs)
    difference = 0.0
    if variant in ("ring of latents", "gathered latents"):
        difference = float((plain().detach().float() - out).norm() / out.norm())
    results = []
    # A query and a key: a product of scores and one of values; twice and a half that backwards.
    flops = setup.rows**2 / 2 * setup.heads * (NOPE + ROPE + VALUE) * 2 / setup.grid.cp
    for operation, run, factor in (("forward", call, 1), ("step", step, 3.5)):
        run()
        times = timed(run, clock, device, setup.repeats, 10.0)
        results.append(
            {
                "gpus": setup.grid.cp, "rows": setup.rows, "heads": setup.heads,
                "variant": variant, "block": block, "operation": operation, "times": times,
                "flops": flops * factor, "difference": difference,
            }
        )  # fmt: skip
    return results


def tensors(setup: Setup, rank: int, device) -> dict:
    """Queries, the latent and weights; keys and values are what the latent expands to."""
    import torch

    generator = torch.Generator(device).manual_seed(rank)

    def normal(*shape: int, scale: float = 1.0):
        x = torch.randn(shape, generator=generator, device=device) * scale
        return x.bfloat16().requires_grad_()

    rows, heads = setup.rows // setup.grid.cp, setup.heads
    latent = normal(rows, RANK + ROPE)
    generator.manual_seed(99)  # the weights are the same on all ranks
    w_uk, w_uv = (normal(heads, n, RANK, scale=RANK**-0.5) for n in (NOPE, VALUE))
    with torch.no_grad():
        k = torch.einsum("sr,hnr->shn", latent[:, :RANK], w_uk)
        k = torch.cat([k, latent[:, None, RANK:].expand(-1, heads, -1)], -1)
        v = torch.einsum("sr,hnr->shn", latent[:, :RANK], w_uv)
    return {
        "q": normal(rows, heads, NOPE + ROPE), "k": k.requires_grad_(), "v": v.requires_grad_(),
        "latent": latent, "w_uk": w_uk, "w_uv": w_uv,
    }  # fmt: skip


def attention(setup: Setup, variant: str, rank: int, inputs: dict):
    """Return a call that gives the output, and the name of the attention to one block."""
    from megatron.core import parallel_state

    from megatron_dsa import ring
    from megatron_dsa.dispatch import device_problem
    from megatron_dsa.ring.rows import Part

    group, cp = parallel_state.get_context_parallel_group(), setup.grid.cp
    rows = ring.ZigzagRows(cp, rank, 1, setup.rows // cp)
    if variant == "contiguous ring":

        class LastOfContiguous(ring.ZigzagRows):
            """Sees its own block causally and all of the others."""

            def part(self, source: int) -> Part:
                whole = slice(None)
                own = super().part(rank)
                return Part(whole, whole, source == rank, own.sequences)

        rows = LastOfContiguous(cp, rank, 1, setup.rows // cp)
    q, scale = inputs["q"], (NOPE + ROPE) ** -0.5
    shape = {"heads": setup.heads, "qk_dim": NOPE + ROPE, "v_dim": VALUE}
    leaf = ring.choose(device_problem(q.device, dtype=q.dtype, **shape))
    if variant in ("ring", "contiguous ring"):
        function, others = ring.ring_attention, ("k", "v")
    else:
        function, others = ring.ring_latent_attention, ("latent", "w_uk", "w_uv")
    if variant == "gathered latents":
        function = ring.gathered_latent_attention
    others = [inputs[name] for name in others]
    return lambda: function(q, *others, rows, group, scale)[0], leaf.name


def run(grid: Grid, setups: list[Setup]) -> tuple[dict, list[dict]]:
    """Run a grid of processes; return the environment and, per row, the slowest rank's times."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setups, f"{folder}/store", answers)
        processes = [context.Process(target=serve, args=(r, *arguments)) for r in range(grid.cp)]
        for process in processes:
            process.start()
        found = dict(answers.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    rows = []
    for same in zip(*(found[r]["rows"] for r in range(grid.cp)), strict=True):
        slowest = max(same, key=lambda row: statistics.median(row["times"]))
        rows.append(slowest | {"difference": max(row["difference"] for row in same)})
    return found[0]["environment"], rows


def main(argv: list[str] | None = None) -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, help="default: all there are")
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--heads", type=int, default=128, help="on each GPU (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/ring.csv"))
    options = parser.parse_args(argv)
    import torch

    gpus = options.gpus or torch.cuda.device_count()
    if gpus < 2 or gpus > torch.cuda.device_count():
        parser.error(f"--gpus must be 2 to {torch.cuda.device_count()}, got {gpus}")
    table, alone = [], {}
    for cp in (1, gpus):
        grid = Grid(1, cp)
        setups = [Setup(grid, rows, options.heads, options.repeats) for rows in options.rows]
        environment, rows = run(grid, setups)
        for row in rows:
            times = row.pop("times")
            median, flops = statistics.median(times), row.pop("flops")
            key = row["rows"], row["operation"]
            alone.setdefault(key, median)
            low, *_, high = statistics.quantiles(times, n=10) if len(times) > 1 else times * 2
            table.append(
                environment
                | row
                | {
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "median_ms": f"{median:.5g}", "p10_ms": f"{low:.5g}", "p90_ms": f"{high:.5g}",
                    "tflops_per_gpu": f"{flops / median / 1e9:.4g}",
                    "efficiency": f"{alone[key] / cp / median:.4g}", "repeats": len(times),
                }
            )  # fmt: skip
            shown = ("gpus", "rows", "variant", "block", "operation", "median_ms", "efficiency")
            print(*(f"{table[-1][name]!s:>17}" for name in (*shown, "difference")), flush=True)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
