"""Division of work over tensor-parallel ranks: choice, rejected settings, consumers."""

import pytest

from megatron_dsa.config.attention_choice import attention_of
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.planner.text import describe
from megatron_dsa.layers.required_ops import required_ops
from tests.host import small_config, small_csa_config, stop
from tests.plans import BF16, plan

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DENSE_LOSS = {"dsa_indexer_use_sparse_loss": False}
NO_LOSS = {"dsa_indexer_loss_coeff": 0.0}


def mode_of(changes=TP2, **options):
    return attention_of(small_config(options=DSAOptions(**options), **changes)).tp_mode


@pytest.mark.parametrize(
    ("asked", "attention", "changes", "expected"),
    [
        ("auto", "masked", TP2, "select"),
        ("select", "masked", TP2, "select"),
        ("heads", "masked", TP2, "heads"),
        ("auto", "masked", TP2 | DENSE_LOSS, "heads"),
        ("auto", "masked", TP2 | DENSE_LOSS | NO_LOSS, "select"),
        ("select", "masked", TP2 | DENSE_LOSS | NO_LOSS, "select"),
        ("auto", "masked", {}, "heads"),
        ("select", "masked", {}, "heads"),
        ("select", "auto", {}, "heads"),
        ("auto", "sparse", TP2, "sequence"),
        ("auto", "sparse", TP2 | {"num_attention_heads": 128}, "heads"),
        ("sequence", "sparse", TP2, "sequence"),
        ("heads", "sparse", TP2, "heads"),
    ],
)
def test_modes(asked, attention, changes, expected):
    assert mode_of(changes, tp_mode=asked, selected_attention=attention) == expected


@pytest.mark.parametrize("stage", ["dense", "warmup"])
def test_other_stages_go_by_heads(stage):
    changes = TP2 | DENSE_LOSS
    assert mode_of(changes, tp_mode="select", stage=stage) == "heads"
    assert mode_of(changes, tp_mode="auto", stage=stage) == "heads"


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"selected_attention": "sparse"}, {}, "got sparse.* add --dsa-selected-attention masked"),
        ({}, {}, "--dsa-selected-attention must be masked .*, got auto.* use --dsa-tp-mode auto"),
        ({"selected_attention": "masked"}, DENSE_LOSS, "--dsa-indexer-use-sparse-loss is required"),
        (
            {"selected_attention": "masked", "evaluate_indexer": True},
            DENSE_LOSS | NO_LOSS,
            "all visible keys.* or --dsa-tp-mode heads",
        ),
    ],
)
def test_what_is_refused(options, changes, message):
    changes = TP2 | changes
    with pytest.raises(ConfigError, match=message):
        small_config(options=DSAOptions(tp_mode="select", **options), **changes)
    small_config(options=DSAOptions(tp_mode="heads", **options), **changes)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_v4_refuses_it(stage):
    options = DSAOptions(tp_mode="select", stage=stage)
    with pytest.raises(
        ConfigError, match=r"--csa-compress-ratios must be unset .* use --dsa-tp-mode auto, heads"
    ):
        small_csa_config(4, options=options, **TP2 | DENSE_LOSS)


@pytest.mark.parametrize("mode", ["heads", "select"])
def test_operations_have_the_heads_of_a_rank(mode):
    options = DSAOptions(tp_mode=mode, selected_attention="masked")
    config = small_config(options=options, **TP2)
    heads = {op.operation: op.call.heads for op in required_ops(config, 1)}
    assert heads["masked_attention_forward"] == heads["masked_attention_probabilities"] == 2
    assert heads["indexer_scores"] == config.dsa_indexer_n_heads


def test_plans_tell_and_count_it():
    stop()  # plans need their own process groups
    flags = BF16 | {
        "--dsa-selected-attention": "masked", "--tensor-model-parallel-size": 2,
        "--sequence-parallel": True,
    }  # fmt: skip
    found = {mode: plan(flags | {"--dsa-tp-mode": mode}, world=2) for mode in ("heads", "auto")}
    assert "TP 2 (attention by heads)" in describe(found["heads"])
    assert "TP 2 (selection by sequence, attention by heads)" in describe(found["auto"])
    heads, select = (found[mode].stages[0].chunks[0].kept for mode in ("heads", "auto"))
    assert select < heads
    assert found["heads"].operations == found["auto"].operations
