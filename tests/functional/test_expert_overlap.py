"""Megatron's interleaved schedule of two microbatches equals its plain schedule."""

import pytest

from tests.functional.launch import train
from tests.functional.parallel_flags import PACKED, SMALL_V4

pytestmark = pytest.mark.ranks(2)
OVERLAP = {"--overlap-moe-expert-parallel-comm": True}
MODEL = {
    "--bf16": True,
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-layer-freq": "[0,1]",
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-router-load-balancing-type": "none",
    "--expert-model-parallel-size": 2,
    "--micro-batch-size": 1,
    "--train-iters": 3,
}
SELECTIVE = {
    "--recompute-granularity": "selective",
    "--recompute-modules": ["core_attn", "mla_up_proj"],
}
CHANGES = {
    "DSA, selective recompute": SELECTIVE,
    "V4, distributed optimizer": SMALL_V4
    | {"--use-distributed-optimizer": True, "--overlap-grad-reduce": True},
    "packed": PACKED,
    "index sharing": {"--dsa-indexer-topk-freq": 2, "--dsa-indexer-skip-topk-offset": 1},
    # fp16 has three more bits: in bf16 the order of a sum moves the indexers' loss by 2e-3.
    "multi-token prediction": {
        "--mtp-num-layers": 1,
        "--bf16": None,
        "--fp16": True,
        "--loss-scale": 1024,
    },
    "warm-up": {
        "--dsa-stage": "warmup",
        "--dsa-warmup-train-all": True,
        "--dsa-indexer-use-sparse-loss": None,
    },
}


def figures(run):
    names = ("lm loss", "indexer loss", "mtp_1 loss", "grad norm")
    return [[step.get(name) for name in names] for step in run.steps]


@pytest.mark.parametrize("change", CHANGES)
def test_the_interleaved_schedule_computes_the_same(change, data, short_documents):
    flags = MODEL | CHANGES[change]
    flags |= {"--data-path": short_documents if "packed" in change else data}
    plain, got = train(flags, ranks=2), train(flags | OVERLAP, ranks=2)
    assert len(got.steps) == 3
    first, *rest = figures(got)
    expected, *others = figures(plain)
    assert first == expected
    if "--mtp-num-layers" in flags:
        # Gradients of two branches are added in another order.
        others = [pytest.approx(step, rel=2e-4) for step in others]
    assert rest == others
    assert got.steps[0]["indexer loss"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"--expert-model-parallel-size": 1}, "only supported with expert model parallelism"),
        ({"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}, "in a frozen warm-up"),
        ({"--hc-mult": 4}, "--hc-mult must be 1 with --overlap-moe-expert-parallel-comm"),
        ({"--delay-wgrad-compute": True}, "only supported with transformer_engine"),
    ],
)
def test_what_is_refused(change, reason, data):
    run = train(MODEL | OVERLAP | change | {"--data-path": data}, ranks=2, check=False)
    assert run.returncode and not run.steps and reason in run.log
