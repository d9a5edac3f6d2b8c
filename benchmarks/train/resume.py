"""Interrupted and resumed training, compared with uninterrupted training.

Models on the bytes of Python's documentation, by ``examples/train_bf16.sh``. Ways: ``fast``, with
the fastest kernels; ``straight``, in Megatron's deterministic mode; ``resumed``, the same in two
processes, the second from the first's checkpoint at half of the steps. The logs of the last two
must agree to the bit.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.train.models import TINY, TINY_HYBRID, launch

SCRIPT = Path(__file__).parents[2] / "examples/train_bf16.sh"
#: The script's learning rate; Megatron requires longer runs.
WARM_UP_STEPS = 5
WAYS = ("fast", "straight", "resumed")
#: Metric -> tag in the event files.
LOGGED = {
    "lm_loss": "lm loss",
    "indexer_loss": "dsa/indexer-loss",
    "grad_norm": "grad-norm",
    "mass_captured": "dsa/mass-captured",
}

#: Flags in addition to the script's.
MODELS = {
    "v3.2": (
        "--num-layers 4 --seq-length 8192 --max-position-embeddings 8192 --dsa-indexer-topk 2048 "
        "--dsa-selected-attention sparse"
    ),
    "v4": (
        "--num-layers 4 --seq-length 2048 --max-position-embeddings 2048 --hidden-size 1024 "
        "--ffn-hidden-size 2816 --q-lora-rank 512 --kv-lora-rank 448 --qk-head-dim 448 "
        "--v-head-dim 512 --csa-compress-ratios 0 4 128 4 --csa-window-size 128 "
        "--csa-compress-rotary-base 10000 --o-groups 8 --o-lora-rank 256 --dsa-indexer-topk 128 "
        "--dsa-indexer-rope-interleaved"
    ),
}
_SHORT = "--seq-length 64 --max-position-embeddings 64 --global-batch-size 1 --dsa-indexer-topk 12"
#: Flags of tiny models with the same attention, for a CPU.
TINY_MODELS = {"v3.2": f"{TINY} {_SHORT}", "v4": f"{TINY} {TINY_HYBRID} {_SHORT}"}


@dataclass(frozen=True)
class Trial:
    """One model in one folder, for ``steps`` steps."""

    flags: str
    folder: Path
    steps: int

    def run(self, way: str) -> Iterator[tuple[str, dict]]:
        """Train; yield the result of every step, and ``all`` with the peak memory.

        Raises:
            RuntimeError: training failed.
        """
        if way == "resumed":
            self.in_two_parts()
        else:
            self.train(way, *([] if way == "fast" else ["--deterministic-mode"]))
        yield from self.results(way)

    def train(self, name: str, *flags: str) -> None:
        """Run the script, with event files in folder ``name``.

        Raises:
            RuntimeError: it failed; the text is the end of its log.
        """
        run = self.folder / name
        fixed = [*self.flags.split(), "--train-iters", str(self.steps), "--log-interval", "1"]
        fixed += ["--tensorboard-dir", str(run / "events"), "--log-timers-to-tensorboard", *flags]
        if torch.cuda.is_available():
            fixed.append("--log-memory-to-tensorboard")
        launch([str(SCRIPT), *fixed], run / "log.txt", PYTHON=sys.executable, RUN_DIR=str(run))

    def in_two_parts(self) -> None:
        """Train in two processes, half of the steps each."""
        checkpoint = self.folder / "checkpoint"
        both = ["--deterministic-mode", "--save", str(checkpoint)]
        both += ["--save-interval", str(self.steps)]
        self.train("resumed", *both, "--exit-interval", str(self.steps // 2))
        self.train("resumed", *both, "--load", str(checkpoint))
        shutil.rmtree(checkpoint)

    def results(self, way: str) -> Iterator[tuple[str, dict]]:
        """Yield the logged results in folder ``way``."""
        from megatron_dsa.extras.report.events import read_run

        scalars = read_run(way, self.folder / way / "events").scalars
        logged = {metric: dict(scalars.get(tag, ())) for metric, tag in LOGGED.items()}
        times = dict(scalars["iteration-time"])
        for step in sorted(logged["lm_loss"]):
            result = {metric: values.get(step) for metric, values in logged.items()}
            # Deterministic kernels are slow; Megatron omits the first step.
            if way == "fast" and step in times:
                result["ms"] = 1e3 * times[step]
            yield str(step), {"status": "ok", **result}
        memory = dict(scalars.get("mem-max-allocated-bytes", ()))
        if memory:
            yield "all", {"status": "ok", "peak_mib": max(memory.values()) / 2**20}


def differences(straight: dict[str, dict], resumed: dict[str, dict]) -> list[str]:
    """Return where a resumed run's log differs from the straight one.

    ``straight``, ``resumed``: step -> result.

    Raises:
        ValueError: they logged different steps.
    """
    if not straight or straight.keys() != resumed.keys():
        raise ValueError(f"steps {sorted(straight)} and, resumed, {sorted(resumed)}")
    return [
        f"step {step}: {metric} {straight[step].get(metric)}, resumed {resumed[step].get(metric)}"
        for step in straight
        for metric in LOGGED
        if straight[step].get(metric) != resumed[step].get(metric)
    ]
