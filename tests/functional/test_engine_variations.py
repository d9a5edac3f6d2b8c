"""transformer-engine's layers in other stages, batches and recomputations, compared with local
layers.
"""

import pytest

from tests.functional.engine import (
    BOUNDS,
    ENGINE,
    LOCAL,
    MARKS,
    MODELS,
    check_losses,
    noise_of,
    run,
)
from tests.functional.parallel_flags import FULL_RECOMPUTE, PACKED

pytestmark = MARKS
SELECTIVE = {
    "--recompute-granularity": "selective",
    "--recompute-modules": ["core_attn", "mla_up_proj", "mlp", "layernorm"],
}
#: Megatron cannot recompute norms with delayed scaling.
SELECTIVE_DELAYED = SELECTIVE | {"--recompute-modules": ["core_attn", "mla_up_proj", "mlp"]}
OVERLAP = {
    "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
}
#: Changes of the training, for both runs.
CHANGES = {
    "plain": {},
    "dense": {"--dsa-stage": "dense"},
    "warmup": {
        "--dsa-stage": "warmup",
        "--dsa-indexer-use-sparse-loss": None,
        # Only indexers learn; at 1e-3 their loss rises.
        "--lr": 3e-4,
        "--min-lr": 3e-4,
    },
    "masked": {"--dsa-selected-attention": "masked"},
    "index sharing": {"--dsa-indexer-topk-freq": 2, "--dsa-indexer-skip-topk-offset": 1},
    "packed": PACKED,
}
#: Changes of the computation only, not in the local run.
WAYS = {
    "full recompute": FULL_RECOMPUTE,
    "selective recompute": SELECTIVE,
    "distributed optimizer with overlap": OVERLAP,
}


@pytest.fixture(scope="module")
def start(started):
    """Return flags of a start from a few steps of training."""

    def flags_of(name, change):
        # A checkpoint must match the layers with indexers.
        layers = CHANGES[change] if change == "index sharing" else {}
        return started(MODELS[name] | layers) | CHANGES[change]

    return flags_of


@pytest.fixture(scope="module")
def local(start, short_documents):
    """Return flags, run and noise of a change with local layers."""
    runs = {}

    def run_of(name, change):
        if (name, change) not in runs:
            flags = start(name, change)
            if change == "packed":
                flags |= {"--data-path": short_documents}
            once = run(flags, LOCAL)
            runs[name, change] = flags, once, noise_of(once, run(flags, LOCAL))
        return runs[name, change]

    return run_of


@pytest.mark.parametrize("precision", ["bf16", "blockwise"])
@pytest.mark.parametrize("change", [name for name in CHANGES if name != "plain"])
def test_changes(change, precision, local):
    flags, expected, noise = local("DSA", change)
    got = run(flags, ENGINE, precision)
    check_losses(got, expected, BOUNDS["DSA", precision], noise)
    if change == "warmup":
        for each in (got, expected):
            print("indexer loss:", *(f"{step['indexer loss']:.2e}" for step in each.steps))
        assert got.steps[-1]["indexer loss"] < got.steps[0]["indexer loss"]


@pytest.mark.parametrize("precision", ["bf16", "tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("way", WAYS)
def test_ways(way, precision, local):
    flags, expected, noise = local("DSA", "plain")
    changes = WAYS[way]
    if (way, precision) == ("selective recompute", "delayed"):
        changes = SELECTIVE_DELAYED
    got = run(flags | changes, ENGINE, precision)
    check_losses(got, expected, BOUNDS["DSA", precision], noise)


@pytest.mark.parametrize("precision", ["bf16", "blockwise"])
@pytest.mark.parametrize("way", ["full recompute", "selective recompute"])
def test_ways_of_v4(way, precision, local):
    flags, expected, noise = local("V4", "plain")
    got = run(flags | WAYS[way], ENGINE, precision)
    check_losses(got, expected, BOUNDS["V4", precision], noise)


@pytest.mark.parametrize("name", ["DSA", "V4", "experts"])
def test_fused_gradient_accumulation(name, start):
    flags = start(name, "plain") | {"--global-batch-size": 16}
    plain = run(flags, ENGINE)
    noise = noise_of(plain, run(flags, ENGINE))
    got = run(flags, ENGINE | {"--no-gradient-accumulation-fusion": None})
    check_losses(got, plain, BOUNDS[name, "bf16"], noise)
    assert got.steps[0]["grad norm"] == pytest.approx(plain.steps[0]["grad norm"], rel=1e-2)
