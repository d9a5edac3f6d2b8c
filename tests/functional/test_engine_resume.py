"""Runs with transformer-engine's layers resume, and hand over to local layers and back."""

import pytest

from tests.functional.engine import (
    ALLOW_PICKLE,
    BOUNDS,
    DSA,
    ENGINE,
    FP8,
    LOCAL,
    MARKS,
    PRECISIONS,
    relative_differences,
    run,
)

pytestmark = MARKS
TOTAL, HALF = 6, 3


@pytest.fixture(scope="module")
def whole(data):
    """Six steps in one go, by layers and precision."""
    runs = {}

    def run_of(layers, precision):
        key = (layers["--transformer-impl"], precision)
        if key not in runs:
            flags = DSA | {"--data-path": data, "--train-iters": TOTAL}
            runs[key] = run(flags, layers, precision)
        return runs[key]

    return run_of


def continued(data, folder, first, second, **settings):
    """Train three steps, save, and train three more with other layers or in another precision."""
    flags = DSA | {"--data-path": data, "--save": folder, "--save-interval": HALF}
    run(flags | {"--train-iters": TOTAL, "--exit-interval": HALF}, *first)
    return run(flags | {"--train-iters": TOTAL, "--load": folder}, *second, **settings)


def check_continues(rest, expected, bound):
    """Check the steps after the restart; Megatron logs a mean in the second of them.

    An optimizer that had started anew would show: it cost 30 % and more.
    """
    assert [step["iteration"] for step in rest.steps] == [4, 5, 6]
    assert "the optimizer starts anew" not in rest.log
    differences = relative_differences(rest.column("lm loss"), expected.column("lm loss")[HALF:])
    print("differences by step:", " ".join(f"{x:.1e}" for x in differences))
    assert differences[0] <= bound and differences[2] <= bound, differences


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume(precision, data, tmp_path, whole):
    kind = (ENGINE, precision)
    rest = continued(data, tmp_path, kind, kind, env=ALLOW_PICKLE)
    check_continues(rest, whole(*kind), BOUNDS["DSA", precision].later)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_from_transformer_engine_to_local(precision, data, tmp_path, whole):
    """Optimizer included; the scaling factors of FP8 are left behind."""
    kind = (ENGINE, precision)
    rest = continued(data, tmp_path, kind, (LOCAL, "bf16"))
    check_continues(rest, whole(*kind), BOUNDS["DSA", precision].later)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_from_local_to_transformer_engine(precision, data, tmp_path, whole):
    rest = continued(data, tmp_path, (LOCAL, "bf16"), (ENGINE, precision))
    check_continues(rest, whole(LOCAL, "bf16"), BOUNDS["DSA", precision].later)


@pytest.mark.parametrize("other", ["bf16", "tensorwise", "blockwise"])
def test_from_fp8_to_another_precision(other, data, tmp_path, whole):
    """Only delayed scaling saves a state; another recipe does not need it."""
    kind = (ENGINE, "delayed")
    rest = continued(data, tmp_path, kind, (ENGINE, other), env=ALLOW_PICKLE)
    bound = max(BOUNDS["DSA", name].later for name in ("delayed", other))
    check_continues(rest, whole(*kind), bound)


def test_pickled_scaling_factors_are_refused_with_the_fix(data, tmp_path):
    kind = (ENGINE, "delayed")
    rest = continued(data, tmp_path, kind, kind, check=False)
    assert rest.returncode != 0 and not rest.steps
    assert "error: the checkpoint of --load was written with --fp8-recipe delayed" in rest.log
    assert set(FP8) < set(PRECISIONS)
