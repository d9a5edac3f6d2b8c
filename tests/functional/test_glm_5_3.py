"""A small GLM-5.3-Flash through the training entry point, in every parallel layout.

Three KDA layers and a DSA layer with pools on four streams, clamped experts, and a layer of
prediction with plain residuals. As in ``test_parity.py`` loss and every gradient equal those of one
process.
"""

import pytest
import torch

from megatron_dsa.extras.cli import main
from tests.cases.released_formats import stored_bytes
from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import check_layout, check_resume, compare_curves, layout_cases
from tests.functional.launch import TINY, flags_in, launch, train
from tests.functional.parallel_flags import FULL_RECOMPUTE, LAYOUTS, TP2_HEADS, TP2_SEQUENCE
from tests.tiny_models import published, tiny_glm_5_3

GLM = {
    "--num-layers": 4,
    "--mtp-num-layers": 1,
    "--linear-attention-freq": "([1]*3+[0]*1)",
    "--linear-num-key-heads": 4,
    "--linear-num-value-heads": 4,
    "--linear-key-head-dim": 16,
    "--linear-value-head-dim": 16,
    "--linear-conv-kernel-dim": 4,
    "--qk-pos-emb-head-dim": 0,
    "--no-dsa-indexer-rotate-activation": True,
    "--dsa-indexer-pool-size": 4,
    "--hc-mult": 4,
    "--hc-sinkhorn-iters": 5,
    "--hc-collapse": "mean",
    "--num-experts": 4,
    "--moe-layer-freq": "([0]*1+[1]*3)",
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-router-load-balancing-type": "none",
    "--moe-router-score-function": "sigmoid",
    "--moe-router-topk-scaling-factor": 2.5,
    "--moe-router-enable-expert-bias": True,
    "--activation-func-clamp-value": 0.1,
    "--no-bias-swiglu-fusion": True,
}
DISTRIBUTED = {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}


def stages(layout, ranks=2):
    """Flags of pipeline stages; ``E`` embedding, ``t`` layer, ``m`` MTP layer, ``L`` loss."""
    return {
        "--pipeline-model-parallel-size": ranks, "--pipeline-model-parallel-layout": layout
    }  # fmt: skip


SHARED = ("full recompute", "selective recompute", "one microbatch of 8 instead of four of 2")
GLM_LAYOUTS = {name: LAYOUTS[name] for name in SHARED} | {
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "TP2 by heads, full recompute": (TP2_HEADS | FULL_RECOMPUTE, 2),
    "PP2, first stage without an indexer": (stages("Ettt|tmL"), 2),
    # The mean goes on to the stage of prediction, streams to the others.
    "prediction and loss alone": (stages("Ett|tt|m|L", 4), 4),
    "TP2, DP2 and EP2": (
        TP2_SEQUENCE | {"--expert-model-parallel-size": 2, "--expert-tensor-parallel-size": 1}, 4,
    ),
    "DP2 and EP2, distributed optimizer": (
        {"--expert-model-parallel-size": 2} | DISTRIBUTED, 2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def glm_step(steps_of):
    return steps_of(GLM)


@pytest.fixture(scope="module")
def single(glm_step):
    """The reference: one process, four microbatches."""
    step, gradients, result = glm_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    parts = {name: sum(name in key for key in gradients) for name in (".indexer.", ".hc_", "conv")}
    # The decoder's and the prediction layer's indexer; connections of the decoder's layers alone.
    assert parts == {".indexer.": 2 * 7, ".hc_": 4 * 6, "conv": 3 * 3}
    assert step["mtp_1 loss"] > 0
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(GLM_LAYOUTS))
def test_layout(name, single, glm_step):
    check_layout(name, GLM_LAYOUTS[name], single, glm_step)


@pytest.mark.ranks(2)
def test_packed_documents(short_documents):
    """Many documents are shorter than a pool and than the convolution."""
    flags = GLM | {"--data-path": short_documents, "--dataloader-inter-document-masking": True}
    compare_curves(train(flags | TP2_SEQUENCE, ranks=2), train(flags))


def test_resume_in_bf16(data, tmp_path):
    """Connections, convolutions, decays and pools' positions stay fp32."""
    state = check_resume(GLM | DISTRIBUTED | {"--data-path": data, "--bf16": True}, tmp_path)
    ends = ("_conv1d.weight", "dt_bias", "A_log", "pool_ape", "_fn", "_base", "_scale")
    weights = [x for x in state if x.endswith(ends) and not x.startswith("optimizer")]
    assert len(weights) == 3 * 5 + 2 + 4 * 6
    assert {state[name].dtype for name in weights} == {torch.float32}
    assert state["decoder.layers.0.self_attention.linear_q_proj.weight"].dtype == torch.bfloat16


@pytest.mark.ranks(2)
def test_warm_up_then_sparse(data, tmp_path):
    """The warm-up trains two indexers, none of them in the first stage; all is trained after it."""
    flags = GLM | {"--data-path": data, "--save": tmp_path, "--save-interval": 6}
    warm = {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": False, "--train-iters": 6}
    rate = {"--lr": 1e-2, "--min-lr": 1e-2}
    warmup = train(flags | warm | rate | stages("Ettt|tmL"), ranks=2)
    losses = warmup.column("indexer loss")
    assert losses[-1] < losses[0]
    states = [name for name in read(tmp_path) if name.startswith("optimizer.state.exp_avg.")]
    assert len(states) == 2 * 7 and all(".indexer." in name for name in states)
    sparse = train(flags | {"--load": tmp_path, "--finetune": True, "--train-iters": 2})
    assert "has no indexers" not in sparse.log
    assert sparse.steps[0]["indexer loss"] > 0


@pytest.mark.ranks(4)
def test_ranks_read_and_write_a_released_model(data, tmp_path, capsys):
    """A step of rate 0 on pipeline and tensor-parallel ranks, from the release to an export."""
    whole = {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"], "vocab_size": 264}
    there, back = tmp_path / "there", tmp_path / "back"
    published(tiny_glm_5_3(max_position_embeddings=96, **whole), there)
    assert main(["flags", str(there)]) == 0
    flags = TINY | flags_in(capsys.readouterr().out)
    flags |= {"--data-path": data, "--dsa-load-hf": there, "--train-iters": 1, "--lr": 0}
    flags |= {"--min-lr": 0, "--moe-router-bias-update-rate": 0}
    one = launch(flags)
    saved = {"--save": tmp_path / "run", "--save-interval": 1}
    ranks = launch(flags | saved | stages("Ettt|tL") | TP2_SEQUENCE, ranks=4)
    assert ranks.column("lm loss") == pytest.approx(one.column("lm loss"), rel=1e-5)
    paths = ["--input", tmp_path / "run", "--config", there, "--output", back]
    assert main(["export-hf", *map(str, paths)]) == 0
    before, after = stored_bytes(there), stored_bytes(back)
    assert after == {x: y for x, y in before.items() if not x.startswith("model.visual.")}
