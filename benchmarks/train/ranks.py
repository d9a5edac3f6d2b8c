"""The same training on one rank and on several, step by step.

All ways start from one checkpoint of a run on one rank, and read the same batches. ``one rank
again`` shows the effect of the order of atomic sums. Models: ``v3.2``, four layers of
DeepSeek-V3.2's attention; ``v4``, four layers of DeepSeek-V4-Flash's width with everything around
V4's attention. Ways of several ranks run under torchrun, one process per GPU. On ``all``,
``out_error`` is the relative difference to one rank of the mean loss of the last steps.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.train import selected, whole
from benchmarks.train.convergence import SPARSE_LOSS, Size, train, training_flags, with_steps
from benchmarks.train.models import launch
from benchmarks.train.selected import LOSSES, results
from benchmarks.train.text import prepare_text
from megatron_dsa.errors import ImplementationError
from megatron_dsa.extras.report.events import read_run

ONE, AGAIN = "one rank", "one rank again"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
#: Ranks with the same weights share the optimizer's state, as in the launch scripts.
DP2 = "--use-distributed-optimizer"
CP2 = f"--context-parallel-size 2 {DP2}"
EP2 = f"--expert-model-parallel-size 2 {DP2}"
#: Model -> way -> ranks and flags. Data-parallel ranks share the batch of two sequences.
WAYS: dict[str, dict[str, tuple[int, str]]] = {
    "v3.2": {
        ONE: (1, ""), AGAIN: (1, ""), "TP2": (2, TP2), "CP2": (2, CP2),
        "DP2": (2, DP2), "TP2 x CP2": (4, f"{TP2} {CP2}"),
    },
    "v4": {
        ONE: (1, ""), AGAIN: (1, ""), "TP2": (2, TP2), "CP2": (2, CP2), "EP2": (2, EP2),
        "TP2 x CP2 x EP2": (4, f"{TP2} {CP2} {EP2} --expert-tensor-parallel-size 1"),
    },
}  # fmt: skip
MEASURED = {
    "v3.2": dataclasses.replace(
        selected.MEASURED,
        model=(
            "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 64 "
            "--q-lora-rank 1536 --bf16"
        ),
        sparse="--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 512",
        batch=2,
        length=4096,
        steps=200,
    ),
    "v4": dataclasses.replace(whole.MEASURED, batch=2),
}
QUICK = {"v3.2": selected.QUICK, "v4": whole.QUICK}
#: With the usual rate losses first rise, and equal runs end 3 % (V4) to 10 % (V3.2) apart.
RATE = "--lr 1e-4 --min-lr 1e-5"
#: Last steps whose mean loss is compared.
LAST = 20


def size_of(model: str, quick: bool, steps: int | None) -> Size:
    """Return the size of a model.

    Raises:
        ValueError: too few steps.
    """
    size = with_steps((QUICK if quick else MEASURED)[model], steps)
    return dataclasses.replace(size, every=size.steps)


class SameOnRanks:
    """All runs of one model and seed, in one folder; text and initial weights are made once."""

    def __init__(self, model: str, size: Size, seed: int, folder: Path):
        self.model, self.size, self.seed, self.folder = model, size, seed, folder
        self._last: float | None = None
        prepare_text(folder / "data", size.held_out_bytes)

    def flags(self) -> list[str]:
        size = self.size
        attention = size.hybrid if self.model == "v4" else f"{size.mla} {size.sparse}"
        flags = f"{size.model} {attention}".split()
        flags += [*training_flags(size, self.folder / "data", self.seed), *SPARSE_LOSS]
        # The vocabulary's padding, and so the weights, would depend on the ranks.
        flags += ["--micro-batch-size", "1", "--padded-vocab-size", "512", "--log-interval", "1"]
        return [*flags, *RATE.split(), "--eval-iters", "0"]

    def start(self) -> Path:
        """Return a checkpoint of the initial weights of all ways."""
        folder = self.folder / "start"
        if not folder.exists():
            # Megatron saves only after a step: take one that changes nothing.
            still = ["--lr", "0", "--min-lr", "0", "--exit-interval", "1", "--no-save-optim"]
            saved = ["--save", str(folder), "--save-interval", str(self.size.steps)]
            train([*self.flags(), *still, *saved], self.folder / "start.txt")
        return folder

    def train(self, way: str) -> Iterator[tuple[str, dict]]:
        """Train; yield the result of every step, and ``all`` of the run.

        Raises:
            ImplementationError: there are too few GPUs.
            RuntimeError: training failed; the text is the end of its log.
        """
        ranks, more = WAYS[self.model][way]
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else ranks
        if gpus < ranks:
            raise ImplementationError(f"{way} needs {ranks} GPUs, not {gpus}")
        folder = self.folder / way.replace(" ", "_")
        flags = [*self.flags(), *more.split(), "--load", str(self.start()), "--finetune"]
        flags += ["--tensorboard-dir", str(folder / "events")]
        if ranks == 1:
            train(flags, folder / "log.txt")
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, "--nproc-per-node", str(ranks), "-m", "megatron_dsa.pretrain"]
            variables = {"PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            launch([*command, *flags], folder / "log.txt", OMP_NUM_THREADS="1", **variables)
        log = read_run(way, folder / "events")
        yield from self._compared(way, list(results(log, {"lm_loss": LOSSES["lm_loss"]})))

    def _compared(self, way: str, found: list[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
        losses = [result["lm_loss"] for part, result in found if part != "all"][-LAST:]
        mean = sum(losses) / len(losses)
        if way == ONE:
            self._last = mean
        for part, result in found:
            if part == "all" and way != ONE and self._last is not None:
                result = result | {"out_error": abs(mean - self._last) / self._last}
            yield part, result
