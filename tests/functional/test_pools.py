"""``--dsa-indexer-pool-size`` through the entry point: stages, precision, resume, layouts."""

import pytest

from tests.functional.comparisons import check_resume
from tests.functional.launch import train
from tests.functional.parallel_flags import FULL_RECOMPUTE, TP2_SEQUENCE

POOLS = {
    "--dsa-indexer-pool-size": 4,
    "--qk-pos-emb-head-dim": 0,
    "--no-dsa-indexer-rotate-activation": True,
}
PRECISIONS = {
    "plain": {},
    "distributed": {
        "--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("optimizer", PRECISIONS)
def test_resume(optimizer, data, tmp_path):
    flags = POOLS | PRECISIONS[optimizer] | {"--bf16": True, "--data-path": data}
    state = check_resume(flags | {"--dsa-indexer-loss-queries": 0.5}, tmp_path)
    tables = [tensor for name, tensor in state.items() if name.endswith("indexer.pool_ape")]
    assert tables and all(str(table.dtype) == "torch.float32" for table in tables)
    assert all(table.abs().sum() > 0 for table in tables)


def test_index_sharing_with_all_layers_as_teachers(data):
    flags = POOLS | {"--num-layers": 3, "--dsa-indexer-topk-freq": 3, "--data-path": data}
    own, served, recomputed = (
        train(flags | more)
        for more in (
            {},
            {"--dsa-indexer-teacher": "served"},
            {"--dsa-indexer-teacher": "served"} | FULL_RECOMPUTE,
        )
    )
    assert served.column("lm loss")[0] == own.column("lm loss")[0]
    assert served.column("indexer loss") != own.column("indexer loss")
    for name in ("lm loss", "indexer loss"):
        assert recomputed.column(name) == pytest.approx(served.column(name), rel=1e-5), name


def test_warm_up_then_two_ranks(data, tmp_path):
    flags = POOLS | {"--data-path": data, "--save": tmp_path, "--save-interval": 4}
    warm = {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": False}
    losses = train(flags | warm).column("indexer loss")
    assert losses[-1] < losses[0]
    rest = {"--load": tmp_path, "--save": None, "--finetune": True, "--train-iters": 2}
    one, two = (train(flags | rest | more, ranks=n) for more, n in (({}, 1), (TP2_SEQUENCE, 2)))
    for name in ("lm loss", "indexer loss", "grad norm"):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-4), name


def test_refusals(data, tmp_path):
    flags = POOLS | {"--data-path": data, "--train-iters": 1}
    train(flags | {"--save": tmp_path, "--save-interval": 1})
    for changes, message in (
        ({"--dsa-indexer-pool-size": 1}, "--dsa-indexer-pool-size must be above 1, as in check"),
        ({"--dsa-indexer-pool-size": 0}, "--dsa-indexer-pool-size must be finite and at least 1"),
        ({"--dsa-indexer-pool-size": 2}, "pool_ape is [2, 4, 16] in checkpoint"),
    ):
        run = train(flags | {"--load": tmp_path, "--finetune": True} | changes, check=False)
        assert run.returncode == 2 and message in run.log and "Traceback" not in run.log, run.log
