"""Hyper-connections through the training entry point, in every parallel layout.

As in ``test_parity.py``: loss and every gradient equal those of one process. A DSA model with dense
and expert layers, and a V4: streams belong to the residual, not to an attention.
"""

import pytest
import torch

from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import check_layout, check_resume, compare_curves, layout_cases
from tests.functional.launch import train
from tests.functional.parallel_flags import (
    CP2,
    FULL_RECOMPUTE,
    LAYOUTS,
    PACKED,
    TP2_HEADS,
    TP2_SEQUENCE,
)
from tests.helpers import relative_error

STREAMS = {
    "--num-layers": 4,
    "--hc-mult": 4,
    "--hc-sinkhorn-iters": 5,
    "--num-experts": 4,
    "--moe-layer-freq": "([0]*2+[1]*2)",
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-router-load-balancing-type": "none",
}
#: The attention of DeepSeek-V4 under the same streams.
V4 = {
    "--num-layers": 3,
    "--csa-compress-ratios": [0, 4, 16],
    "--csa-window-size": 12,
    "--csa-compress-rotary-base": 160000,
    "--kv-lora-rank": 24,
    "--qk-head-dim": 24,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 32,
    "--o-groups": 2,
    "--o-lora-rank": 16,
    "--dsa-indexer-topk": 6,
    "--dsa-indexer-rope-interleaved": True,
    "--hc-mult": 4,
}
#: Two layers of multi-token prediction: the second takes the streams of the first.
PREDICTION = STREAMS | {"--mtp-num-layers": 2}
V4_PREDICTION = V4 | {"--mtp-num-layers": 1, "--csa-compress-ratios": [0, 4, 16, 4]}
PP2 = {"--pipeline-model-parallel-size": 2}
INTERLEAVED = PP2 | {"--num-layers-per-virtual-pipeline-stage": 1}
#: What streams do without prediction; PREDICTION_LAYOUTS have all layouts of the same layers.
STREAM_LAYOUTS = {
    "CP2, full recompute": (CP2 | FULL_RECOMPUTE, 2),
    "PP2 interleaved, TP2 by sequence": (INTERLEAVED | TP2_SEQUENCE, 4),
    "last stage has the loss alone": (
        PP2 | {"--pipeline-model-parallel-layout": "Etttt|L"}, 2,
    ),
}  # fmt: skip
V4_LAYOUTS = {
    "TP2 by heads and CP2": (TP2_HEADS | CP2, 4),
    "PP2 with full recompute": (
        PP2 | {"--pipeline-model-parallel-layout": "Ett|tL"} | FULL_RECOMPUTE, 2,
    ),
}  # fmt: skip


PER_TOKEN = {"--calculate-per-token-loss": True}
SHARED_LAYOUTS = (
    "DP2 with distributed optimizer",
    "selective recompute",
    "small workspace",
    "one microbatch of 8 instead of four of 2",
)
PREDICTION_LAYOUTS = {name: LAYOUTS[name] for name in SHARED_LAYOUTS} | {
    "TP2 by heads": (TP2_HEADS, 2),
    "CP2, full recompute": (CP2 | FULL_RECOMPUTE, 2),
    "PP2": (PP2, 2),
    "PP2 interleaved, full recompute": (INTERLEAVED | FULL_RECOMPUTE, 2),
    "PP2 interleaved, TP2 by sequence": (INTERLEAVED | TP2_SEQUENCE, 4),
    "EP2 over DP2": ({"--expert-model-parallel-size": 2}, 2),
    # Stages exchange streams, then streams and the main head's output, then outputs of heads.
    "stages of prediction and of the loss alone": (
        {"--pipeline-model-parallel-size": 4, "--pipeline-model-parallel-layout": "Ett|tt|mm|L"}, 4,
    ),
    "prediction with the loss, apart from layers": (
        PP2 | {"--pipeline-model-parallel-layout": "Etttt|mmL"}, 2,
    ),
    "interleaved, prediction apart": (
        PP2 | {"--pipeline-model-parallel-layout": "Et|t|tt|mmL"}, 2,
    ),
    "per-token loss": (PER_TOKEN, 1),
}  # fmt: skip
V4_PREDICTION_LAYOUTS = {
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "TP2 by heads and CP2, per-token loss": (TP2_HEADS | CP2 | PER_TOKEN, 4),
    "PP2 with full recompute": (
        PP2 | {"--pipeline-model-parallel-layout": "Ett|tmL"} | FULL_RECOMPUTE, 2,
    ),
}  # fmt: skip


def is_connection(name):
    return ".hc_" in name


@pytest.fixture(scope="module")
def stream_step(steps_of):
    """One step of the small model from a common checkpoint."""
    return steps_of(STREAMS)


@pytest.fixture(scope="module")
def single(stream_step):
    """The reference: one process, four microbatches."""
    step, gradients, result = stream_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    # Stacked over layers, of attention and of the MLP; and the head's.
    assert sum(map(is_connection, gradients)) == 4 * 6 + 3
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(STREAM_LAYOUTS))
def test_layout(name, single, stream_step):
    check_layout(name, STREAM_LAYOUTS[name], single, stream_step)


@pytest.fixture(scope="module")
def v4_step(steps_of):
    return steps_of(V4)


@pytest.fixture(scope="module")
def v4_single(v4_step):
    return v4_step()


@pytest.mark.parametrize("name", layout_cases(V4_LAYOUTS))
def test_v4_layout(name, v4_single, v4_step):
    check_layout(name, V4_LAYOUTS[name], v4_single, v4_step)


@pytest.fixture(scope="module")
def prediction_step(steps_of):
    return steps_of(PREDICTION)


@pytest.fixture(scope="module")
def prediction_single(prediction_step):
    step, gradients, result = prediction_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    predicting = [name for name in gradients if name.startswith("mtp.")]
    # Every prediction layer has a head of its own.
    assert sum(map(is_connection, predicting)) == 2 * (6 + 3)
    assert step["mtp_1 loss"] > 0 and step["mtp_2 loss"] > 0
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(PREDICTION_LAYOUTS))
def test_prediction_layout(name, prediction_single, prediction_step):
    check_layout(name, PREDICTION_LAYOUTS[name], prediction_single, prediction_step)


@pytest.fixture(scope="module")
def v4_prediction_step(steps_of):
    return steps_of(V4_PREDICTION)


@pytest.fixture(scope="module")
def v4_prediction_single(v4_prediction_step):
    return v4_prediction_step()


@pytest.mark.parametrize("name", layout_cases(V4_PREDICTION_LAYOUTS))
def test_v4_prediction_layout(name, v4_prediction_single, v4_prediction_step):
    check_layout(name, V4_PREDICTION_LAYOUTS[name], v4_prediction_single, v4_prediction_step)


def test_shared_selections(steps_of):
    """The layer that hands selections on has streams as well, also when it is recomputed."""
    step = steps_of(
        {"--num-layers": 3, "--hc-mult": 2, "--dsa-indexer-topk-freq": 2, "--mtp-num-layers": 1}
        | {"--dsa-indexer-skip-topk-offset": 1}
    )
    check_layout("full recompute", (FULL_RECOMPUTE, 1), step(), step)


@pytest.mark.ranks(2)
def test_packed_documents(short_documents):
    """Documents of any length over context-parallel ranks."""
    flags = STREAMS | PACKED | {"--data-path": short_documents}
    compare_curves(train(flags | CP2, ranks=2), train(flags))


@pytest.mark.ranks(2)
def test_packed_documents_in_a_pipeline(steps_of, short_documents):
    """Predicted is within a document, also where prediction is apart from the decoder."""
    flags = {"--dataloader-inter-document-masking": True, "--micro-batch-size": 1}
    step = steps_of(PREDICTION | flags | {"--data-path": short_documents})
    stages = PP2 | {"--pipeline-model-parallel-layout": "Etttt|mmL"}
    check_layout("prediction apart", (stages, 2), step(), step)


def test_report_names_what_ran(single):
    log, name = single[2].log, "triton" if torch.cuda.is_available() else "torch"
    for operation in ("read", "write", "head"):
        assert f">   hyper_connection_{operation}: {name}" in log, operation


def test_resume_equals_uninterrupted_in_bf16(data, tmp_path):
    """Connections stay fp32 in the model, in the optimizer and in checkpoints."""
    state = check_resume(V4_PREDICTION | {"--data-path": data, "--bf16": True}, tmp_path)
    mine = {name: tensor for name, tensor in state.items() if is_connection(name)}
    weights = [name for name in mine if not name.startswith("optimizer")]
    assert len(weights) == 4 * 6 + 2 * 3 and len(mine) >= 3 * len(weights)
    assert {tensor.dtype for tensor in mine.values()} == {torch.float32}
    other = next(name for name in state if name.endswith("linear_kv_proj.weight"))
    assert state[other].dtype == torch.bfloat16


@pytest.mark.ranks(2)
def test_distributed_optimizer_in_bf16(data, tmp_path):
    """Two ranks train like one; weights and moments are saved under the right names."""
    flags = PREDICTION | {"--data-path": data, "--bf16": True, "--train-iters": 1}
    distributed = {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}
    one = train(flags | {"--save": tmp_path / "one", "--save-interval": 1})
    saved = {"--save": tmp_path / "two", "--save-interval": 1}
    two = train(flags | distributed | saved, ranks=2)
    assert two.column("lm loss") == pytest.approx(one.column("lm loss"), rel=1e-4)
    expected, state = read(tmp_path / "one"), read(tmp_path / "two")
    moments = [name for name in state if name.startswith("optimizer.state.exp_avg")]
    assert sum(map(is_connection, moments)) == 2 * (6 * 6 + 3 * 3)
    for name in filter(is_connection, moments):
        assert relative_error(state[name], expected[name]) < 1e-5, name

    # Parameters may arrive late, also those of modules that are not linears.
    overlap = {"--overlap-grad-reduce": True, "--overlap-param-gather": True}
    overlap |= {"--ddp-bucket-size": 1, "--train-iters": 2}
    late = train(flags | distributed | overlap, ranks=2)
    straight = train(flags | {"--train-iters": 2})
    for loss in ("lm loss", "mtp_1 loss", "mtp_2 loss"):
        assert late.column(loss) == pytest.approx(straight.column(loss), rel=1e-4), loss


@pytest.mark.ranks(2)
def test_frozen_main_model(data, tmp_path):
    """In stage warmup connections stay as they are, in a pipeline, with the layers' losses."""
    flags = PREDICTION | {"--data-path": data, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 2}
    train(flags | {"--dsa-stage": "dense", "--train-iters": 2})
    before = read(tmp_path)
    stages = PP2 | {"--pipeline-model-parallel-layout": "Etttt|mmL"}
    train(flags | {"--dsa-stage": "warmup", "--train-iters": 4} | stages, ranks=2)
    after = read(tmp_path)
    learning = [name for name in after if name.startswith("optimizer.state.exp_avg.")]
    assert all(".indexer." in name and after[name].norm() > 0 for name in learning)
    assert sum(".mtp." in name for name in learning) == 2 * 5
    for name, tensor in before.items():
        if not name.startswith(("optimizer", "rng")):
            assert tensor.equal(after[name]), name


def test_refusals_name_the_flags(data):
    """All of them at once, before anything is built."""
    wrong = {
        "--normalization": "LayerNorm",
        "--recompute-granularity": "selective",
        "--recompute-modules": ["layernorm"],
    }
    run = train(STREAMS | wrong | {"--data-path": data}, check=False)
    assert run.returncode != 0 and not run.steps
    assert "--normalization must be RMSNorm" in run.log
    assert "--recompute-modules must not name layernorm with --hc-mult 4" in run.log
