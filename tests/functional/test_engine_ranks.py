"""transformer-engine's layers on two ranks train like one rank, in bf16 and FP8.

In bf16 losses are compared with local layers on as many ranks, which also round partial sums.
"""

import pytest

from tests.functional.checkpoint_reader import gradients_of_first_step
from tests.functional.engine import (
    BOUNDS,
    ENGINE,
    LOCAL,
    MARKS,
    MODELS,
    PRECISIONS,
    check_gradients,
    check_losses,
    noise_of,
    run,
)
from tests.functional.launch import train
from tests.functional.parallel_flags import CP2, TP2_HEADS, TP2_SEQUENCE

pytestmark = [*MARKS, pytest.mark.ranks(2)]
EP2 = {"--expert-model-parallel-size": 2}
MASKED = {"--dsa-selected-attention": "masked"}
#: Name: model of engine.py, flags of both runs, flags of two ranks.
LAYOUTS = {
    "DSA, TP2 by heads": ("DSA", {}, TP2_HEADS),
    "DSA, TP2 by sequence": ("DSA", {}, TP2_SEQUENCE),
    "DSA masked, TP2 by select": ("DSA", MASKED, TP2_HEADS | {"--dsa-tp-mode": "select"}),
    "DSA, CP2": ("DSA", {}, CP2),
    "DSA masked, CP2": ("DSA", MASKED, CP2),
    "V4, TP2 by sequence": ("V4", {}, TP2_SEQUENCE),
    "V4, CP2": ("V4", {}, CP2),
    "experts, EP2 over DP2": ("experts", {}, EP2),
    "experts, TP2 by heads, EP2": (
        "experts", {}, TP2_HEADS | EP2 | {"--expert-tensor-parallel-size": 1},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def single(started):
    """Return flags, run and noise of one rank."""
    runs = {}

    def run_of(model, changes, precision):
        key = (model, *changes.items(), precision)
        if key not in runs:
            flags = started(MODELS[model]) | changes
            once = run(flags, ENGINE, precision)
            runs[key] = flags, once, noise_of(once, run(flags, ENGINE, precision))
        return runs[key]

    return run_of


@pytest.mark.parametrize("precision", ["bf16", "tensorwise"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses(name, precision, single):
    model, changes, layout = LAYOUTS[name]
    flags, one, noise = single(model, changes, precision)
    two = train(flags | ENGINE | PRECISIONS[precision] | layout, ranks=2)
    expected = one
    if precision == "bf16":
        expected = train(flags | LOCAL | PRECISIONS[precision] | layout, ranks=2)
    check_losses(two, expected, BOUNDS[model, precision], noise)
    assert two.steps[-1]["lm loss"] < two.steps[0]["lm loss"]
    assert two.steps[0]["indexer loss"] == pytest.approx(one.steps[0]["indexer loss"], rel=2e-2)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n.startswith("DSA")] + ["V4, CP2"])
def test_gradients_of_the_first_step(name, single, tmp_path):
    model, changes, layout = LAYOUTS[name]
    flags = single(model, changes, "bf16")[0] | ENGINE | {"--clip-grad": 0.0}
    found = []
    for ranks, more in ((1, {}), (2, layout)):
        folder = tmp_path / str(ranks)
        step = {"--train-iters": 1, "--save": folder, "--save-interval": 1}
        train(flags | PRECISIONS["bf16"] | step | more, ranks=ranks)
        found.append(gradients_of_first_step(folder))
    one, two = found
    check_gradients(name, two, one)
