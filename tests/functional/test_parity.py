"""Loss and every gradient are the same in every parallel layout as in one process.

All runs load the same checkpoint, take one step and save; the gradients are read from the saved
optimizer state, which is in the model's own space whatever the layout.
"""

import pytest

from tests.helpers import relative_error

TOLERANCE = 2e-5
HEALTH = ("dsa attention mass captured", "dsa zero scores", "dsa boundary ties")


@pytest.fixture(scope="session")
def single(one_step):
    """The reference: one process, four microbatches."""
    step, gradients, result = one_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    assert sum(".indexer." in name for name in gradients) >= 5
    return step, gradients, result


TP2_HEADS = {
    "--tensor-model-parallel-size": 2,
    "--sequence-parallel": True,
    "--dsa-tp-mode": "heads",
}
TP2_SEQUENCE = TP2_HEADS | {"--dsa-tp-mode": "sequence"}
CP2 = {"--context-parallel-size": 2}
FULL_RECOMPUTE = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": 1,
}
#: Documents have any length: only packed rows can be cut into equal parts.
PACKED = {"--dataloader-inter-document-masking": True, "--dsa-cp-layout": "zigzag_rows"}
LAYOUTS = {
    "TP2 by heads": (TP2_HEADS, 2),
    "TP2 by sequence and CP2": (TP2_SEQUENCE | CP2, 4),
    # Starting processes is what takes the time: several features share a run.
    "CP2 contiguous, full recompute, per-token loss, one microbatch of 8": (
        CP2
        | FULL_RECOMPUTE
        | {"--dsa-cp-layout": "contiguous"}
        | {"--calculate-per-token-loss": True, "--micro-batch-size": 8},
        2,
    ),
    "PP2 and CP2": ({"--pipeline-model-parallel-size": 2} | CP2, 4),
    "PP2": ({"--pipeline-model-parallel-size": 2}, 2),
    "DP2 with distributed optimizer": (
        {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}, 2,
    ),
    "DP2 with overlapped gradient reduction": ({"--overlap-grad-reduce": True}, 2),
    "one microbatch of 8 instead of four of 2": ({"--micro-batch-size": 8}, 1),
    "full recompute": (FULL_RECOMPUTE, 1),
    "selective recompute": (
        {
            "--recompute-granularity": "selective",
            "--recompute-modules": ["core_attn", "mla_up_proj"],
        },
        1,
    ),
    "small workspace": ({"--dsa-workspace-mib": 1}, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ranks(r)) for n, (_, r) in LAYOUTS.items()]
)
def test_layout(name, single, one_step):
    check_layout(name, LAYOUTS[name], single, one_step)


def check_layout(name, layout, expected, one_step):
    """Take a step in another layout and compare it with one process."""
    got = one_step(*layout)
    compare(got, expected, TOLERANCE)
    # Ranks with other rows sample other ones, and the selection is judged in a rank's first
    # microbatch.
    if not any(word in name for word in ("microbatch", "by sequence", "CP2", "DP2")):
        for figure in HEALTH:
            assert got[0][figure] == pytest.approx(expected[0][figure], rel=1e-4), figure


def compare(got, expected, tolerance):
    """Check all losses, gradient norm and every gradient."""
    step, gradients, _ = got
    expected_step, expected_gradients, _ = expected
    mtp = tuple(name for name in expected_step if name.startswith("mtp_"))
    for figure in ("lm loss", "indexer loss", "grad norm", *mtp):
        assert step[figure] == pytest.approx(expected_step[figure], rel=1e-4), figure
    assert set(gradients) == set(expected_gradients)
    errors = {n: relative_error(g, expected_gradients[n]) for n, g in gradients.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] < tolerance, (worst, errors[worst])


def compare_curves(got, expected):
    """Check losses and gradient norm of every step of two runs."""
    assert len(got.steps) == len(expected.steps) > 1
    for figure in ("lm loss", "indexer loss", "grad norm"):
        assert got.column(figure) == pytest.approx(expected.column(figure), rel=1e-4), figure


def test_indexer_loss_per_token(single, one_step):
    """With per-token loss the gradients are those of the mean over all tokens, indexer included.

    All tokens count here, so both normalisations agree; an indexer loss that ignores the switch
    would be off by the number of tokens.
    """
    compare(one_step({"--calculate-per-token-loss": True}), single, TOLERANCE)


@pytest.mark.ranks(2)
def test_pipeline_stage_without_layers(single, one_step):
    """Trap 19: the first stage has no indexer; logging must not wait for it."""
    layout = {"--pipeline-model-parallel-layout": "E|ttL", "--pipeline-model-parallel-size": 2}
    compare(one_step(layout, 2), single, TOLERANCE)


@pytest.mark.ranks(4)
def test_frozen_warmup_in_a_pipeline(one_step):
    """Layers without a backward: gradients of the indexers alone, whose losses start from above."""
    warmup = {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}
    expected = one_step(warmup)
    assert expected[1] and all(".indexer." in name for name in expected[1])
    compare(
        one_step(warmup | {"--pipeline-model-parallel-size": 2} | TP2_HEADS, 4), expected, TOLERANCE
    )


def test_report_names_what_ran(single):
    """Trap 15: the implementation of every operation is printed at the end."""
    log = single[2].log
    for operation in (
        "indexer_topk",
        "sparse_attention_forward",
        "sparse_attention_backward",
        "sparse_indexer_loss",
    ):
        assert f">   {operation}: torch" in log, operation
