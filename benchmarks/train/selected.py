"""The same training with both attentions to selected keys, step by step.

Ways: ``sparse`` and ``masked``, by ``--dsa-selected-attention``, and ``sparse again``. All have the
same model, initial weights, text, order, schedule and seed. Both attentions compute the same
function with different rounding, and small differences grow in any training. ``sparse again`` shows
the effect of the order of atomic sums.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.timing import summary
from benchmarks.train.convergence import (
    SMALL,
    SPARSE_LOSS,
    TINY,
    Size,
    train,
    training_flags,
    with_steps,
)
from benchmarks.train.resume import LOGGED
from benchmarks.train.text import prepare_text
from megatron_dsa.extras.report.events import RunLog, read_run
from megatron_dsa.metrics.tags import CALLS

#: Way -> its attention.
WAYS = {"sparse": "sparse", "masked": "masked", "sparse again": "sparse"}
#: Both attentions have fused kernels for these dims and 16 heads.
MEASURED = dataclasses.replace(
    SMALL,
    model=(
        "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
        "--q-lora-rank 512 --bf16"
    ),
    length=2048,
    steps=100,
    every=100,
)
QUICK = dataclasses.replace(TINY, steps=12, every=12)


def size_of(quick: bool, steps: int | None) -> Size:
    """Return the size of the model.

    Raises:
        ValueError: too few steps.
    """
    size = with_steps(QUICK if quick else MEASURED, steps)
    return dataclasses.replace(size, every=size.steps)


class SameTraining:
    """All runs of one seed, in one folder; the text is written once."""

    def __init__(self, size: Size, seed: int, folder: Path):
        self.size, self.seed, self.folder = size, seed, folder
        prepare_text(folder / "data", size.held_out_bytes)

    def flags(self, way: str) -> list[str]:
        size = self.size
        flags = f"{size.model} {size.mla} {size.sparse}".split()
        flags += [*training_flags(size, self.folder / "data", self.seed), *SPARSE_LOSS]
        flags += ["--tensorboard-dir", str(self.folder / way / "events"), "--log-interval", "1"]
        return [*flags, "--dsa-selected-attention", WAYS[way]]

    def train(self, way: str) -> Iterator[tuple[str, dict]]:
        """Train; yield the result of every step, and ``all`` of the run.

        Raises:
            RuntimeError: training failed; the text is the end of its log.
        """
        train(self.flags(way), self.folder / way / "log.txt")
        yield from results(read_run(way, self.folder / way / "events"))


#: Metrics of every step for charts and pages -> tags in event files.
LOSSES = {name: LOGGED[name] for name in ("lm_loss", "indexer_loss")}


def results(log: RunLog, tags: dict[str, str] = LOSSES) -> Iterator[tuple[str, dict]]:
    """Yield a run's logged steps, and its time and kernels as ``all``."""
    logged = {metric: dict(log.scalars.get(tag, ())) for metric, tag in tags.items()}
    for step in sorted(logged["lm_loss"]):
        yield str(step), {"status": "ok"} | {name: x.get(step) for name, x in logged.items()}
    times = [1e3 * seconds for _, seconds in log.scalars["iteration-time"][1:]]
    ran = "; ".join(sorted(name.replace("/", "=") for name in log.under(CALLS)))
    yield "all", {"status": "ok", **summary(times), "ran": ran}
