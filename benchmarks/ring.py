"""Dense causal attention over several GPUs: ways for keys and values to reach the queries.

    python -m benchmarks.ring                       # all GPUs, writes ring.csv
    python -m benchmarks.ring --rows 32768 --heads 16
    python -m benchmarks.ring --quick               # tiny shapes, two processes on the CPU

Compared are the zigzag ring of keys and values, the all-gather of MLA's latents (with nothing to
run under it), and a ring over contiguous parts, in which the last rank sees every key:
all ranks do what that one has to, which is how long the others would wait for it. One GPU, in the
same run, is what efficiency refers to. Processes and their failures are those of
:mod:`benchmarks.ranks`.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import attention as output
from benchmarks.ranks import gpu_count
from benchmarks.ranks_cases import ONE, Grid
from benchmarks.ranks_pool import Ended, Pool
from benchmarks.ranks_run import slowest
from benchmarks.ranks_worker import serve
from benchmarks.timing import summary

#: MLA of DeepSeek-V3.2: widths of a key without rope, of rope, of a value and of the latent.
NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512
VARIANTS = ("ring", "gathered latents", "contiguous ring")
FIELDS = (
    "date", "gpu", "torch", "cuda", "driver", "gpus", "rows", "heads", "variant", "block",
    "operation", "median_ms", "p10_ms", "p90_ms", "tflops_per_gpu", "efficiency", "difference",
    "repeats",
)  # fmt: skip
#: Seconds of timed calls of one operation, after which no more are made.
BUDGET = 10.0


@dataclass(frozen=True)
class Setup:
    """One measurement: ``rows`` on all ranks together, ``heads`` on each."""

    grid: Grid
    rows: int
    heads: int
    variant: str


def measure(_what: str, setup: Setup, grid: Grid, device, settings: dict) -> dict:
    """Time forward and forward with backward of one variant on this rank."""
    import torch

    from benchmarks.ranks_timing import timed
    from benchmarks.timing import Clock

    rank = torch.distributed.get_rank()
    inputs = tensors(setup, rank, device)
    clock = Clock(device)
    call, block = attention(setup, setup.variant, rank, inputs)
    gradient = torch.ones(inputs["q"].shape[0], setup.heads, VALUE, device=device).bfloat16()

    def step():
        call().backward(gradient)

    out = call().detach().float()
    plain, _ = attention(setup, VARIANTS[0], rank, inputs)
    difference = 0.0
    if setup.variant == "gathered latents":
        difference = float((plain().detach().float() - out).norm() / out.norm())
    times = {}
    for operation, run in (("forward", call), ("step", step)):
        run()
        times[operation] = timed(run, clock, device, settings["repeats"], BUDGET)
    return {"block": block, "difference": difference, "times": times}


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

    from megatron_dsa.dispatch import describe_call
    from megatron_dsa.ops.dense_attention.blocks import choose
    from megatron_dsa.parallel import ring
    from megatron_dsa.parallel.gather import finish_gather, start_gather
    from megatron_dsa.parallel.ring.shards import Part

    group, cp = parallel_state.get_context_parallel_group(), setup.grid.cp
    rows = ring.ZigzagShard(cp, rank, 1, setup.rows // cp)
    if variant == "contiguous ring":

        class LastOfContiguous(ring.ZigzagShard):
            """Sees its own block causally and all of the others."""

            def parts(self, source: int) -> tuple[Part, ...]:
                whole = slice(None)
                (own,) = super().parts(rank)
                return (Part(whole, whole, source == rank, own.sequences),)

        rows = LastOfContiguous(cp, rank, 1, setup.rows // cp)
    q, scale = inputs["q"], (NOPE + ROPE) ** -0.5
    shape = {"heads": setup.heads, "qk_dim": NOPE + ROPE, "v_dim": VALUE}
    kernel = choose(describe_call(q.device, dtype=q.dtype, **shape))
    weights = [inputs[name] for name in ("w_uk", "w_uv")]

    def gathered():
        latents, grad_proxy = finish_gather(start_gather(inputs["latent"], group))
        return ring.gathered_latent_attention(
            q, latents, *weights, rows, scale, latent_grad=grad_proxy
        )[0]

    def over_the_ring():
        return ring.ring_attention(q, inputs["k"], inputs["v"], rows, group, scale)[0]

    return gathered if variant == "gathered latents" else over_the_ring, kernel.name


def flops(setup: Setup, operation: str) -> float:
    """Operations of one rank: a product of scores and one of values; twice and a half backwards."""
    forward = setup.rows**2 / 2 * setup.heads * (NOPE + ROPE + VALUE) * 2 / setup.grid.cp
    return forward * (3.5 if operation == "step" else 1)


def rows_of(setup: Setup, environment: dict, answers: list[dict], alone: dict) -> list[dict]:
    """Return the rows of a setup; ``alone`` keeps the milliseconds of one GPU from call to call."""
    rows = []
    for operation in answers[0]["times"]:
        figures = summary(slowest(answers, operation))
        median, key = figures["median_ms"], (setup.rows, operation)
        if setup.grid == ONE:
            alone[key] = median
        rows.append(
            {name: environment[name] for name in FIELDS if name in environment}
            | figures
            | {
                "date": datetime.now(UTC).isoformat(timespec="seconds"), "gpus": setup.grid.cp,
                "rows": setup.rows, "heads": setup.heads, "variant": setup.variant,
                "block": answers[0]["block"], "operation": operation,
                "tflops_per_gpu": flops(setup, operation) / median / 1e9,
                "efficiency": alone[key] / setup.grid.cp / median,
                "difference": max(answer["difference"] for answer in answers),
            }
        )  # fmt: skip
    return rows


def run(grid: Grid, setups: list[Setup], options: argparse.Namespace, alone: dict) -> None:
    """Measure setups on one grid; every row is appended to the table at once.

    Raises:
        Ended: if a rank fails or does not answer.
    """
    settings = {"repeats": options.repeats}
    pool = Pool(grid, settings, options.timeout, functools.partial(serve, run=measure))
    try:
        environment = pool.answers()[0]["environment"]
        for setup in setups:
            pool.ask("measure", [setup])
            for row in rows_of(setup, environment, pool.answers(), alone):
                output.append_csv(options.output, row, FIELDS)
                shown = ("gpus", "rows", "variant", "block", "operation")
                numbers = ("median_ms", "efficiency", "difference")
                text = [*(str(row[name]) for name in shown), *(f"{row[n]:.4g}" for n in numbers)]
                print(*(f"{part:>17}" for part in text), flush=True)
    finally:
        pool.stop()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ring", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--gpus", type=int, help="default: all there are, with --quick 2 processes")
    add("--rows", type=int, nargs="+", help="of all GPUs (32768 65536, with --quick 64)")
    add("--heads", type=int, help="on each GPU (128, with --quick 2)")
    add("--repeats", type=int, help="timed calls (5, with --quick 2)")
    add("--timeout", type=float, default=300, help="seconds until GPUs must have answered (300)")
    add("--output", type=Path, default=Path(__file__).with_suffix(".csv"), metavar="CSV")
    add("--quick", action="store_true", help="tiny shapes on the CPU, for trying the benchmark")
    options = parser.parse_args(argv)
    options.rows = options.rows or ([64] if options.quick else [32768, 65536])
    options.heads = options.heads or (2 if options.quick else 128)
    options.repeats = options.repeats or (2 if options.quick else 5)
    return options


def plan(options: argparse.Namespace, there: int | None) -> dict[Grid, list[Setup]]:
    """Return what one GPU measures, then all; ``there`` are so many, ``None`` on the CPU.

    Raises:
        SystemExit: if the command line asks for what cannot be.
    """
    gpus = options.gpus or (2 if there is None else there)
    if gpus < 2 or (there is not None and gpus > there):
        raise SystemExit(f"--gpus must be 2 at least and not more than there are, got {gpus}")
    if bad := [n for n in options.rows if n < 1 or n % (2 * gpus)]:
        # Each has two chunks of equal length.
        raise SystemExit(f"--rows must be positive multiples of {2 * gpus}, got {bad[0]}")
    return {
        grid: [Setup(grid, n, options.heads, name) for n in options.rows for name in names]
        for grid, names in ((ONE, VARIANTS[:1]), (Grid(1, gpus), VARIANTS))
    }


def main(argv: list[str] | None = None) -> None:
    """Measure everything that was asked for and append it to the table."""
    options = parse(argv)
    todo = plan(options, gpu_count(options.quick))
    output.open_csv(options.output, FIELDS)
    alone: dict = {}
    for grid, setups in todo.items():
        try:
            run(grid, setups, options, alone)
        except Ended as error:
            raise SystemExit(f"{grid.name}: {error.status}: {error.reason}") from None
    print(f"rows are in {options.output}")


if __name__ == "__main__":
    main()
