"""CUDA graphs of transformer-engine's layers: equal losses in bf16 and FP8."""

import pytest

from tests.functional.engine import (
    BOUNDS,
    DSA,
    ENGINE,
    MARKS,
    PRECISIONS,
    V4,
    check_losses,
    noise_of,
    run,
)
from tests.functional.launch import train

pytestmark = MARKS
ATTENTION = {"--cuda-graph-modules": "attn"}
GRAPHS = {
    "layers": {"--cuda-graph-impl": "local"},
    "attention": {"--cuda-graph-impl": "local"} | ATTENTION,
    "transformer-engine's": {"--cuda-graph-impl": "transformer_engine"} | ATTENTION,
    "iteration": {
        "--cuda-graph-impl": "full_iteration",
        "--no-check-for-nan-in-loss-and-grad": True,
    },
}
#: Graphs of layers omit these figures.
STEPS = {"--train-iters": 12, "--dsa-health-tokens": 0}
#: Layers 1, 2 and 4 select; layer 3 reuses layer 2's selection.
SHARING = DSA | {"--dsa-indexer-topk-freq": 2, "--dsa-indexer-skip-topk-offset": 2}


@pytest.fixture(scope="module")
def uncaptured(started):
    """Return flags, run and noise of a model in a precision."""
    runs = {}

    def run_of(name, model, precision, steps=STEPS):
        if (name, precision) not in runs:
            flags = started(model) | steps
            once = run(flags, ENGINE, precision)
            runs[name, precision] = flags, once, noise_of(once, run(flags, ENGINE, precision))
        return runs[name, precision]

    return run_of


def check(name, model, graphs, precision, uncaptured):
    flags, plain, noise = uncaptured(name, model, precision)
    # Megatron keeps one record of graphs per process.
    got = train(flags | ENGINE | PRECISIONS[precision] | GRAPHS[graphs])
    assert "CUDA graphs (" in got.log
    check_losses(got, plain, BOUNDS[name, "bf16"], noise)


@pytest.mark.parametrize("precision", ["bf16", "tensorwise"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_losses(graphs, precision, uncaptured):
    check("DSA", DSA, graphs, precision, uncaptured)


@pytest.mark.parametrize("graphs", ["layers", "transformer-engine's"])
def test_losses_of_v4(graphs, uncaptured):
    check("V4", V4, graphs, "bf16", uncaptured)


@pytest.mark.parametrize("graphs", [name for name in GRAPHS if name != "layers"])
def test_fifty_steps_with_index_sharing(graphs, uncaptured):
    steps = STEPS | {"--train-iters": 50}
    flags, plain, noise = uncaptured("index sharing", SHARING, "bf16", steps)
    got = train(flags | ENGINE | GRAPHS[graphs])
    assert "CUDA graphs (" in got.log and len(got.steps) == 50
    check_losses(got, plain, BOUNDS["DSA", "bf16"], noise)
    for name in ("indexer loss", "grad norm"):
        assert got.column(name) == pytest.approx(plain.column(name), rel=1e-2), name
