"""The log of a run that starts from a checkpoint of another stage."""

import argparse

import pytest
import torch

from tests.host import start


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [
        ({}, True),
        ({"dsa_stage": "sparse"}, False),
        ({"dsa_stage": "warmup"}, False),
    ],
)
def test_indexers_that_stage_dense_drops(changes, dropped, tmp_path, capsys):
    start()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_dsa.training.checkpoints import prepare_loading

    names = ["decoder.layers.self_attention.linear_proj.weight"]
    names += [
        f"decoder.layers.self_attention.core_attention.indexer.{name}.weight"
        for name in ("linear_wq_b", "linear_wk")
    ]
    names.append("optimizer.state.exp_avg." + names[-1])
    state = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(4)) for name in names}
    folder = tmp_path / "release"
    folder.mkdir()
    dist_checkpointing.save(state, str(folder))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    args = argparse.Namespace(
        load=str(tmp_path), pretrained_checkpoint=None, ckpt_step=None, finetune=False,
        no_load_optim=False, dsa_indexer_loss_coeff=1.0, dsa_warmup_train_all=False, save=None,
        **{"dsa_stage": "dense"} | changes,
    )  # fmt: skip
    prepare_loading(args)
    said = capsys.readouterr().out
    expected = "has indexers, stage dense has none: 2 tensors are dropped"
    assert (expected in said) == dropped
