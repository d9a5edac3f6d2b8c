"""Trains small models with sparse and with dense attention on the same text, and compares them.

Four ways, all of the same depth, width, schedule, number of steps and tokens, in the same order:

* ``dense``: MLA that attends to everything.
* ``sparse``: DeepSeek-V3.2's attention from the first step; its indexer learns beside the model.
* ``staged``: the first third of the steps attends to everything while the indexer learns along
  (``--dsa-stage warmup --dsa-warmup-train-all``), the rest is sparse.
* ``hybrid``: DeepSeek-V4's attention, sparse from the first step.

The first three start from the same weights (the indexer's aside). The hybrid model has other
attention weights and starts from its own; all of a seed see the same text in the same order.

The text is Python's standard library and language reference, a token per byte; whole files are
held out. Runs of a seed are evaluated on the same sequences of them at a step.

    python -m benchmarks.convergence --output runs/convergence          # one GPU
    python -m benchmarks.convergence --output runs/tiny --tiny          # tiny dims, on the CPU

Every run is ``python -m megatron_dsa.pretrain`` with TensorBoard; ``benchmarks.convergence_table``
makes a table and a chart of a folder of runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_dsa.training.data import BYTE_VOCAB, python_documentation, write_byte_dataset

#: Folders of the standard library that are tables, tests, or no part of it.
LEFT_OUT = {"encodings", "test", "tests", "site-packages", "dist-packages", "pydoc_data"}


@dataclass(frozen=True)
class Size:
    """Everything that differs between a measurement and a try-out.

    ``model`` are flags of all ways, ``mla``, ``sparse`` (its indexer) and ``hybrid`` of their own.
    """

    model: str
    mla: str
    sparse: str
    hybrid: str
    batch: int
    length: int
    held_out_bytes: int
    evaluations: int  # batches per evaluation; all of them about as much as is held out
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

#: Indexers learn from the keys that they selected, or from all visible ones.
LOSS_OVER_ALL = ["--dsa-indexer-loss-coeff", "1.0"]
SPARSE_LOSS = [*LOSS_OVER_ALL, "--dsa-indexer-use-sparse-loss"]

WAYS = ("dense", "sparse", "staged", "hybrid")


def library_texts() -> dict[str, str]:
    """Return the texts of this Python's standard library, sources and reference, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {f"topic {i}": text for i, text in enumerate(python_documentation())}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if LEFT_OUT.isdisjoint(inside.parts):
            texts[str(inside)] = path.read_text(encoding="utf-8", errors="ignore")
    return texts


def held_out(texts: dict[str, str], size: int) -> set[str]:
    """Choose whole texts of at least ``size`` characters together, the same ones every time."""
    chosen: set[str] = set()
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sum(len(texts[other]) for other in chosen) >= size:
            break
        chosen.add(name)
    return chosen


def prepare_text(folder: Path, size: int) -> dict:
    """Write the data sets ``train`` and ``held_out``; return what they hold."""
    texts = library_texts()
    apart = held_out(texts, size)
    told = {"python": sys.version.split()[0]}
    for name, wanted in (("held_out", True), ("train", False)):
        documents = [text for key, text in texts.items() if (key in apart) == wanted]
        told[f"{name}_tokens"] = write_byte_dataset(documents, folder / name)
    return told


@dataclass(frozen=True)
class Run:
    """A run of one way with one seed; its folder holds the log and the event files."""

    way: str
    seed: int
    folder: Path
    start: Path  # a checkpoint of dense MLA, before the first step
    data: Path
    size: Size

    def commands(self) -> list[list[str]]:
        """Return the flags of its processes, one after the other."""
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

    def train(self, at_once: int) -> dict:
        """Run it; return what the table needs to know about it."""
        begin = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "log.txt"
        with log.open("w") as file:
            for flags in self.commands():
                launch(flags, file)
        # A checkpoint between two stages is large, and nobody needs it any more.
        shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
        told = {"way": self.way, "seed": self.seed, "at_once": at_once}
        told["wall_seconds"] = round(time.monotonic() - begin, 1)
        parameters = re.findall(r"number of parameters on .*: (\d+)", log.read_text())
        told["parameters"] = int(parameters[-1])
        told["batch_tokens"] = self.size.batch * self.size.length
        return told


def training_flags(size: Size, data: Path, seed: int) -> list[str]:
    """Return what all ways have in common besides the model's size."""
    # The table wants the time of every step that is evaluated, of the last one, too.
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


def launch(flags: list[str], log) -> None:
    """Train in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; ``log`` says why.
    """
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    places["MASTER_PORT"] = "0"  # whichever is free: several may run at once
    quiet = {"PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    subprocess.run(
        [sys.executable, "-m", "megatron_dsa.pretrain", *flags],
        env=os.environ | places | quiet,
        stdout=log,
        stderr=subprocess.STDOUT,
        check=True,
    )


def make_start(folder: Path, size: Size, data: Path, seed: int) -> None:
    """Save the weights that the dense model of a seed starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*f"{size.model} {size.mla}".split(), *training_flags(size, data, seed)]
    flags += ["--dsa-stage", "dense"]
    # Megatron saves nothing before a step: one that changes nothing.
    flags += ["--lr", "0", "--min-lr", "0", "--exit-interval", "1", "--no-save-optim"]
    flags += ["--eval-iters", "0"]
    flags += ["--save", str(folder), "--save-interval", str(size.steps)]
    with (folder / "log.txt").open("w") as log:
        launch(flags, log)


def train_all(output: Path, size: Size, ways: list[str], seeds: list[int], at_once: int) -> None:
    """Train every way with every seed, ``at_once`` of them side by side, and print how it went."""
    import torch

    from benchmarks.measure import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    told = environment(device) | prepare_text(output / "data", size.held_out_bytes)
    told["sizes"] = asdict(size)
    (output / "environment.json").write_text(json.dumps(told, indent=1))
    starts = {seed: output / "start" / str(seed) for seed in seeds}
    if set(ways) != {"hybrid"}:
        for seed, folder in starts.items():
            make_start(folder, size, output / "data", seed)

    def train(run: Run) -> tuple[Run, str]:
        try:
            result = run.train(at_once)
        except subprocess.CalledProcessError:
            lines = (run.folder / "log.txt").read_text().splitlines()
            return run, "failed:\n" + "\n".join(lines[-15:])
        (run.folder / "run.json").write_text(json.dumps(result))
        return run, f"{result['wall_seconds']} s"

    runs = [
        Run(way, seed, output / f"{way}-seed{seed}", starts[seed], output / "data", size)
        for seed in seeds
        for way in ways
    ]
    with ThreadPoolExecutor(at_once) as pool:
        for run, said in pool.map(train, runs):
            print(f"{run.way}, seed {run.seed}: {said}", flush=True)
    shutil.rmtree(output / "data")
    shutil.rmtree(output / "start", ignore_errors=True)  # a hybrid model has none


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs side by side; their times mean nothing then"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny dims and few steps, for a CPU")
    parser.add_argument("--steps", type=int, help="optimizer steps (300), evaluated 12 times")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else SMALL
    if arguments.steps is not None:
        if arguments.steps < 24:
            parser.error("--steps must be at least 24: two for each of the 12 evaluations")
        size = replace(size, steps=arguments.steps, every=arguments.steps // 12)
    train_all(arguments.output, size, arguments.ways, arguments.seeds, arguments.at_once)


if __name__ == "__main__":
    main()
