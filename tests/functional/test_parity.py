"""Loss and every gradient in every parallel layout equal one process.

All runs load one checkpoint, take one step and save; gradients are read from the optimizer state,
which is unsharded.
"""

import pytest

from tests.functional.comparisons import TOLERANCE, check_layout, compare
from tests.functional.parallel_flags import LAYOUTS, TP2_HEADS


@pytest.fixture(scope="session")
def single(one_step):
    """Return the reference: one process, four microbatches."""
    step, gradients, result = one_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    assert sum(".indexer." in name for name in gradients) >= 5
    return step, gradients, result


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ranks(r)) for n, (_, r) in LAYOUTS.items()]
)
def test_layout(name, single, one_step):
    check_layout(name, LAYOUTS[name], single, one_step)


def test_indexer_loss_per_token(single, one_step):
    """An indexer loss that ignores the switch would be wrong by the number of tokens."""
    compare(one_step({"--calculate-per-token-loss": True}), single, TOLERANCE)


@pytest.mark.ranks(2)
def test_pipeline_stage_without_layers(single, one_step):
    layout = {"--pipeline-model-parallel-layout": "E|ttL", "--pipeline-model-parallel-size": 2}
    compare(one_step(layout, 2), single, TOLERANCE)


@pytest.mark.ranks(4)
def test_frozen_warmup_in_a_pipeline(one_step):
    warmup = {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}
    expected = one_step(warmup)
    assert expected[1] and all(".indexer." in name for name in expected[1])
    compare(
        one_step(warmup | {"--pipeline-model-parallel-size": 2} | TP2_HEADS, 4), expected, TOLERANCE
    )


def test_report_names_what_ran(single):
    log = single[2].log
    for operation in (
        "indexer_topk",
        "sparse_attention_forward",
        "sparse_attention_backward",
        "sparse_indexer_loss",
    ):
        assert f">   {operation}: torch" in log, operation
