"""Trains, stops, goes on, and compares with training that was never stopped.

    python -m benchmarks.resume --output runs/resume

Two models on the bytes of Python's documentation, 50 steps each, by ``examples/train_bf16.sh``:
V3.2's attention (4 layers, 64 heads, 8192 tokens) and V4's (4 layers, 64 heads, 2048 tokens). First
each on its own, with the fastest kernels: step time and peak memory. Then in Megatron's
deterministic mode, the models side by side: once straight through, and once in two processes, the
second from the checkpoint that the first left at half of the steps. All that they log has to be the
same to the bit. What is complete in the folder is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

OUTPUT = Path(__file__).with_suffix(".csv")
ENVIRONMENT = "environment.json"
SCRIPT = Path(__file__).parents[1] / "examples/train_bf16.sh"
#: Columns and what they are called in the event files.
LOGGED = {
    "lm_loss": "lm loss",
    "indexer_loss": "dsa/indexer-loss",
    "grad_norm": "grad-norm",
    "mass_captured": "dsa/mass-captured",
}
COLUMNS = (
    "date", "model", "mode", "run", "iteration", "ms_per_iteration", *LOGGED, "peak_allocated_mib",
    "gpu", "torch", "megatron_core", "tilelang", "flash_mla", "cudnn_frontend",
)  # fmt: skip

#: Flags on top of the script's own.
MODELS = {
    "v3.2": (
        "--num-layers 4 --seq-length 8192 --max-position-embeddings 8192 --dsa-indexer-topk 2048"
    ),
    "v4": (
        "--num-layers 4 --seq-length 2048 --max-position-embeddings 2048 --hidden-size 1024 "
        "--ffn-hidden-size 2816 --q-lora-rank 512 --kv-lora-rank 448 --qk-head-dim 448 "
        "--v-head-dim 512 --csa-compress-ratios 0 4 128 4 --csa-window-size 128 "
        "--csa-compress-rotary-base 10000 --o-groups 8 --o-lora-rank 256 --dsa-indexer-topk 128 "
        "--dsa-indexer-rope-interleaved"
    ),
}
#: Of the same kinds, for a trial on a CPU.
TINY = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --q-lora-rank 32 "
    "--seq-length 64 --max-position-embeddings 64 --global-batch-size 1 --kv-lora-rank 32 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 "
    "--dsa-indexer-topk 12 "
)
TINY_MODELS = {
    "v3.2": TINY + "--v-head-dim 16",
    "v4": TINY
    + (
        "--v-head-dim 24 --csa-compress-ratios 0 4 16 4 --csa-window-size 16 --o-groups 2 "
        "--o-lora-rank 16 --csa-compress-rotary-base 10000 --dsa-indexer-rope-interleaved"
    ),
}


@dataclass(frozen=True)
class Trial:
    """One model in one folder; ``steps`` in all."""

    model: str
    flags: str
    folder: Path
    steps: int

    def train(self, name: str, *flags: str) -> None:
        """Run the script; its event files go to folder ``name``.

        Raises:
            RuntimeError: it failed; the text is the end of its log.
        """
        run = self.folder / name
        run.mkdir(parents=True, exist_ok=True)
        fixed = [*self.flags.split(), "--train-iters", str(self.steps), "--log-interval", "1"]
        fixed += ["--tensorboard-dir", str(run / "events"), "--log-timers-to-tensorboard", *flags]
        if torch.cuda.is_available():
            fixed.append("--log-memory-to-tensorboard")
        places = {"PYTHON": sys.executable, "RUN_DIR": str(run), "MASTER_PORT": "0"}
        with (run / "log.txt").open("a") as log:
            done = subprocess.run(
                [str(SCRIPT), *fixed],
                env=os.environ | places, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if done.returncode:
            lines = (run / "log.txt").read_text().splitlines()[-15:]
            raise RuntimeError(f"{self.model}, {name}: " + "\n".join(lines))

    def alone(self) -> None:
        """Train with the fastest kernels."""
        self.once("fast", lambda: self.train("fast"))

    def interrupted(self) -> None:
        """Train in deterministic mode, straight through and with a stop at half of the steps."""
        self.once("straight", lambda: self.train("straight", "--deterministic-mode"))
        self.once("resumed", self.in_two_parts)

    def in_two_parts(self) -> None:
        """Train half of the steps in a process, and the rest in another."""
        checkpoint = self.folder / "checkpoint"
        both = ["--deterministic-mode", "--save", str(checkpoint)]
        both += ["--save-interval", str(self.steps)]
        self.train("resumed", *both, "--exit-interval", str(self.steps // 2))
        self.train("resumed", *both, "--load", str(checkpoint))
        shutil.rmtree(checkpoint)

    def once(self, name: str, train: Callable[[], None]) -> None:
        """Fill folder ``name``, unless that is done."""
        done = self.folder / f"{name}.done"
        if not done.exists():
            for left in (name, "checkpoint"):
                shutil.rmtree(self.folder / left, ignore_errors=True)
            train()
            done.touch()

    def rows(self, name: str) -> list[dict]:
        """Return a row per step of the runs in folder ``name``."""
        from megatron_dsa.tools.report.events import read_run

        scalars = read_run(name, self.folder / name / "events").scalars
        times = dict(scalars["iteration-time"])
        logged = {column: dict(scalars.get(tag, ())) for column, tag in LOGGED.items()}
        memory = dict(scalars.get("mem-max-allocated-bytes", ()))
        rows = []
        for step in sorted(logged["lm_loss"]):
            row = {"model": self.model, "iteration": step}
            row["mode"] = "fast" if name == "fast" else "deterministic"
            row["run"] = "resumed" if name == "resumed" else "straight"
            # The others went side by side; Megatron leaves out the first.
            if name == "fast" and step in times:
                row["ms_per_iteration"] = round(1e3 * times[step], 1)
            # All digits of fp32, as the event files hold them.
            row |= {column: f"{values[step]:.9g}" for column, values in logged.items()}
            if memory:
                row["peak_allocated_mib"] = round(memory[step] / 2**20, 2)
            rows.append(row)
        return rows


def differences(rows: list[dict]) -> list[str]:
    """Return where a resumed run logged something else than the straight one.

    Raises:
        ValueError: they did not log the same steps.
    """
    straight, resumed = (
        {
            row["iteration"]: row
            for row in rows
            if (row["mode"], row["run"]) == ("deterministic", run)
        }
        for run in ("straight", "resumed")
    )
    if not straight or straight.keys() != resumed.keys():
        raise ValueError(f"steps {sorted(straight)} and, resumed, {sorted(resumed)}")
    return [
        f"step {step}: {column} {straight[step][column]}, resumed {resumed[step][column]}"
        for step in straight
        for column in LOGGED
        if straight[step][column] != resumed[step][column]
    ]


def main(argv: list[str] | None = None) -> int:
    """Train all, write the CSV, say what came of it; return 1 if a resumed run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--csv", type=Path, default=OUTPUT)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="tiny models in fp32, for a CPU")
    options = parser.parse_args(argv)
    models = TINY_MODELS if options.tiny else MODELS
    folder = options.output.resolve()
    trials = [Trial(name, models[name], folder / name, options.steps) for name in options.models]
    note_environment(folder)
    for trial in trials:
        trial.alone()
    with ThreadPoolExecutor(len(trials)) as pool:
        list(pool.map(Trial.interrupted, trials))
    rows, differ = [], 0
    for trial in trials:
        mine = [row for name in ("fast", "straight", "resumed") for row in trial.rows(name)]
        rows += mine
        fast = [row for row in mine if row["mode"] == "fast"]
        usual = statistics.median(row["ms_per_iteration"] for row in fast[3:])  # compiled by then
        found = differences(mine)
        differ += len(found)
        print(
            f"{trial.model}: loss {fast[0]['lm_loss']}, {fast[-1]['lm_loss']}; {usual:.1f} ms per "
            f"step, peak {fast[-1].get('peak_allocated_mib')} MiB; resumed: "
            + ("equal to the bit" if not found else "; ".join(found[:5]))
        )
    write(options.csv, rows, json.loads((folder / ENVIRONMENT).read_text()))
    return int(differ > 0)


def note_environment(folder: Path) -> None:
    """Write down what runs are measured on; all runs of a folder have to be on the same.

    Raises:
        ValueError: some were not.
    """
    from benchmarks.measure import environment
    from megatron_dsa.versions import installed_version

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = environment(device) | {"megatron_core": installed_version("megatron-core")}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ENVIRONMENT
    if file.exists():
        before = json.loads(file.read_text())
        differ = [name for name in here if name in COLUMNS and here[name] != before.get(name)]
        if differ:
            raise ValueError(f"{folder} holds runs with another {', '.join(differ)}")
    file.write_text(json.dumps(here))


def write(path: Path, rows: list[dict], facts: dict) -> None:
    """Write rows with what they were measured on."""
    facts = facts | {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(facts | row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
