"""A small V4 trained by AdamW, by Megatron's Muon, and by Muon with this package's blocks.

Ways: ``adamw``; ``released``, Megatron's Muon, which treats stacks of output groups and tables of
positions as one matrix; ``groups``, with this package's marks; ``heads``, the same with up
projections and the indexer's queries head by head. All have the same initial weights, text, order,
schedule and learning rate: DeepSeek-V4's scale gives Muon's updates the size of AdamW's.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from benchmarks.train.convergence import SPARSE_LOSS, TINY, Size, train, training_flags, with_steps
from benchmarks.train.selected import LOSSES, results
from benchmarks.train.text import prepare_text
from megatron_dsa.extras.report.events import read_run

#: DeepSeek-V4's Muon, with products of its iteration in fp32 for CPUs.
MUON = [
    *("--optimizer", "muon", "--muon-coefficient-type", "deepseekv4", "--muon-num-ns-steps", "10"),
    *("--muon-momentum", "0.95", "--muon-nesterov", "--muon-extra-scale-factor", "0.18"),
    *("--muon-fp32-matmul-prec", "high"),
]
#: Way -> its flags.
WAYS = {
    "adamw": [],
    "released": MUON,
    "groups": MUON,
    "heads": [*MUON, "--dsa-muon-per-head", "all"],
}
#: Way -> module other than the entry point.
MODULES = {"released": "benchmarks.train.unmarked"}
#: Above larger models' rate, as in the scripts of small ones.
RATE = ["--lr", "3e-3", "--min-lr", "3e-4"]

#: A window layer, two CSA layers and an HCA layer, with hyper-connections.
MEASURED = dataclasses.replace(
    TINY,
    model=(
        "--num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 "
        "--q-lora-rank 64 --hc-mult 4"
    ),
    hybrid=(
        "--kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 48 "
        "--csa-compress-ratios 0 4 16 4 --csa-window-size 32 --csa-compress-rotary-base 10000 "
        "--o-groups 4 --o-lora-rank 32 --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 32 "
        "--dsa-indexer-topk 12 --dsa-indexer-rope-interleaved"
    ),
    batch=4,
    length=256,
    held_out_bytes=40_000,
    evaluations=32,
    steps=200,
    every=50,
)
QUICK = dataclasses.replace(TINY, model=f"{TINY.model} --hc-mult 4", steps=12, every=6)


def size_of(quick: bool, steps: int | None) -> Size:
    """Return the size of the model.

    Raises:
        ValueError: too few steps.
    """
    size = with_steps(QUICK if quick else MEASURED, steps)
    return dataclasses.replace(size, every=min(size.every, size.steps))


class SameStart:
    """All runs of one seed, in one folder; the text is written once."""

    def __init__(self, size: Size, seed: int, folder: Path):
        self.size, self.seed, self.folder = size, seed, folder
        prepare_text(folder / "data", size.held_out_bytes)

    def flags(self, way: str) -> list[str]:
        size = self.size
        flags = f"{size.model} {size.hybrid}".split()
        flags += [*training_flags(size, self.folder / "data", self.seed), *SPARSE_LOSS, *RATE]
        flags += ["--tensorboard-dir", str(self.folder / way / "events"), "--log-interval", "1"]
        return [*flags, *WAYS[way]]

    def train(self, way: str) -> Iterator[tuple[str, dict]]:
        """Train; yield the result of every step, and ``all`` of the run.

        Raises:
            RuntimeError: training failed; the text is the end of its log.
        """
        log, events = self.folder / way / "log.txt", self.folder / way / "events"
        train(self.flags(way), log, MODULES.get(way))
        yield from results(
            read_run(way, events), LOSSES | {"validation_loss": "lm loss validation"}
        )
