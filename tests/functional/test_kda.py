"""Layers of Kimi Delta Attention (``--linear-attention-freq``) through the entry point."""

import pytest

from tests.functional.comparisons import (
    TOLERANCE,
    check_layout,
    check_resume,
    compare,
    compare_curves,
    layout_cases,
)
from tests.functional.launch import train
from tests.functional.parallel_flags import FULL_RECOMPUTE, LAYOUTS, TP2_HEADS, TP2_SEQUENCE

#: Layers 1 and 3 have KDA, 2 and 4 DSA.
KDA = {
    "--num-layers": 4,
    "--linear-attention-freq": 2,
    "--linear-num-key-heads": 4,
    "--linear-num-value-heads": 4,
    "--linear-key-head-dim": 16,
    "--linear-value-head-dim": 16,
}
#: Around the layers what GLM-5.3 has: streams, prediction, packed documents of any length.
AROUND = {
    "--hc-mult": 2,
    "--mtp-num-layers": 1,
    "--dataloader-inter-document-masking": True,
}
SHARED = KDA | {"--dsa-indexer-topk-freq": 2}
SAME = {
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "PP2 and TP2 by heads, full recompute": (
        TP2_HEADS | FULL_RECOMPUTE | {"--pipeline-model-parallel-size": 2}, 4,
    ),
    **{
        name: LAYOUTS[name]
        for name in ("DP2 with distributed optimizer", "selective recompute", "small workspace")
    },
}  # fmt: skip
PRECISIONS = {
    "plain": {},
    "distributed": {
        "--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True,
    },
}  # fmt: skip
IN_FP32 = ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")


@pytest.fixture(scope="module")
def steps(steps_of):
    return steps_of(KDA)


@pytest.fixture(scope="module")
def single(steps):
    """One process: every parameter of a KDA layer has a gradient."""
    step, gradients, result = steps()
    of_layer = [name for name in gradients if ".layers.0.self_attention." in name]
    assert len(of_layer) == 15 and all(gradients[name].norm() > 0 for name in of_layer)
    assert ">   kda_attention: torch" in result.log
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(SAME))
def test_layout(name, single, steps):
    check_layout(name, SAME[name], single, steps)


def test_the_bound_of_gates_reaches_the_layers(data):
    flags = KDA | {"--data-path": data, "--train-iters": 1}
    first, other = (
        train(flags | bound).column("lm loss")[0]
        for bound in ({}, {"--kda-gate-lower-bound": -1.0})
    )
    assert abs(first - other) > 1e-4


@pytest.mark.ranks(2)
def test_two_ranks_with_streams_prediction_and_documents(steps_of):
    one_step = steps_of(KDA | AROUND)
    compare(one_step(TP2_HEADS, 2), one_step(), TOLERANCE)


@pytest.mark.parametrize("optimizer", PRECISIONS)
def test_resume(optimizer, data, tmp_path):
    """In bf16; gates and convolutions are trained and saved in fp32."""
    flags = KDA | AROUND | PRECISIONS[optimizer] | {"--bf16": True, "--data-path": data}
    state = check_resume(flags, tmp_path)
    for name in IN_FP32:
        saved = [x for key, x in state.items() if key.endswith(f"self_attention.{name}")]
        assert saved and all(str(x.dtype) == "torch.float32" for x in saved), name


def test_selections_pass_kda_layers(data):
    """Layer 4 attends to the keys that layer 2 selects, also where layers run again."""
    shared = train(SHARED | {"--data-path": data})
    assert ">   sparse_indexer_loss: torch 16" in shared.log  # of one layer, in 4 steps of 4
    compare_curves(train(SHARED | FULL_RECOMPUTE | {"--data-path": data}), shared)


def test_a_frozen_warm_up(data):
    """KDA layers run without a backward; the indexers of the others learn."""
    warm = {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}
    losses = train(KDA | warm | {"--data-path": data, "--train-iters": 6}).column("indexer loss")
    assert losses[-1] < losses[0]


REFUSALS = {
    "a split that parts a selection": (
        SHARED | {"--pipeline-model-parallel-size": 2}, 2, "layer 4 is the first sparse attention",
    ),
    "context parallelism": (
        {"--context-parallel-size": 2}, 2,
        "--context-parallel-size must be 1 with --linear-attention-freq, got 2: a state would",
    ),
    "grouped keys": (
        {"--linear-num-key-heads": 2}, 1,
        "--linear-num-key-heads (2) must equal --linear-num-value-heads (4)",
    ),
    "no sparse layer": ({"--linear-attention-freq": 5}, 1, "--linear-attention-freq must be a num"),
    "a steep gate": (
        {"--kda-gate-lower-bound": -6}, 1, "--kda-gate-lower-bound must be finite and at least -5",
    ),
    "adapters": (
        {"--lora-rank": 2, "--lora-targets": ["all-linear"]}, 1, "--lora-rank must be unset with",
    ),
    "a gate without layers": (
        {"--linear-attention-freq": None, "--kda-gate-lower-bound": -4}, 1,
        "--kda-gate-lower-bound -4.0 has a meaning only with --linear-attention-freq",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ranks(r)) for n, (_, r, _) in REFUSALS.items()]
)
def test_refusals(name, data):
    changes, ranks, message = REFUSALS[name]
    run = train(KDA | {"--data-path": data} | changes, ranks=ranks, check=False)
    assert run.returncode == 2 and message in run.log and "Traceback" not in run.log, run.log
