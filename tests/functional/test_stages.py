"""Training like users: resume, change of stage, recompute with shared indices, rejected flags."""

import pytest
import torch

from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import check_resume, compare, compare_curves
from tests.functional.launch import train
from tests.functional.parallel_flags import CP2, FULL_RECOMPUTE, PACKED

SHARED = {
    "--num-layers": 4,
    "--dsa-indexer-topk-freq": 2,
    "--dsa-indexer-skip-topk-offset": 1,
}
#: Everything that a report shows without a GPU.
WRITTEN = {
    "--log-timers-to-tensorboard": True,
    "--log-throughput": True,
    "--dsa-time-operations": True,
}
CORE_RECOMPUTE = {
    "--recompute-granularity": "selective",
    "--recompute-modules": ["core_attn"],
}


@pytest.mark.parametrize("share", [1.0, 1 / 4])
def test_resume_equals_uninterrupted(data, tmp_path, share):
    longer = {"--seq-length": 256, "--max-position-embeddings": 256} if share < 1 else {}
    check_resume({"--data-path": data, "--dsa-indexer-loss-queries": share} | longer, tmp_path)


def test_dense_to_warmup_to_sparse(data, tmp_path):
    flags = {"--data-path": data, "--save": tmp_path, "--load": tmp_path, "--save-interval": 4}
    flags |= WRITTEN | {"--tensorboard-dir": tmp_path / "events"}
    dense = train(flags | {"--dsa-stage": "dense", "--train-iters": 4})
    assert "indexer loss" not in dense.steps[-1] or dense.steps[-1]["indexer loss"] == 0
    after_dense = read(tmp_path)
    assert not any(".indexer." in name for name in after_dense)

    warmup = train(
        flags
        | {"--dsa-stage": "warmup", "--train-iters": 12, "--dsa-indexer-use-sparse-loss": None}
        | {"--lr": 1e-2, "--min-lr": 1e-2}
        | FULL_RECOMPUTE
    )
    assert "has no indexers" in warmup.log and "the optimizer starts anew" in warmup.log
    assert warmup.steps[0]["iteration"] == 5
    assert warmup.column("indexer loss")[-1] < 0.8 * warmup.column("indexer loss")[0]
    after_warmup = read(tmp_path)
    states = [name for name in after_warmup if name.startswith("optimizer.state.exp_avg.")]
    assert states and all(".indexer." in name for name in states)
    for name, tensor in after_dense.items():
        if not name.startswith("optimizer") and not name.startswith("rng"):
            assert tensor.equal(after_warmup[name]), name

    sparse = train(flags | {"--dsa-stage": "sparse", "--train-iters": 16} | FULL_RECOMPUTE)
    assert "has no indexers" not in sparse.log and "the optimizer starts anew" in sparse.log
    assert sparse.steps[0]["iteration"] == 13
    # Far below an untrained model's loss.
    assert sparse.steps[0]["lm loss"] < 0.9 * dense.steps[0]["lm loss"]
    after_sparse = read(tmp_path)
    trained = [name for name in after_warmup if name in after_sparse and "rng" not in name]
    assert any(not after_sparse[n].equal(after_warmup[n]) for n in trained if ".indexer." not in n)

    again = train(
        flags
        | {"--dsa-stage": "sparse", "--train-iters": 17, "--override-opt_param-scheduler": True}
    )
    assert "the optimizer starts anew" not in again.log
    check_report(tmp_path / "events", again)


def check_report(folder, end):
    """Check the stages' events against the last log, and their report."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    from megatron_dsa.extras.cli import main
    from megatron_dsa.extras.report import facts
    from megatron_dsa.extras.report.events import read_run

    run = read_run("stages", folder)
    assert [step for step, _ in run.scalars["lm loss"]] == list(range(1, 18))
    assert [step for step, _ in run.scalars["dsa/indexer-loss"]] == list(range(5, 18))
    assert [step for step, _ in run.scalars["dsa/mass-captured"]] == list(range(13, 18))
    for tag, name in (
        ("dsa/indexer-loss", "indexer loss"), ("dsa/query-overlap", "dsa query overlap")
    ):  # fmt: skip
        assert run.scalars[tag][-1][1] == pytest.approx(end.steps[-1][name], rel=1e-4)
        layers = run.layers(tag)
        assert list(layers) == [1, 2]
        mean = sum(series[-1][1] for series in layers.values()) / 2
        assert run.scalars[tag][-1][1] == pytest.approx(mean, rel=1e-5)
    # Two layers and four microbatches.
    ran = facts.calls(run)
    assert sum(ran["dense_attention"].values()) >= 2 * 4 * 12
    assert sum(ran["sparse_attention_backward"].values()) == 2 * 4 * 5
    shares = facts.step_shares(run)
    assert "sparse_attention_backward" in shares and "dense_attention" not in shares
    assert min(shares.values()) > 0
    page = folder / "report.html"
    assert main(["report", str(folder), "--output", str(page)]) == 0
    assert "DSA, stage sparse, K = 16" in page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shared_start(data, tmp_path_factory):
    """Train a checkpoint whose layers 2 and 4 reuse the selection of layers 1 and 3."""
    directory = tmp_path_factory.mktemp("shared")
    flags = {"--data-path": data, "--save": directory, "--train-iters": 3, "--save-interval": 3}
    train(SHARED | flags)
    indexers = [name for name in read(directory) if name.startswith("decoder.layers.")]
    indexers = [name for name in indexers if ".indexer." in name]
    assert {name.split(".")[2] for name in indexers} == {"0", "2"}
    return directory


@pytest.fixture(scope="module")
def shared_single(one_step, shared_start):
    return one_step(SHARED | {"--load": shared_start})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", [FULL_RECOMPUTE, CORE_RECOMPUTE], ids=["full", "core"])
def test_shared_indices_under_recompute_and_pipeline(
    one_step, shared_start, shared_single, recompute
):
    """A recomputed layer must use its microbatch's selection, with several in flight."""
    base = SHARED | {"--load": shared_start}
    pipelined = one_step(base | recompute | {"--pipeline-model-parallel-size": 2}, 2)
    compare(pipelined, shared_single, 2e-5)


@pytest.mark.ranks(2)
def test_shared_indices_do_not_cross_pipeline_stages(data):
    run = train(
        SHARED | {"--data-path": data, "--num-layers": 2, "--pipeline-model-parallel-size": 2},
        ranks=2,
        check=False,
    )
    assert run.returncode != 0
    assert "index sharing does not cross pipeline stages" in run.log
    assert not run.steps


@pytest.mark.ranks(2)
def test_packed_documents(short_documents):
    flags = PACKED | {"--data-path": short_documents, "--train-iters": 6, "--micro-batch-size": 4}
    run = train(flags)
    losses = run.column("lm loss")
    assert losses[-1] < 0.9 * losses[0]
    compare_curves(train(flags | CP2, ranks=2), run)


def test_experts_and_multi_token_prediction(data, tmp_path):
    run = train(
        {
            "--data-path": data,
            "--save": tmp_path,
            "--save-interval": 1,
            "--train-iters": 1,
            "--num-experts": 4,
            "--moe-layer-freq": "[0,1]",
            "--moe-router-topk": 2,
            "--moe-ffn-hidden-size": 32,
            "--mtp-num-layers": 1,
        }
    )
    assert run.steps[0]["mtp_1 loss"] > 0
    state = read(tmp_path)
    mtp = [n for n in state if n.startswith("optimizer.state.exp_avg.mtp") and ".indexer." in n]
    assert len(mtp) == 5
    assert all(state[name].norm() > 0 for name in mtp)


def test_no_fused_package_falls_back_aloud(data):
    run = train({"--data-path": data, "--train-iters": 1})
    if torch.cuda.is_available():
        start = "dispatch:sparse_attention_forward:"
        line = next(x for x in run.log.splitlines() if start in x)
        assert "torch" in line and "flashmla" in line
        assert run.log.count(start) == 1
    else:
        assert run.log.count("no GPU: torch runs everything") == 1
        assert "rejected:" not in run.log
    unfused = train({"--data-path": data, "--train-iters": 1, "--attention-backend": "dsa_unfused"})
    assert unfused.column("lm loss") == pytest.approx(run.column("lm loss"), rel=1e-2)


def test_strict_refuses_before_training(data):
    run = train({"--data-path": data, "--dsa-strict": True}, check=False)
    assert run.returncode != 0
    assert "--dsa-strict refuses" in run.log
    assert not run.steps


def test_checkpoint_of_another_model_is_refused(data, tmp_path):
    flags = {
        "--data-path": data, "--save": tmp_path, "--load": tmp_path, "--save-interval": 1,
        "--train-iters": 1, "--dsa-stage": "dense", "--num-layers": 1,
    }  # fmt: skip
    train(flags)
    other = {"--train-iters": 2, "--q-lora-rank": None, "--qk-layernorm": None}
    run = train(flags | other, check=False)
    assert run.returncode != 0 and "does not hold" in run.log and "linear_q_proj" in run.log


def test_stacked_checkpoint_into_layers_that_share(data, tmp_path):
    """Plain checkpoints stack layers in one tensor; differing layers are saved apart."""
    flags = {"--data-path": data, "--save": tmp_path, "--load": tmp_path, "--save-interval": 1}
    sharing = {"--dsa-indexer-topk-freq": 2}
    dense = train(flags | {"--dsa-stage": "dense", "--train-iters": 1})
    stacked = read(tmp_path)
    assert any(name.startswith("decoder.layers.self_attention") for name in stacked)
    frozen = {"--lr": 0.0, "--min-lr": 0.0, "--override-opt_param-scheduler": True}
    sparse = train(flags | sharing | frozen | {"--dsa-stage": "sparse", "--train-iters": 2})
    assert "go by another name" in sparse.log
    apart = read(tmp_path)
    for name, tensor in stacked.items():
        if not name.startswith("decoder.layers."):
            continue
        for layer in range(2):
            one = apart[name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)]
            assert one.equal(tensor[layer]), name
    assert len(dense.steps) == 1


@pytest.mark.ranks(2)
def test_overlapped_parameter_gathering(data):
    """The absorbed weight is read without a module call, so its gather must be awaited
    explicitly.
    """
    flags = {
        "--data-path": data,
        "--train-iters": 4,
        "--use-distributed-optimizer": True,
        "--overlap-grad-reduce": True,
    }
    plain = train(flags, ranks=2)
    overlapped = train(flags | {"--overlap-param-gather": True, "--ddp-bucket-size": 1}, ranks=2)
    assert overlapped.column("lm loss") == pytest.approx(plain.column("lm loss"), rel=1e-5)


def test_warmup_widened_to_everything(data, tmp_path):
    """Training more parameters must restart the optimizer instead of failing."""
    flags = {"--data-path": data, "--save": tmp_path, "--load": tmp_path, "--save-interval": 1}
    flags |= {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}
    train(flags | {"--train-iters": 1})
    wider = train(flags | {"--train-iters": 2, "--dsa-warmup-train-all": True})
    assert "of stage warmup (indexers), this run of stage warmup (everything)" in wider.log
    # From there the sparse stage trains the same parameters.
    sparse = {"--dsa-stage": "sparse", "--train-iters": 3, "--override-opt_param-scheduler": True}
    assert "the optimizer starts anew" not in train(flags | sparse).log


@pytest.mark.ranks(3)
def test_multi_token_prediction_on_a_middle_stage(data):
    layout = {
        "--pipeline-model-parallel-size": 3,
        "--pipeline-model-parallel-layout": "Et|tm|L",
        "--mtp-num-layers": 1,
        "--data-path": data,
        "--train-iters": 2,
    }
    run = train(layout, ranks=3)
    assert run.steps[-1]["mtp_1 loss"] > 0
