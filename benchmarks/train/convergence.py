"""Small models with sparse and dense attention, trained on the same text.

All ways have the same depth, width, schedule, steps and tokens, in the same order:

* ``dense``: MLA that attends to everything.
* ``sparse``: DeepSeek-V3.2's attention from the first step; its indexer learns with the model.
* ``staged``: the first third of the steps attends to everything while the indexer learns
  (``--dsa-stage warmup --dsa-warmup-train-all``), the rest is sparse.
* ``hybrid``: DeepSeek-V4's attention, sparse from the first step.

The first three start from the same weights (without the indexer's), the hybrid model from its own.
Whole texts are held out (:mod:`benchmarks.train.text`) for the evaluation of all runs. Every run is
``python -m megatron_dsa.pretrain`` with TensorBoard.
"""

import dataclasses
import math
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.train.models import launch
from benchmarks.train.text import prepare_text
from megatron_dsa.extras.report.events import RunLog, read_run
from megatron_dsa.metrics.tags import FIGURES
from megatron_dsa.training.data import BYTE_VOCAB

#: Metric -> name of the logged figure.
LOGGED = {"indexer_loss": "indexer loss", "mass_captured": "dsa attention mass captured"}


@dataclass(frozen=True)
class Size:
    """Settings that differ between a measurement and a quick run.

    ``model``: flags of all ways; ``mla``, ``sparse`` (indexer), ``hybrid``: flags of some.
    """

    model: str
    mla: str
    sparse: str
    hybrid: str
    batch: int
    length: int
    held_out_bytes: int
    evaluations: int  # batches per evaluation; together about all held-out text
    steps: int
    every: int


#: Six layers of V3.2's attention dims, with 16 heads.
SMALL = Size(
    model=(
        "--num-layers 6 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
        "--q-lora-rank 512 --bf16 --log-memory-to-tensorboard"
    ),
    mla="--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128",
    sparse="--dsa-indexer-n-heads 16 --dsa-indexer-head-dim 128 --dsa-indexer-topk 512",
    hybrid=(
        "--kv-lora-rank 448 --qk-head-dim 448 --qk-pos-emb-head-dim 64 --v-head-dim 512 "
        "--csa-compress-ratios 0 0 4 128 4 128 --csa-window-size 128 "
        "--csa-compress-rotary-base 10000 --o-groups 4 --o-lora-rank 256 "
        "--dsa-indexer-n-heads 16 --dsa-indexer-head-dim 128 --dsa-indexer-topk 128 "
        "--dsa-indexer-rope-interleaved"
    ),
    batch=4,
    length=4096,
    held_out_bytes=260_000,
    evaluations=16,
    steps=300,
    every=25,
)
TINY = Size(
    model=(
        "--num-layers 3 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
        "--q-lora-rank 16"
    ),
    mla="--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8",
    sparse="--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 --dsa-indexer-topk 16",
    hybrid=(
        "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
        "--csa-compress-ratios 0 4 16 --csa-window-size 16 "
        "--csa-compress-rotary-base 10000 --o-groups 2 --o-lora-rank 8 "
        "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8 "
        "--dsa-indexer-rope-interleaved"
    ),
    batch=2,
    length=64,
    held_out_bytes=2_000,
    evaluations=2,
    steps=12,
    every=4,
)


def size_of(quick: bool, steps: int | None) -> Size:
    """Return the size of the models to compare.

    Raises:
        ValueError: too few steps, or not a multiple of the evaluation interval.
    """
    size = TINY if quick else SMALL
    if steps in (None, size.steps):
        return size
    if steps < 24 or steps % 12:
        raise ValueError(f"--steps must be a multiple of 12 and 24 at least, got {steps}")
    return dataclasses.replace(size, steps=steps, every=steps // 12)


#: In shorter runs the learning rate never rises.
FEWEST_STEPS = 10


def with_steps(size: Size, steps: int | None) -> Size:
    """Return a size with this number of steps, if given.

    Raises:
        ValueError: too few steps.
    """
    steps = size.steps if steps is None else steps
    if steps < FEWEST_STEPS:
        raise ValueError(f"--steps must be at least {FEWEST_STEPS}, got {steps}")
    return dataclasses.replace(size, steps=steps)


#: Indexers learn from selected keys, or from all visible ones.
LOSS_OVER_ALL = ["--dsa-indexer-loss-coeff", "1.0"]
SPARSE_LOSS = [*LOSS_OVER_ALL, "--dsa-indexer-use-sparse-loss"]

WAYS = ("dense", "sparse", "staged", "hybrid")


@dataclass(frozen=True)
class Run:
    """A run of one way with one seed; its folder holds log and event files."""

    way: str
    seed: int
    folder: Path
    start: Path  # a checkpoint of dense MLA before the first step
    data: Path
    size: Size

    def commands(self) -> list[list[str]]:
        """Return the flags of its processes, in order."""
        size = self.size
        mla, sparse, hybrid = size.mla.split(), size.sparse.split(), size.hybrid.split()
        flags = [*size.model.split(), *training_flags(size, self.data, self.seed)]
        flags += ["--tensorboard-dir", str(self.folder / "events")]
        from_start = ["--load", str(self.start), "--finetune"]
        if self.way == "dense":
            return [[*flags, *mla, *from_start, "--dsa-stage", "dense"]]
        if self.way == "sparse":
            return [[*flags, *mla, *sparse, *SPARSE_LOSS, *from_start]]
        if self.way == "hybrid":
            return [[*flags, *hybrid, *SPARSE_LOSS]]
        flags += [*mla, *sparse]
        between = str(self.folder / "checkpoint")
        learns = ["--dsa-stage", "warmup", "--dsa-warmup-train-all", "--save", between]
        learns += ["--exit-interval", str(size.steps // 3), "--save-interval", str(size.steps)]
        return [
            [*flags, *LOSS_OVER_ALL, *from_start, *learns],
            [*flags, *SPARSE_LOSS, "--load", between],
        ]

    def train(self) -> Iterator[tuple[str, dict]]:
        """Train; yield the result of every evaluated step, and ``all`` of the run.

        Raises:
            RuntimeError: training failed; the text is the end of its log.
        """
        log = self.folder / "log.txt"
        for flags in self.commands():
            train(flags, log)
        # Checkpoints between stages are large.
        shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
        parameters = re.findall(r"number of parameters on .*: (\d+)", log.read_text())
        yield from results(read_run(self.way, self.folder / "events"), int(parameters[-1]))


def training_seconds(log: RunLog) -> dict[int, float]:
    """Return the time of all steps up to a step, without evaluation and start-up.

    Steps that compiled kernels (mean above three times the median) count as the median.
    """
    series = log.scalars["iteration-time"]
    usual = statistics.median(value for _, value in series)
    total, before, seconds = 0.0, 0, {}
    for step, value in series:
        total += (step - before) * (value if value < 3 * usual else usual)
        before, seconds[step] = step, total
    return seconds


def results(log: RunLog, parameters: int) -> Iterator[tuple[str, dict]]:
    """Yield the result of every evaluated step, and ``all`` of the run.

    ``parameters``: of the model.
    """
    seconds, training = training_seconds(log), dict(log.scalars["lm loss"])
    figures = {metric: dict(log.scalars.get(FIGURES[name], ())) for metric, name in LOGGED.items()}
    for step, loss in log.scalars["lm loss validation"]:
        yield str(step), {
            "status": "ok", "training_s": seconds[step], "lm_loss": training[step],
            "validation_loss": loss,
            **{metric: values.get(step) for metric, values in figures.items()},
        }  # fmt: skip
    usual = statistics.median(value for _, value in log.scalars["iteration-time"][1:])
    yield "all", {"status": "ok", "ms": 1e3 * usual, "parameters": parameters}


def training_flags(size: Size, data: Path, seed: int) -> list[str]:
    """Return the flags of all ways, without the model's size."""
    # Every evaluated step must be logged, including the last.
    evaluated = math.gcd(size.every, size.steps)
    log_interval = max(n for n in range(1, max(size.every // 5, 1) + 1) if evaluated % n == 0)
    return (
        "--attention-backend dsa_fused --multi-latent-attention --qk-layernorm "
        "--normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 "
        "--hidden-dropout 0 --rope-type rope --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --init-method-std 0.02 "
        f"--seq-length {size.length} --max-position-embeddings {size.length} "
        f"--micro-batch-size {size.batch} --global-batch-size {size.batch} "
        f"--train-iters {size.steps} --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine "
        f"--lr-warmup-iters {size.steps // 10} --lr-decay-iters {size.steps} "
        "--weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 "
        f"--seed {seed} --tokenizer-type NullTokenizer --vocab-size {BYTE_VOCAB} --num-workers 1 "
        f"--train-data-path {data / 'train'} --valid-data-path {data / 'held_out'} "
        f"--eval-interval {size.every} --eval-iters {size.evaluations} "
        f"--log-interval {log_interval} "
        "--log-timers-to-tensorboard --log-throughput --dsa-time-operations"
    ).split()


def train(flags: list[str], log: Path, module: str | None = None) -> None:
    """Train in its own process; see :func:`benchmarks.train.models.launch`.

    Args:
        flags: of the training.
        log: file that the output is appended to.
        module: replaces the entry point.
    """
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    quiet = {"PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-m", module or "megatron_dsa.pretrain", *flags]
    launch(command, log, **places, **quiet)


def make_start(folder: Path, size: Size, data: Path, seed: int) -> None:
    """Save the initial weights of a seed's dense model."""
    flags = [*f"{size.model} {size.mla}".split(), *training_flags(size, data, seed)]
    flags += ["--dsa-stage", "dense"]
    # Megatron saves only after a step: take one that changes nothing.
    flags += ["--lr", "0", "--min-lr", "0", "--exit-interval", "1", "--no-save-optim"]
    flags += ["--eval-iters", "0"]
    flags += ["--save", str(folder), "--save-interval", str(size.steps)]
    train(flags, folder / "log.txt")


class Comparison:
    """All runs of one seed: text and initial weights are made once."""

    def __init__(self, size: Size, seed: int, folder: Path):
        self.size, self.seed, self.folder = size, seed, folder
        prepare_text(folder / "data", size.held_out_bytes)

    def train(self, way: str) -> Iterator[tuple[str, dict]]:
        """Train one way; yield its results."""
        start, data = self.folder / "start", self.folder / "data"
        if way != "hybrid" and not start.exists():  # a hybrid model starts from its own weights
            make_start(start, self.size, data, self.seed)
        yield from Run(way, self.seed, self.folder / way, start, data, self.size).train()
