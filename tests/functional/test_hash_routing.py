"""Hash routing through the training entry point, in every parallel layout.

As in ``test_parity.py``: loss and every gradient equal those of one process. A DSA model with dense
attention's frame around it, and a V4 with hyper-connections: routing belongs to the experts.
"""

import json
import re

import pytest

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

EXPERTS = {
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-router-load-balancing-type": "none",
    "--moe-router-score-function": "sqrtsoftplus",
    "--moe-router-topk-scaling-factor": 1.5,
    "--moe-router-enable-expert-bias": True,
    "--moe-hash-layers": 2,
    "--moe-hash-seed": 3,
}
HASH = EXPERTS | {"--num-layers": 4}
#: All of DeepSeek-V4's layer: attention, hyper-connections, shared expert, hash routing.
V4 = EXPERTS | {
    "--num-layers": 3,
    "--moe-shared-expert-intermediate-size": 32,
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
PP2 = {"--pipeline-model-parallel-size": 2}
#: Two layers per virtual stage: the first one has the hash layers.
INTERLEAVED = PP2 | {"--pipeline-model-parallel-layout": "Ett|t|t|L"}
EXPERT_RECOMPUTE = {"--recompute-granularity": "selective", "--recompute-modules": ["moe"]}
SHARED_LAYOUTS = (
    "DP2 with distributed optimizer",
    "one microbatch of 8 instead of four of 2",
)
HASH_LAYOUTS = {name: LAYOUTS[name] for name in SHARED_LAYOUTS} | {
    "TP2 by heads": (TP2_HEADS, 2),
    "TP2 by sequence and CP2": (TP2_SEQUENCE | CP2, 4),
    "CP2, full recompute": (CP2 | FULL_RECOMPUTE, 2),
    "CP2 contiguous": (CP2 | {"--dsa-cp-layout": "contiguous"}, 2),
    "PP2, full recompute": (PP2 | FULL_RECOMPUTE, 2),
    "PP2, experts recomputed": (PP2 | EXPERT_RECOMPUTE, 2),
    "PP2 interleaved": (INTERLEAVED, 2),
    "PP2 interleaved, experts recomputed, TP2 by heads": (
        INTERLEAVED | EXPERT_RECOMPUTE | TP2_HEADS, 4,
    ),
    "EP2 over DP2": ({"--expert-model-parallel-size": 2}, 2),
    "EP2 over TP2, all-gather dispatcher": (
        TP2_HEADS
        | {"--expert-model-parallel-size": 2, "--expert-tensor-parallel-size": 1}
        | {"--moe-token-dispatcher-type": "allgather"},
        2,
    ),
}  # fmt: skip
V4_LAYOUTS = {
    "TP2 by heads and CP2": (TP2_HEADS | CP2, 4),
    "PP2, experts recomputed": (
        PP2 | {"--pipeline-model-parallel-layout": "Ett|tL"} | EXPERT_RECOMPUTE, 2,
    ),
    "full recompute, EP2 over DP2": (FULL_RECOMPUTE | {"--expert-model-parallel-size": 2}, 2),
}  # fmt: skip


def tables_of(state):
    return {name: tensor for name, tensor in state.items() if name.endswith("tid2eid")}


@pytest.fixture(scope="module")
def hash_step(steps_of):
    """One step of the small model from a common checkpoint."""
    return steps_of(HASH)


@pytest.fixture(scope="module")
def single(hash_step):
    """The reference: one process, four microbatches."""
    step, gradients, result = hash_step()
    gates = [name for name in gradients if name.endswith("mlp.router.weight")]
    assert len(gates) == 4 and all(gradients[name].norm() > 0 for name in gates)
    assert not tables_of(gradients)  # no optimizer has them
    return step, gradients, result


@pytest.mark.parametrize("name", layout_cases(HASH_LAYOUTS))
def test_layout(name, single, hash_step):
    check_layout(name, HASH_LAYOUTS[name], single, hash_step)


@pytest.fixture(scope="module")
def v4_step(steps_of):
    return steps_of(V4)


@pytest.fixture(scope="module")
def v4_single(v4_step):
    return v4_step()


@pytest.mark.parametrize("name", layout_cases(V4_LAYOUTS))
def test_v4_layout(name, v4_single, v4_step):
    check_layout(name, V4_LAYOUTS[name], v4_single, v4_step)


@pytest.mark.ranks(2)
def test_packed_documents(short_documents):
    """Documents of any length over context-parallel ranks."""
    flags = HASH | PACKED | {"--data-path": short_documents}
    compare_curves(train(flags | CP2, ranks=2), train(flags))


@pytest.mark.ranks(2)
def test_first_stage_without_losses_of_experts(steps_of):
    """Trap 19: it has hash layers alone, and Megatron's log sums over stages; with prediction."""
    losses = {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.01}
    step = steps_of(HASH | losses | {"--moe-z-loss-coeff": 0.001, "--mtp-num-layers": 1})
    one, two = step(), step(PP2, 2)
    compare(two, one, TOLERANCE)
    for figure in ("load_balancing_loss", "z_loss"):
        assert one[0][figure] > 0
        assert two[0][figure] == pytest.approx(one[0][figure], rel=1e-4), figure


def test_resume_equals_uninterrupted_in_bf16(data, tmp_path):
    """Tables stay as they were made, in the model and in checkpoints; others' biases move."""
    changes = {"--data-path": data, "--bf16": True, "--moe-router-dtype": "fp32"}
    state = check_resume(V4 | changes, tmp_path)
    tables = tables_of(state)
    assert len(tables) == 2
    for layer in (0, 1):
        table = tables[f"decoder.layers.{layer}.mlp.router.tid2eid"]
        assert table.equal(balanced_table(264, 2, 4, 3 * 3 + layer))
    biases = [name for name in state if name.endswith("expert_bias")]
    assert biases == ["decoder.layers.2.mlp.router.expert_bias"]
    assert state[biases[0]].abs().max() > 0


def test_table_of_the_checkpoint_is_taken(short_documents, tmp_path):
    """Whatever the seed says; and evaluation passes route by it as well."""
    flags = HASH | {"--data-path": short_documents, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 2, "--eval-iters": 1, "--eval-interval": 2, "--split": "90,10,0"}
    flags |= {"--override-opt-param-scheduler": True}
    train(flags | {"--train-iters": 2})
    before = tables_of(read(tmp_path))
    run = train(flags | {"--train-iters": 4, "--moe-hash-seed": 8})
    assert "validation loss at iteration 4" in run.log
    after = tables_of(read(tmp_path))
    assert before.keys() == after.keys() and len(before) == 2
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


def test_other_layers_than_the_checkpoint_has_are_refused(data, tmp_path):
    flags = HASH | {"--data-path": data, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 1}
    train(flags | {"--train-iters": 1})
    for layers in (0, 1, 3):
        other = flags | {"--moe-hash-layers": layers, "--moe-hash-seed": None}
        run = train(other, check=False)
        assert run.returncode != 0 and not run.steps
        assert "--moe-hash-layers must be 2, as in checkpoint" in run.log, layers
    for changes, message in (
        ({"--moe-router-topk": 3}, "--moe-router-topk must be 2, as in checkpoint"),
        ({"--padded-vocab-size": 272}, "give --padded-vocab-size 264"),
        ({"--padded-vocab-size": None}, "must be 264, .* got 384: .* --padded-vocab-size 264"),
    ):
        run = train(flags | changes, check=False)
        assert run.returncode != 0 and not run.steps
        assert re.search(message, run.log), changes


@pytest.mark.ranks(2)
def test_frozen_main_model(data, tmp_path):
    """In stage warmup, in a pipeline, hash layers route as before and stay as they are."""
    flags = HASH | {"--data-path": data, "--save": tmp_path, "--load": tmp_path}
    flags |= {"--save-interval": 2}
    train(flags | {"--dsa-stage": "dense", "--train-iters": 2})
    before = read(tmp_path)
    train(flags | {"--dsa-stage": "warmup", "--train-iters": 4} | PP2, ranks=2)
    after = read(tmp_path)
    for name, tensor in before.items():
        if not name.startswith(("optimizer", "rng")):
            assert tensor.equal(after[name]), name


@pytest.mark.ranks(4)
def test_refusals_name_the_flags(data):
    """Before anything is built."""
    wrong = {
        "--pipeline-model-parallel-size": 4,
        "--moe-router-load-balancing-type": "sinkhorn",
        "--moe-aux-loss-coeff": 0.0,
    }
    run = train(HASH | wrong | {"--data-path": data}, ranks=4, check=False)
    assert run.returncode != 0 and not run.steps
    assert "--moe-hash-layers (2) must lie on the first pipeline stage" in run.log
    assert "--moe-router-load-balancing-type must not be sinkhorn" in run.log
    run = train({"--data-path": data, "--moe-hash-seed": 3}, check=False)
    assert "--moe-hash-seed has a meaning only with --moe-hash-layers" in run.log


def test_export_as_another_model_is_refused(data, tmp_path):
    """DeepSeek-V3.2's checkpoints have no place for the tables."""
    save = {"--data-path": data, "--save": tmp_path / "run", "--save-interval": 1}
    train(HASH | save | {"--train-iters": 1})
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
