"""A whole DeepSeek-V4 through the training entry point, in every parallel layout.

Window, CSA and HCA layers on four streams, experts with hash routing, and a CSA layer for
multi-token prediction. Loss and every gradient equal one process, as in ``test_parity.py``.
"""

import json
import re

import pytest
import torch

from megatron_dsa.layers.v4.hash_table import balanced_table
from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import (
    TOLERANCE,
    check_layout,
    check_resume,
    compare,
    compare_curves,
    layout_cases,
)
from tests.functional.launch import SPARSE, launch, train
from tests.functional.parallel_flags import (
    CP2,
    FULL_RECOMPUTE,
    LAYOUTS,
    PACKED,
    TP2_HEADS,
    TP2_SEQUENCE,
)
from tests.helpers import relative_error

EXPERTS = {
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-router-load-balancing-type": "none",
    "--moe-router-score-function": "sqrtsoftplus",
    "--moe-router-topk-scaling-factor": 1.5,
    "--moe-router-enable-expert-bias": True,
    "--moe-hash-layers": 1,
    "--moe-hash-seed": 3,
}
STREAMS = {"--hc-mult": 4, "--hc-sinkhorn-iters": 5}
V4 = (
    EXPERTS
    | STREAMS
    | {
        "--num-layers": 3,
        "--mtp-num-layers": 1,
        "--moe-shared-expert-intermediate-size": 32,
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
)
NO_MTP = {"--mtp-num-layers": None, "--csa-compress-ratios": V4["--csa-compress-ratios"][:3]}
EP2 = {"--expert-model-parallel-size": 2}
QUERIES_AGAIN = {"--dsa-recompute": "queries"}
EXPERT_RECOMPUTE = {"--recompute-granularity": "selective", "--recompute-modules": ["moe"]}
DISTRIBUTED = {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}


def stages(layout, ranks=2):
    """Return flags of pipeline stages; ``E`` embedding, ``t`` layer, ``m`` MTP layer, ``L``
    loss.
    """
    return {
        "--pipeline-model-parallel-size": ranks, "--pipeline-model-parallel-layout": layout
    }  # fmt: skip


#: The first stage has a window layer with hash routing, and no indexer.
NO_INDEXER_IN_FIRST_STAGE = stages("Et|ttmL")
SHARED_LAYOUTS = (
    "one microbatch of 8 instead of four of 2", "selective recompute", "small workspace"
)  # fmt: skip
V4_LAYOUTS = {name: LAYOUTS[name] for name in SHARED_LAYOUTS} | {
    "TP2 by heads and CP2, per-token loss": (
        TP2_HEADS | CP2 | {"--calculate-per-token-loss": True}, 4,
    ),
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "CP2, full recompute": (CP2 | FULL_RECOMPUTE, 2),
    "queries computed again": (QUERIES_AGAIN, 1),
    "CP2, full recompute, queries computed again": (CP2 | FULL_RECOMPUTE | QUERIES_AGAIN, 2),
    # Two microbatches are in flight.
    "PP2, first stage without an indexer, full recompute": (
        NO_INDEXER_IN_FIRST_STAGE | FULL_RECOMPUTE, 2,
    ),
    "PP2, experts recomputed": (stages("Ett|tmL") | EXPERT_RECOMPUTE, 2),
    "PP2 interleaved, TP2 by sequence": (stages("Et|t|t|mL") | TP2_SEQUENCE, 4),
    # Stages exchange streams, then streams and the main head's output, then outputs of heads.
    "stages of prediction and of the loss alone": (stages("Ett|t|m|L", 4), 4),
    "DP2 and EP2, distributed optimizer": (EP2 | DISTRIBUTED, 2),
    "EP2 over TP2 by heads, all-gather dispatcher": (
        TP2_HEADS
        | EP2
        | {"--expert-tensor-parallel-size": 1, "--moe-token-dispatcher-type": "allgather"},
        2,
    ),
}  # fmt: skip
#: DSA layers under streams and prediction, dense and with experts.
DSA = STREAMS | {
    "--num-layers": 4,
    "--mtp-num-layers": 2,
    "--num-experts": 4,
    "--moe-layer-freq": "([0]*2+[1]*2)",
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-router-load-balancing-type": "none",
}
DSA_LAYOUTS = {
    "PP2 interleaved, TP2 by sequence": (
        TP2_SEQUENCE
        | {"--pipeline-model-parallel-size": 2, "--num-layers-per-virtual-pipeline-stage": 1},
        4,
    ),
    "prediction with the loss, CP2, full recompute": (
        stages("Etttt|mmL") | CP2 | FULL_RECOMPUTE, 4,
    ),
}  # fmt: skip


def is_connection(name):
    return ".hc_" in name


def tables_of(state):
    return {name: tensor for name, tensor in state.items() if name.endswith("tid2eid")}


@pytest.fixture(scope="module")
def v4_step(steps_of):
    return steps_of(V4)


@pytest.fixture(scope="module")
def single(v4_step):
    """Return the reference: one process, four microbatches."""
    step, gradients, result = v4_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    assert not tables_of(gradients)  # not trained
    parts = {name: sum(name in key for key in gradients) for name in (".indexer.", "ape", ".hc_")}
    # An indexer has two linears and four compressor parameters. Connections: attention and MLP;
    # decoder and prediction layer have a head each.
    assert parts == {".indexer.": 2 * 6, "ape": 3 + 2, ".hc_": 4 * 6 + 2 * 3}
    assert step["mtp_1 loss"] > 0
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(V4_LAYOUTS))
def test_layout(name, single, v4_step):
    check_layout(name, V4_LAYOUTS[name], single, v4_step)


@pytest.fixture(scope="module")
def dsa_step(steps_of):
    return steps_of(DSA)


@pytest.fixture(scope="module")
def dsa_single(dsa_step):
    return dsa_step()


@pytest.mark.parametrize("name", layout_cases(DSA_LAYOUTS))
def test_streams_of_dsa_layers(name, dsa_single, dsa_step):
    check_layout(name, DSA_LAYOUTS[name], dsa_single, dsa_step)


def test_shared_selections(steps_of):
    step = steps_of(
        {"--num-layers": 3, "--hc-mult": 2, "--dsa-indexer-topk-freq": 2, "--mtp-num-layers": 1}
        | {"--dsa-indexer-skip-topk-offset": 1}
    )
    check_layout("full recompute", (FULL_RECOMPUTE, 1), step(), step)


@pytest.mark.ranks(2)
def test_packed_documents_over_context_parallel_ranks(short_documents):
    flags = V4 | NO_MTP | PACKED | {"--data-path": short_documents}
    compare_curves(train(flags | CP2, ranks=2), train(flags))


@pytest.mark.ranks(2)
def test_packed_documents_in_a_pipeline(steps_of, short_documents):
    """Targets must stay within a document, also with prediction on another stage than the
    decoder.
    """
    flags = {"--dataloader-inter-document-masking": True, "--micro-batch-size": 1}
    step = steps_of(V4 | flags | {"--data-path": short_documents})
    check_layout("prediction apart", (stages("Ettt|mL"), 2), step(), step)


@pytest.mark.ranks(2)
def test_first_stage_without_losses_of_experts(steps_of):
    """A first stage of hash layers has no balancing loss, and Megatron's log sums over stages."""
    losses = {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.01}
    step = steps_of(V4 | losses | {"--moe-z-loss-coeff": 0.001})
    one, two = step(), step(NO_INDEXER_IN_FIRST_STAGE, 2)
    compare(two, one, TOLERANCE)
    for figure in ("load_balancing_loss", "z_loss"):
        assert one[0][figure] > 0
        assert two[0][figure] == pytest.approx(one[0][figure], rel=1e-4), figure


def test_report_names_what_ran(single):
    log, name = single[2].log, "triton" if torch.cuda.is_available() else "torch"
    for operation in (
        "compressor", "key_lists", "norm_rope", "rotate", "sparse_indexer_loss",
        "hyper_connection_read", "hyper_connection_write", "hyper_connection_head",
    ):  # fmt: skip
        assert re.search(rf">   {operation}: (torch|{name})", log), operation
    assert log.count("> megatron_dsa counts") == 1  # of operations, in Megatron's throughput


def test_resume_equals_uninterrupted_in_bf16(data, tmp_path):
    changes = {"--data-path": data, "--bf16": True, "--moe-router-dtype": "fp32"}
    state = check_resume(V4 | changes, tmp_path)
    fp32 = [name for name in state if is_connection(name) or name.endswith(("attn_sink", "ape"))]
    weights = [name for name in fp32 if not name.startswith("optimizer")]
    # In decoder and prediction: 30 of connections, four sinks, five APEs, with two moments each.
    assert len(weights) == 30 + 4 + 5 and len(fp32) >= 3 * len(weights)
    assert {state[name].dtype for name in fp32} == {torch.float32}
    other = next(name for name in state if name.endswith("linear_kv_proj.weight"))
    assert state[other].dtype == torch.bfloat16
    ((name, table),) = tables_of(state).items()
    assert name == "decoder.layers.0.mlp.router.tid2eid"
    assert table.equal(balanced_table(264, 2, 4, 3 * 3))
    biases = [tensor for name, tensor in state.items() if name.endswith("expert_bias")]
    assert len(biases) == 3 and all(bias.abs().max() > 0 for bias in biases)


@pytest.mark.ranks(2)
def test_distributed_optimizer_in_bf16(data, tmp_path):
    flags = V4 | {"--data-path": data, "--bf16": True, "--train-iters": 1}
    flags |= {"--moe-router-dtype": "fp32"}
    one = train(flags | {"--save": tmp_path / "one", "--save-interval": 1})
    saved = {"--save": tmp_path / "two", "--save-interval": 1}
    two = train(flags | DISTRIBUTED | saved, ranks=2)
    for loss in ("lm loss", "mtp_1 loss"):
        assert two.column(loss) == pytest.approx(one.column(loss), rel=1e-4), loss
    expected, state = read(tmp_path / "one"), read(tmp_path / "two")
    moments = [name for name in state if name.startswith("optimizer.state.exp_avg")]
    weights = [name for name in state if name.startswith("optimizer.state.param.")]
    assert len(moments) == 2 * len(weights) > 100
    for name in filter(is_connection, moments + weights):
        # A plain optimizer has no copy of a parameter in fp32.
        same = expected[name.removeprefix("optimizer.state.param.")]
        assert relative_error(state[name], same) < 1e-5, name

    # Parameters may arrive late, also those read without a module call. Not saved: with several
    # buckets, megatron-core 0.19 saves wrong names.
    overlap = {"--overlap-grad-reduce": True, "--overlap-param-gather": True}
    overlap |= {"--ddp-bucket-size": 1, "--train-iters": 2}
    late = train(flags | DISTRIBUTED | overlap, ranks=2)
    straight = train(flags | {"--train-iters": 2})
    for loss in ("lm loss", "mtp_1 loss"):
        assert late.column(loss) == pytest.approx(straight.column(loss), rel=1e-4), loss


@pytest.mark.ranks(2)
def test_dense_to_warmup_to_sparse(data, tmp_path):
    flags = V4 | {"--data-path": data, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 2}
    dense = train(flags | {"--dsa-stage": "dense", "--train-iters": 2})
    assert "indexer loss" not in dense.steps[-1]
    after_dense = read(tmp_path)
    assert not any(".indexer." in name for name in after_dense)

    rate = {"--lr": 1e-2, "--min-lr": 1e-2}
    # Nothing is trained in the first stage.
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


def test_table_of_the_checkpoint_is_taken(short_documents, tmp_path):
    """The checkpoint's table must override the seed's, also in evaluation."""
    flags = V4 | {"--data-path": short_documents, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 2, "--eval-iters": 1, "--eval-interval": 2, "--split": "90,10,0"}
    flags |= {"--override-opt-param-scheduler": True}
    train(flags | {"--train-iters": 2})
    before = tables_of(read(tmp_path))
    run = train(flags | {"--train-iters": 4, "--moe-hash-seed": 8})
    assert "validation loss at iteration 4" in run.log
    after = tables_of(read(tmp_path))
    assert before.keys() == after.keys() and len(before) == 1
    assert all(tensor.equal(after[name]) for name, tensor in before.items())

    for layers in (0, 2):
        other = flags | {"--moe-hash-layers": layers, "--moe-hash-seed": None}
        run = train(other, check=False)
        assert run.returncode != 0 and not run.steps
        assert "--moe-hash-layers must be 1, as in checkpoint" in run.log, layers
    for changes, message in (
        ({"--moe-router-topk": 3}, "--moe-router-topk must be 2, as in checkpoint"),
        ({"--padded-vocab-size": 272}, "give --padded-vocab-size 264"),
        ({"--padded-vocab-size": None}, "must be 264, .* got 384: .* --padded-vocab-size 264"),
    ):
        run = train(flags | changes, check=False)
        assert run.returncode != 0 and not run.steps
        assert re.search(message, run.log), changes


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"--normalization": "LayerNorm", **EXPERT_RECOMPUTE}
            | {"--recompute-modules": ["layernorm"]},
            ("--normalization must be RMSNorm",
             "--recompute-modules must not name layernorm with --hc-mult 4"),
        ),
        (
            {"--moe-hash-layers": 2, "--moe-router-load-balancing-type": "sinkhorn"}
            | {"--moe-aux-loss-coeff": 0.0}
            | stages("Et|ttmL"),
            ("--moe-hash-layers (2) must lie on the first pipeline stage",
             "--moe-router-load-balancing-type must not be sinkhorn"),
        ),
        (
            {"--csa-compress-rotary-base": None, "--csa-compress-ratios": [0, 4, 16]},
            ("--csa-compress-rotary-base is required",
             "--csa-compress-ratios must hold one ratio per layer",
             "multi-token prediction included (4), got 3"),
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_flags(changes, messages, data):
    ranks = changes.get("--pipeline-model-parallel-size", 1)
    run = train(V4 | changes | {"--data-path": data}, ranks=ranks, check=False)
    assert run.returncode != 0 and not run.steps
    assert all(message in run.log for message in messages), run.log[-3000:]


def test_export_as_another_model_is_refused(data, tmp_path):
    hashed = EXPERTS | {"--num-layers": 4, "--moe-hash-layers": 2}
    save = {"--data-path": data, "--save": tmp_path / "run", "--save-interval": 1}
    train(hashed | save | {"--train-iters": 1})
    config = tmp_path / "config.json"
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {"num_hidden_layers": 4, "first_k_dense_replace": 0, "scoring_func": "sigmoid"}
    more |= {"routed_scaling_factor": 1.5, "norm_topk_prob": True, "n_shared_experts": 0}
    more |= {"n_group": 1, "topk_group": 1}
    config.write_text(json.dumps(SPARSE | experts | more))
    run = launch(
        {"export-hf": True, "--input": tmp_path / "run", "--config": config}
        | {"--output": tmp_path / "out"},
        module="megatron_dsa",
        check=False,
    )
    assert run.returncode != 0
    assert "has hash-routing, and config.json, of a deepseek_v32, has not" in run.log
