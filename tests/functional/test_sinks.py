"""``--softmax-type learnable --dsa-output-gate`` through the entry point: resume, layouts."""

import pytest

from tests.functional.comparisons import TOLERANCE, check_resume, compare
from tests.functional.launch import train
from tests.functional.parallel_flags import CP2, FULL_RECOMPUTE, TP2_HEADS, TP2_SEQUENCE

HY4 = {"--softmax-type": "learnable", "--dsa-output-gate": True}
LAYOUTS = {
    "TP2 by heads, masked": (TP2_HEADS | {"--dsa-selected-attention": "masked"}, 2),
    "TP2 by sequence and CP2": (TP2_SEQUENCE | CP2, 4),
    "PP2": ({"--pipeline-model-parallel-size": 2}, 2),
    "full recompute, selections shared": (FULL_RECOMPUTE | {"--dsa-indexer-topk-freq": 2}, 1),
}  # fmt: skip


def test_resume(data, tmp_path):
    """In bf16 with the distributed optimizer; saved sinks are in fp32, and are trained."""
    flags = HY4 | {
        "--bf16": True, "--data-path": data, "--use-distributed-optimizer": True,
        "--dist-ckpt-optim-fully-reshardable": True,
    }  # fmt: skip
    state = check_resume(flags, tmp_path)
    sinks = [x for name, x in state.items() if name.endswith("core_attention.attn_sink")]
    assert sinks and all(str(sink.dtype) == "torch.float32" for sink in sinks)
    assert all((sink != 0).all() for sink in sinks)


@pytest.fixture(scope="module")
def step_of_layers(steps_of):
    """One step of a model whose layers select each by itself, or of one that shares selections."""
    return {freq: steps_of(HY4 | {"--dsa-indexer-topk-freq": freq}) for freq in (1, 2)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ranks(x[1])) for name, x in LAYOUTS.items()]
)
def test_layout(name, step_of_layers):
    layout, ranks = LAYOUTS[name]
    one_step = step_of_layers[layout.get("--dsa-indexer-topk-freq", 1)]
    expected = one_step()
    assert any(name.endswith("linear_gate.weight") for name in expected[1])
    assert any(name.endswith("attn_sink") for name in expected[1])
    compare(one_step(layout, ranks), expected, TOLERANCE)


def test_a_frozen_warm_up_with_a_gate(data):
    """Its indexers learn from attention that runs without a gradient."""
    flags = {"--dsa-output-gate": True, "--data-path": data, "--dsa-stage": "warmup"}
    run = train(flags | {"--dsa-indexer-use-sparse-loss": None})
    losses = run.column("indexer loss")
    assert losses[-1] < losses[0]


def test_dense_attention_is_refused(data):
    run = train(HY4 | {"--dsa-stage": "dense", "--data-path": data}, check=False)
    assert run.returncode == 2 and "Traceback" not in run.log, run.log
    assert "--dsa-stage must be sparse with --softmax-type learnable" in run.log
