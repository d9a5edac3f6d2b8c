"""FP8 parameters (``--fp8-param-gather``) train like bf16 parameters with FP8 products."""

import pytest

from tests.functional.engine import (
    ALLOW_PICKLE,
    BOUNDS,
    DSA,
    ENGINE,
    FP8,
    MARKS,
    V4,
    check_losses,
    relative_differences,
    run,
)
from tests.host import unstreamed

pytestmark = MARKS
DISTRIBUTED = {"--use-distributed-optimizer": True}
PARAMETERS = DISTRIBUTED | {"--fp8-param-gather": True}
#: Main parameters from the checkpoint's bf16 weights, not from FP8.
MAIN = {
    "--load-main-params-from-ckpt": True,
    "--no-load-optim": True,
    **dict.fromkeys(unstreamed(), True),
}
WAYS = {
    "sparse": {},
    "masked": {"--dsa-selected-attention": "masked"},
    "overlap": {"--overlap-grad-reduce": True, "--overlap-param-gather": True},
}


@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize("way", WAYS)
def test_losses(way, precision, started):
    flags = started(DSA) | WAYS[way]
    expected = run(flags | DISTRIBUTED, ENGINE, precision)
    got = run(flags | PARAMETERS | MAIN, ENGINE, precision)
    check_losses(got, expected, BOUNDS["DSA", precision])


@pytest.mark.parametrize("precision", ["tensorwise", "blockwise"])
def test_losses_of_v4(precision, started):
    flags = started(V4)
    expected = run(flags | DISTRIBUTED, ENGINE, precision)
    got = run(flags | PARAMETERS | MAIN, ENGINE, precision)
    check_losses(got, expected, BOUNDS["V4", precision])


@pytest.mark.parametrize("precision", FP8)
def test_resume(precision, source, tmp_path):
    flags = DSA | PARAMETERS | {"--data-path": source, "--train-iters": 6}
    whole = run(flags, ENGINE, precision)
    saved = flags | {"--save": tmp_path, "--save-interval": 3}
    run(saved | {"--exit-interval": 3}, ENGINE, precision)
    rest = run(saved | {"--load": tmp_path}, ENGINE, precision, env=ALLOW_PICKLE)
    differences = relative_differences(rest.column("lm loss"), whole.column("lm loss")[3:])
    bound = BOUNDS["DSA", precision].later
    assert differences[0] <= bound and differences[2] <= bound, differences
