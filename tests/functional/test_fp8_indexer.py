"""The indexer's linears in FP8 and in bf16: a run of both, and what is refused."""

import pytest

from tests.functional.engine import BOUNDS, DSA, ENGINE, FP8, MARKS, V4, check_losses, run

pytestmark = MARKS


@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize(("name", "model"), [("DSA", DSA), ("V4", V4)])
def test_losses(name, model, precision, started):
    """Both train; their first losses, from the same weights, differ as FP8 products do."""
    flags = started(model)
    expected = run(flags, ENGINE, precision)
    got = run(flags | {"--dsa-fp8-indexer": True}, ENGINE, precision)
    assert got.steps[-1]["lm loss"] < got.steps[0]["lm loss"]
    check_losses(got, expected, BOUNDS[name, precision])


@pytest.mark.parametrize("heads", [4, 12])
def test_any_number_of_index_heads_in_bf16(heads, data):
    """transformer-engine quantises weights whose rows are a multiple of 8."""
    flags = DSA | {"--data-path": data, "--train-iters": 2, "--dsa-indexer-n-heads": heads}
    assert len(run(flags, ENGINE, "tensorwise").steps) == 2
    refused = run(flags | {"--dsa-fp8-indexer": True}, ENGINE, "tensorwise", check=False)
    assert refused.returncode != 0 and not refused.steps
    assert "--dsa-indexer-n-heads must be a multiple of 8" in refused.log
