"""CUDA graphs through the training entry point: 50 equal steps, and rejected flags."""

import pytest
import torch

from tests.functional.launch import train

LOCAL = {"--cuda-graph-impl": "local"}
ATTENTION = LOCAL | {"--cuda-graph-modules": "attn"}
WHOLE = {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": True}
PACKED = {"--dataloader-inter-document-masking": True}
#: Fixed order of sums: otherwise selections diverge.
STEPS = {
    "--train-iters": 50, "--micro-batch-size": 2, "--global-batch-size": 8,
    "--deterministic-mode": True,
}  # fmt: skip
EVALUATED = {"--eval-iters": 2, "--eval-interval": 20, "--split": "80,20,0"}
#: Graphs of layers omit these figures.
UNSAMPLED = {"--dsa-health-tokens": 0}
EXPERTS = {
    "--num-experts": 4, "--moe-layer-freq": "[0,1]", "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
}  # fmt: skip


def stage(name):
    return {"--dsa-stage": name} | (
        {"--dsa-indexer-use-sparse-loss": None} if name != "sparse" else {}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sparse", "warmup", "dense"])
@pytest.mark.parametrize("graphs", [LOCAL, ATTENTION, WHOLE], ids=["layers", "attention", "whole"])
def test_fifty_steps(graphs, name, short_documents):
    flags = {"--data-path": short_documents} | STEPS | EVALUATED | UNSAMPLED | stage(name)
    check_same(train(flags | graphs), train(flags), name)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [LOCAL, ATTENTION], ids=["layers", "attention"])
@pytest.mark.parametrize("name", ["sparse", "warmup", "dense"])
def test_fifty_steps_of_packed_documents(graphs, name, short_documents):
    flags = {"--data-path": short_documents} | STEPS | UNSAMPLED | stage(name) | PACKED
    graphs = graphs | {"--dsa-packed-documents": 64}
    check_same(train(flags | graphs), train(flags), name)


@pytest.mark.gpu
def test_fifty_steps_with_experts_and_multi_token_prediction(data):
    flags = {"--data-path": data} | STEPS | UNSAMPLED | EXPERTS | {"--mtp-num-layers": 1}
    check_same(train(flags | ATTENTION), train(flags), "sparse")


def check_same(run, plain, name):
    figures = ["lm loss"] if name == "dense" else ["lm loss", "indexer loss"]
    for figure in figures:
        assert run.column(figure) == pytest.approx(plain.column(figure), rel=1e-5)
    assert "CUDA graphs (" in run.log and "not measured in CUDA graphs" in run.log
    assert "without replays of CUDA graphs" in run.log
    assert "CUDA graphs" not in plain.log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed(data):
    run = train({"--data-path": data} | LOCAL, check=False)
    assert run.returncode == 2 and not run.steps
    assert "error: --cuda-graph-impl local needs a GPU" in run.log
