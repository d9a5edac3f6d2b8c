"""Comparisons of training runs: steps, gradients, curves, resumed runs."""

import pytest

from tests.functional.checkpoint_reader import read
from tests.functional.launch import train
from tests.helpers import relative_error

TOLERANCE = 2e-5
HEALTH = ("dsa attention mass captured", "dsa query overlap")


def layout_cases(layouts):
    """Return a test's parameters: layouts, each marked with its number of ranks."""
    return [pytest.param(n, marks=pytest.mark.ranks(x[1])) for n, x in layouts.items()]


def check_layout(name, layout, expected, one_step):
    """Take a step in another layout and compare it with one process."""
    got = one_step(*layout)
    compare(got, expected, TOLERANCE)
    # Ranks with other tokens draw other samples; selections are sampled in a rank's first
    # microbatch.
    if not any(word in name for word in ("microbatch", "by sequence", "CP2", "DP2")):
        for figure in HEALTH:
            assert got[0][figure] == pytest.approx(expected[0][figure], rel=1e-4), figure


def compare(got, expected, tolerance):
    step, gradients, _ = got
    expected_step, expected_gradients, _ = expected
    mtp = tuple(name for name in expected_step if name.startswith("mtp_"))
    for figure in ("lm loss", "indexer loss", "grad norm", *mtp):
        assert step[figure] == pytest.approx(expected_step[figure], rel=1e-4), figure
    assert set(gradients) == set(expected_gradients)
    errors = {n: relative_error(g, expected_gradients[n]) for n, g in gradients.items()}
    beyond = {name: error for name, error in errors.items() if not error < tolerance}
    assert not beyond, beyond


def compare_curves(got, expected):
    assert len(got.steps) == len(expected.steps) > 1
    for figure in ("lm loss", "indexer loss", "grad norm"):
        assert got.column(figure) == pytest.approx(expected.column(figure), rel=1e-4), figure


def check_resume(flags, folder, ranks=1):
    """Check that six steps equal three, a checkpoint and three more, to the bit; return the
    state.
    """
    # Dropout tests the random state.
    flags = flags | {"--train-iters": 6, "--save-interval": 3, "--hidden-dropout": 0.1}
    flags |= {"--deterministic-mode": True}
    whole = train(flags | {"--save": folder / "whole"}, ranks=ranks)
    train(flags | {"--save": folder / "part", "--exit-interval": 3}, ranks=ranks)
    rest = train(flags | {"--save": folder / "part", "--load": folder / "part"}, ranks=ranks)
    assert [step["iteration"] for step in rest.steps] == [4, 5, 6]
    for name in ("lm loss", "indexer loss", "grad norm"):
        assert rest.column(name) == whole.column(name)[3:], name
    expected, state = read(folder / "whole"), read(folder / "part")
    assert set(state) == set(expected)
    for name, tensor in state.items():
        assert tensor.equal(expected[name]), name
    return state
