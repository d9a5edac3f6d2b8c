"""The indexer's linears in FP8 and bf16: training and rejected flags."""

import pytest

from tests.functional.engine import BOUNDS, DSA, ENGINE, FP8, MARKS, V4, check_losses, run

pytestmark = MARKS


@pytest.mark.parametrize("precision", FP8)
@pytest.mark.parametrize(("name", "model"), [("DSA", DSA), ("V4", V4)])
def test_losses(name, model, precision, started):
    flags = started(model)
    expected = run(flags, ENGINE, precision)
    got = run(flags | {"--dsa-fp8-indexer": True}, ENGINE, precision)
    assert got.steps[-1]["lm loss"] < got.steps[0]["lm loss"]
    check_losses(got, expected, BOUNDS[name, precision])


@pytest.mark.parametrize("heads", [4, 12])
def test_any_number_of_index_heads_in_bf16(heads, data):
    flags = DSA | {"--data-path": data, "--train-iters": 2, "--dsa-indexer-n-heads": heads}
    assert len(run(flags, ENGINE, "tensorwise").steps) == 2
    refused = run(flags | {"--dsa-fp8-indexer": True}, ENGINE, "tensorwise", check=False)
    assert refused.returncode != 0 and not refused.steps
    assert "--dsa-indexer-n-heads must be a multiple of 8" in refused.log
