"""A killed run resumes to the same bits. Single optimizers:
tests/unit/patches/test_optimizers.py.
"""

import pytest

from tests.functional.checkpoint_reader import read
from tests.functional.launch import train
from tests.functional.muon_flags import MUON

DISTRIBUTED = {"--use-distributed-optimizer": True}
RESHARDABLE = DISTRIBUTED | {"--dist-ckpt-optim-fully-reshardable": True}
#: Communication as in launch.sh, with several buckets.
OVERLAP = {
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--ddp-bucket-size": 5000,
}
ADAPTIVE_MUON = MUON | {"--optimizer": "adaptive_muon", "--bf16": True}
#: Name: (flags, ranks).
OPTIMIZERS = {
    "plain-fp32": ({}, 1),
    "sgd-bf16": ({"--bf16": True, "--optimizer": "sgd"}, 1),
    "adaptive_muon-layer-wise": (ADAPTIVE_MUON | DISTRIBUTED, 2),
    "distributed-bf16-overlapped": (DISTRIBUTED | OVERLAP | {"--bf16": True}, 2),
    "reshardable-bf16-overlapped": (RESHARDABLE | OVERLAP | {"--bf16": True}, 2),
}


def check_same_state(one, two):
    """Check that two folders hold equal checkpoints, without padding of buckets."""
    state, other = read(one), read(two)
    assert set(state) == set(other)
    model = [name for name in state if name.startswith(("decoder.", "embedding.", "output_layer."))]
    weights = sum(state[name].numel() for name in model)
    buckets = {name for name in state if "gbuf_idx" in name}
    for name in set(state) - buckets:
        assert state[name].equal(other[name]), name
    # Padding between parameters is never written.
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        names = [name for name in buckets if name.endswith(f".{kind}")]
        padding = sum(state[name].numel() for name in names) - weights
        different = sum((state[name] != other[name]).sum().item() for name in names)
        assert not names or different <= padding < weights / 10, kind


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_killed_run_resumes(name, data, tmp_path):
    optimizer, ranks = OPTIMIZERS[name]
    if "muon" in name:
        pytest.importorskip("emerging_optimizers", minversion="0.3")
    flags = {"--data-path": data, "--train-iters": 5, "--deterministic-mode": True} | optimizer
    whole = train(flags | {"--save": tmp_path / "whole", "--save-interval": 5}, ranks=ranks)
    flags |= {"--save": tmp_path / "part", "--load": tmp_path / "part", "--save-interval": 2}
    in_step = train(flags, ranks=ranks, check=False, kill_at="iteration        3/")
    assert in_step.returncode != 0 and len(in_step.steps) < 5
    in_save = train(
        flags, ranks=ranks, check=False, kill_at="saving checkpoint at iteration       4"
    )
    assert in_save.returncode != 0 and "successfully saved" not in in_save.log
    assert [step["iteration"] for step in in_save.steps] == [3, 4]
    tracker = tmp_path / "part" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "2"
    rest = train(flags, ranks=ranks)
    assert [step["iteration"] for step in rest.steps] == [3, 4, 5]
    for figure in ("lm loss", "indexer loss", "grad norm"):
        assert rest.column(figure) == whole.column(figure)[2:], figure
    check_same_state(tmp_path / "whole", tmp_path / "part")
