"""Resumed runs with transformer-engine's layers, also switching to local layers and back."""

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
    noise_of,
    relative_differences,
    run,
)

pytestmark = MARKS
TOTAL, HALF = 6, 3


@pytest.fixture(scope="module")
def whole(started):
    """Return six uninterrupted steps by layers and precision, and the noise of two such runs."""
    runs = {}

    def run_of(layers, precision):
        key = (layers["--transformer-impl"], precision)
        if key not in runs:
            flags = started(DSA) | {"--train-iters": TOTAL}
            once = run(flags, layers, precision)
            runs[key] = once, noise_of(once, run(flags, layers, precision))
        return runs[key]

    return run_of


@pytest.fixture
def continued(started, tmp_path):
    """Train three steps, save, and train three more with other layers or precision."""

    def train(first, second, **settings):
        saved = {"--save": tmp_path, "--save-interval": HALF, "--train-iters": TOTAL}
        flags = started(DSA) | saved
        run(flags | {"--exit-interval": HALF}, *first)
        return run(flags | {"--load": tmp_path, "--finetune": None}, *second, **settings)

    return train


def check_continues(rest, expected, bound):
    """Check the steps after the restart; a restarted optimizer would cost 30 % and more."""
    assert [step["iteration"] for step in rest.steps] == [4, 5, 6]
    assert "the optimizer starts anew" not in rest.log
    whole, noise = expected
    differences = relative_differences(rest.column("lm loss"), whole.column("lm loss")[HALF:])
    print(f"differences by step (noise {noise:.1e}):", " ".join(f"{x:.1e}" for x in differences))
    bound = max(bound, 2 * noise)
    assert differences[0] <= bound and differences[2] <= bound, (differences, noise)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume(precision, continued, whole):
    kind = (ENGINE, precision)
    rest = continued(kind, kind, env=ALLOW_PICKLE)
    check_continues(rest, whole(*kind), BOUNDS["DSA", precision].later)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_from_transformer_engine_to_local(precision, continued, whole):
    kind = (ENGINE, precision)
    rest = continued(kind, (LOCAL, "bf16"))
    check_continues(rest, whole(*kind), BOUNDS["DSA", precision].later)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_from_local_to_transformer_engine(precision, continued, whole):
    rest = continued((LOCAL, "bf16"), (ENGINE, precision))
    check_continues(rest, whole(LOCAL, "bf16"), BOUNDS["DSA", precision].later)


@pytest.mark.parametrize("other", ["bf16", "tensorwise", "blockwise"])
def test_from_fp8_to_another_precision(other, continued, whole):
    kind = (ENGINE, "delayed")
    rest = continued(kind, (ENGINE, other), env=ALLOW_PICKLE)
    bound = max(BOUNDS["DSA", name].later for name in ("delayed", other))
    check_continues(rest, whole(*kind), bound)


def test_pickled_scaling_factors_are_refused_with_the_fix(continued):
    kind = (ENGINE, "delayed")
    rest = continued(kind, kind, check=False)
    assert rest.returncode != 0 and not rest.steps
    assert "error: the checkpoint of --load was written with --fp8-recipe delayed" in rest.log
    assert set(FP8) < set(PRECISIONS)
