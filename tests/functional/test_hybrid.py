"""DeepSeek-V4's hybrid attention through the training entry point, in every parallel layout.

A small V4 with a window, a CSA and an HCA layer, and a CSA layer for multi-token prediction. Parity
as in ``test_parity.py``: loss and every gradient equal those of one process.
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

HYBRID = {
    "--num-layers": 3,
    "--mtp-num-layers": 1,
    "--csa-compress-ratios": [0, 4, 16, 4],
    "--csa-window-size": 12,
    "--csa-compress-rotary-base": 160000,
    "--kv-lora-rank": 24,
    "--qk-head-dim": 24,
    "--qk-pos-emb-head-dim": 8,
    "--v-head-dim": 32,
    "--o-groups": 2,
    "--o-lora-rank": 16,
    "--dsa-indexer-topk": 6,  # of 24 compressed keys
    "--dsa-indexer-rope-interleaved": True,
}


def stages(layout):
    """Flags of two pipeline stages; ``E`` embedding, ``t`` layer, ``m`` MTP layer, ``L`` loss."""
    return {"--pipeline-model-parallel-size": 2, "--pipeline-model-parallel-layout": layout}


#: Trap 19: the first stage has a window layer only, and no indexer.
NO_INDEXER_IN_FIRST_STAGE = stages("Et|ttmL")
SHARED_LAYOUTS = (
    "DP2 with distributed optimizer",
    "one microbatch of 8 instead of four of 2",
    "selective recompute",
    "small workspace",
)
HYBRID_LAYOUTS = {name: LAYOUTS[name] for name in SHARED_LAYOUTS} | {
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "PP2, first stage without an indexer": (NO_INDEXER_IN_FIRST_STAGE, 2),
    # Trap 20: two microbatches are in flight.
    "PP2 with full recompute": (stages("Ett|tmL") | FULL_RECOMPUTE, 2),
    "per-token loss": ({"--calculate-per-token-loss": True}, 1),
    "TP2 by heads and CP2": (TP2_HEADS | CP2, 4),
}  # fmt: skip
NO_MTP = {"--mtp-num-layers": None, "--csa-compress-ratios": HYBRID["--csa-compress-ratios"][:3]}


@pytest.fixture(scope="module")
def hybrid_step(steps_of):
    """One step of the small V4 from a common checkpoint."""
    return steps_of(HYBRID)


@pytest.fixture(scope="module")
def single(hybrid_step):
    """The reference: one process, four microbatches."""
    step, gradients, result = hybrid_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    parts = {name: sum(name in key for key in gradients) for name in (".indexer.", "mtp.", "ape")}
    # An indexer has two linears, and four parameters in its compressor.
    assert parts[".indexer."] == 2 * 6 and parts["ape"] == 3 + 2 and parts["mtp."] > 10
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(HYBRID_LAYOUTS))
def test_layout(name, single, hybrid_step):
    check_layout(name, HYBRID_LAYOUTS[name], single, hybrid_step)


@pytest.mark.ranks(2)
def test_packed_documents_over_context_parallel_ranks(short_documents):
    """Documents shorter than the window and than a group, cut anywhere."""
    flags = HYBRID | NO_MTP | PACKED | {"--data-path": short_documents}
    compare_curves(train(flags | CP2, ranks=2), train(flags))


def test_report_names_what_ran(single):
    """Trap 15: the implementation of every operation is printed at the end."""
    log = single[2].log
    for operation in ("compressor", "key_lists", "norm_rope", "rotate", "sparse_indexer_loss"):
        assert f">   {operation}: torch" in log, operation
    assert log.count("> megatron_dsa counts") == 1  # of operations, in Megatron's throughput


def test_resume_equals_uninterrupted_in_bf16(data, tmp_path):
    """The optimizer holds 16-bit and fp32 parameters; sink and APE are saved as fp32."""
    state = check_resume(HYBRID | {"--data-path": data, "--bf16": True}, tmp_path)
    fp32 = [name for name in state if name.endswith(("attn_sink", "ape"))]
    weights = [name for name in fp32 if not name.startswith("optimizer")]
    # In the decoder and in the MTP layer: four sinks, five APEs, and Adam's two moments of each.
    assert len(weights) == 9 and len(fp32) >= 3 * 9
    assert {state[name].dtype for name in fp32} == {torch.float32}
    other = next(name for name in state if name.endswith("linear_kv_proj.weight"))
    assert state[other].dtype == torch.bfloat16


@pytest.mark.ranks(2)
def test_distributed_optimizer_in_bf16(data, tmp_path):
    """Two ranks train like one; weights and moments are saved under the right names."""
    flags = HYBRID | {"--data-path": data, "--bf16": True, "--train-iters": 2}
    distributed = {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}
    one = train(flags | {"--save": tmp_path / "one", "--save-interval": 2})
    saved = {"--save": tmp_path / "two", "--save-interval": 2}
    two = train(flags | distributed | saved, ranks=2)
    assert two.column("lm loss") == pytest.approx(one.column("lm loss"), rel=1e-4)
    expected, state = read(tmp_path / "one"), read(tmp_path / "two")
    moments = [name for name in state if name.startswith("optimizer.state.exp_avg")]
    weights = [name for name in state if name.startswith("optimizer.state.param.")]
    assert len(moments) == 2 * len(weights) > 100
    for name in moments + weights:
        same = expected[name.replace("state.param.", "state.fp32_param.")]
        assert relative_error(state[name], same) < 1e-5, name

    # Parameters may arrive late, also those that are read without their module being called. Not
    # saved: with several buckets, megatron-core 0.19 itself saves under wrong names.
    overlap = {"--overlap-grad-reduce": True, "--overlap-param-gather": True}
    overlapped = train(flags | distributed | overlap | {"--ddp-bucket-size": 1}, ranks=2)
    assert overlapped.column("lm loss") == pytest.approx(two.column("lm loss"), rel=1e-4)


@pytest.mark.ranks(2)
def test_dense_to_warmup_to_sparse(data, tmp_path):
    """Trap 21: each stage resumes from the one before; the frozen model stays as it was."""
    flags = HYBRID | {"--data-path": data, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 2}
    dense = train(flags | {"--dsa-stage": "dense", "--train-iters": 2})
    assert "indexer loss" not in dense.steps[-1]
    after_dense = read(tmp_path)
    assert not any(".indexer." in name for name in after_dense)

    rate = {"--lr": 1e-2, "--min-lr": 1e-2}
    # Nothing is trained in the first pipeline stage.
    layout = NO_INDEXER_IN_FIRST_STAGE | FULL_RECOMPUTE
    warmup = train(flags | {"--dsa-stage": "warmup", "--train-iters": 12} | rate | layout, ranks=2)
    assert "of stage dense, this run of stage warmup" in warmup.log
    assert warmup.steps[0]["iteration"] == 3
    assert warmup.column("indexer loss")[-1] < 0.9 * warmup.column("indexer loss")[0]
    after_warmup = read(tmp_path)
    states = [name for name in after_warmup if name.startswith("optimizer.state.exp_avg.")]
    assert len(states) == 2 * 6 and all(".indexer." in name for name in states)
    for name, tensor in after_dense.items():
        if not name.startswith(("optimizer", "rng")):
            assert tensor.equal(after_warmup[name]), name

    sparse = train(flags | {"--train-iters": 14})
    assert "has no indexers" not in sparse.log and "the optimizer starts anew" in sparse.log
    assert sparse.steps[0]["iteration"] == 13
    assert sparse.steps[0]["indexer loss"] > 0
    assert sparse.steps[-1]["lm loss"] < dense.steps[0]["lm loss"]


def test_packed_documents(short_documents):
    """Documents of a sample packed (THD) through Megatron's own data set; loss falls."""
    run = train(
        HYBRID
        | {
            "--data-path": short_documents,
            "--dataloader-inter-document-masking": True,
            "--train-iters": 6,
            "--micro-batch-size": 4,
        }
    )
    losses = run.column("lm loss")
    assert losses[-1] < 0.9 * losses[0]
    assert run.column("indexer loss")[-1] > 0


def test_refusals_name_the_flags(data):
    """All of them at once, before anything is built."""
    wrong = {"--csa-compress-rotary-base": None, "--csa-compress-ratios": [0, 4, 16]}
    run = train(HYBRID | wrong | {"--data-path": data}, check=False)
    assert run.returncode != 0 and not run.steps
    assert "--csa-compress-rotary-base is required" in run.log
    assert "--csa-compress-ratios must hold one ratio per layer" in run.log
    assert "multi-token prediction included (4), got 3" in run.log
