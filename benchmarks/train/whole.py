"""The same training of a whole DeepSeek-V4 with fused kernels and in torch, step by step.

Ways: ``fused``; ``unfused``, by ``--attention-backend dsa_unfused``; ``fused again``. All have the
same model, text, order, schedule and seed. ``fused again`` shows the effect of the order of atomic
sums.
"""

import dataclasses

from benchmarks.train.convergence import SPARSE_LOSS, TINY, Size, training_flags, with_steps
from benchmarks.train.selected import SameTraining

#: Way -> its attention backend.
WAYS = {"fused": "dsa_fused", "unfused": "dsa_unfused", "fused again": "dsa_fused"}
#: Everything that DeepSeek-V4 has around its attention, in any width.
AROUND = (
    "--hc-mult 4 --mtp-num-layers 1 --moe-hash-layers 1 --moe-router-score-function sqrtsoftplus "
    "--moe-router-topk-scaling-factor 1.5 --moe-router-load-balancing-type none "
    "--moe-router-enable-expert-bias --activation-func-clamp-value 10 --no-bias-swiglu-fusion"
)
#: Four layers of DeepSeek-V4-Flash's width, and one that predicts one more token; few experts.
MEASURED = dataclasses.replace(
    TINY,
    model=(
        "--num-layers 4 --hidden-size 4096 --num-attention-heads 64 --q-lora-rank 1024 --bf16 "
        "--num-experts 8 --moe-router-topk 6 --moe-ffn-hidden-size 1024 "
        f"--moe-shared-expert-intermediate-size 1024 --ffn-hidden-size 1024 {AROUND}"
    ),
    hybrid=(
        "--kv-lora-rank 448 --qk-head-dim 448 --qk-pos-emb-head-dim 64 --v-head-dim 512 "
        "--csa-compress-ratios 0 4 128 4 0 --csa-window-size 128 "
        "--csa-compress-rotary-base 160000 --o-groups 8 --o-lora-rank 1024 "
        "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 512 "
        "--dsa-indexer-rope-interleaved"
    ),
    batch=1,
    length=2048,
    held_out_bytes=40_000,
    evaluations=4,
    steps=200,
    every=200,
)
QUICK = dataclasses.replace(
    TINY,
    model=(
        f"{TINY.model} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
        f"--moe-shared-expert-intermediate-size 16 {AROUND}"
    ),
    hybrid=TINY.hybrid.replace("ratios 0 4 16", "ratios 0 4 16 0"),
    every=12,
)


def size_of(quick: bool, steps: int | None) -> Size:
    """Return the size of the model.

    Raises:
        ValueError: too few steps.
    """
    size = with_steps(QUICK if quick else MEASURED, steps)
    return dataclasses.replace(size, every=size.steps)


class SameModel(SameTraining):
    """All runs of one seed, in one folder; the text is written once."""

    def flags(self, way: str) -> list[str]:
        size = self.size
        flags = f"{size.model} {size.hybrid}".split()
        flags += [*training_flags(size, self.folder / "data", self.seed), *SPARSE_LOSS]
        flags += ["--tensorboard-dir", str(self.folder / way / "events"), "--log-interval", "1"]
        return [*flags, "--attention-backend", WAYS[way]]
