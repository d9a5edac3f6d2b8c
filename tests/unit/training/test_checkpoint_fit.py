"""Complete checkpoints that do not fit a run: messages before Megatron reads them."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from megatron_dsa.errors import ConfigError
from megatron_dsa.training.checkpoint_fit import check_optimizer, check_shapes, say_layout
from tests import host

RUN = Namespace(
    optimizer="adam", muon_scalar_optimizer="adam", use_distributed_optimizer=False,
    use_layer_wise_distributed_optimizer=False, bf16=False, fp16=False, finetune=False,
    no_load_optim=False, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_layout=None,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1, no_save_optim=False,
    ckpt_format="torch_dist",
)  # fmt: skip
DISTRIBUTED = {"use_distributed_optimizer": True}
LAYER_WISE = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}
TP2 = {"tensor_model_parallel_size": 2}
#: The checkpoint's arguments, the run's, and the message.
MISFITS = {
    "optimizer": ({}, {"optimizer": "sgd"}, "--optimizer must be adam, as in .*, got sgd"),
    "scalars": (
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
        "--muon-scalar-optimizer must be adam, as in .*, got lion",
    ),
    "to distributed": ({}, DISTRIBUTED, "--use-distributed-optimizer must not be given.*Drop it"),
    "to plain": (DISTRIBUTED, {}, "--use-distributed-optimizer must be given.*Add it"),
    "to bf16": ({}, {"bf16": True}, "--bf16 and --fp16 must not be given.*Drop it"),
    "to fp32": ({"bf16": True}, {}, "--bf16 must be given.*Add it"),
    "TP": (DISTRIBUTED, DISTRIBUTED | TP2, "--tensor-model-parallel-size must be 1.*got 2.*Resume"),
    "PP": (
        DISTRIBUTED | {"pipeline_model_parallel_size": 2},
        DISTRIBUTED,
        "--pipeline-model-parallel-size must be 2.*got 1.*--dist-ckpt-optim-fully-reshardable",
    ),
    "EP": (
        DISTRIBUTED, DISTRIBUTED | {"expert_model_parallel_size": 4},
        "--expert-model-parallel-size must be 1.*got 4",
    ),
}  # fmt: skip
BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}
ANY = {"distrib_optim_sharding_type": "fully_reshardable"}


def changed(**changes):
    return Namespace(**vars(RUN) | changes)


def check(saved, run, metadata):
    check_optimizer(changed(**run), changed(**saved), metadata, Path("iter_0000001"))


@pytest.mark.parametrize("name", MISFITS)
def test_states_of_another_kind_or_layout(name):
    saved, run, message = MISFITS[name]
    with pytest.raises(ConfigError, match=rf"{message}.*--no-load-optim"):
        check(saved, run, BUCKETS)
    check(saved, saved, BUCKETS)
    check(saved, run | {"no_load_optim": True}, BUCKETS)
    check(saved | {"no_save_optim": True}, run, BUCKETS)


def test_states_that_fit():
    check(DISTRIBUTED, DISTRIBUTED | TP2, ANY)
    check(DISTRIBUTED, DISTRIBUTED | {"bf16": True}, ANY)
    check({}, TP2, {})
    check(LAYER_WISE, {"optimizer": "muon"}, BUCKETS)
    check({"optimizer": "muon"}, LAYER_WISE, {})
    check({"bf16": True}, {"fp16": True}, {})
    check({"optimizer": "dist_muon"}, {"optimizer": "muon"}, {})  # the former name
    stages = DISTRIBUTED | {"pipeline_model_parallel_size": 2}
    check(
        stages | {"pipeline_model_parallel_layout": "Et*2|t*2L"},
        stages | {"pipeline_model_parallel_layout": "Ett|ttL"},
        BUCKETS,
    )
    check(stages, stages | {"virtual_pipeline_model_parallel_size": 1}, BUCKETS)
    older = changed(**DISTRIBUTED)
    del older.expert_tensor_parallel_size
    check_optimizer(changed(**DISTRIBUTED), older, BUCKETS, Path("iter_0000001"))
    check_optimizer(
        changed(**DISTRIBUTED), None, {}, Path("iter_0000001")
    )  # no arguments were saved


def test_the_layout_is_said_at_start(capsys):
    for args, says in (
        (changed(**DISTRIBUTED, dist_ckpt_optim_fully_reshardable=False), True),
        (changed(**DISTRIBUTED, dist_ckpt_optim_fully_reshardable=True), False),
        (changed(dist_ckpt_optim_fully_reshardable=False), False),
        (
            changed(**DISTRIBUTED, no_save_optim=True, dist_ckpt_optim_fully_reshardable=False),
            False,
        ),
    ):
        say_layout(args)
        assert ("--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().out) == says


def test_shapes_and_buckets():
    def tensor(key, rows, **settings):
        return ShardedTensor.from_rank_offsets(key, torch.zeros(rows), **settings)

    def asked(entry):
        check_shapes({"model": {"x": entry}, "step": 3}, "iter_0000001", available)

    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_"
    entries = [tensor("decoder.weight", 4), tensor(f"{bucket}0.exp_avg", 8)]
    available = {entry.key: entry for entry in entries}
    for entry in entries:
        asked(entry)
    with pytest.raises(
        ConfigError, match=r"decoder.weight is \[4\] in checkpoint .* \[6\] in this"
    ):
        asked(tensor("decoder.weight", 6))
    asked(tensor("decoder.weight", 6, allow_shape_mismatch=True))  # padding of the vocabulary
    for other in (
        tensor(f"{bucket}0.exp_avg", 6),
        tensor(f"chained_0.{bucket}0.exp_avg", 8),
        ShardedObject(f"{bucket}1.per_bucket_numel", None, (1,), (0,)),
    ):
        with pytest.raises(ConfigError, match=r"in other buckets .*--ddp-bucket-size"):
            asked(other)


def test_a_pretrained_checkpoint_gives_no_optimizer(tmp_path):
    """Its optimizer is ignored; --load's must be checked."""
    host.start()
    from megatron.core import dist_checkpointing

    from megatron_dsa.training.checkpoints import prepare_loading

    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    common = {"args": changed(dsa_stage="dense", optimizer="sgd"), "content_metadata": {}}
    weight = ShardedTensor.from_rank_offsets("decoder.weight", torch.zeros(4))
    dist_checkpointing.save({"model": {"weight": weight}, **common}, str(folder))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    run = {"ckpt_step": None, "save": None, "dsa_stage": "dense"}
    prepare_loading(changed(**run, load=None, pretrained_checkpoint=str(tmp_path)))
    with pytest.raises(ConfigError, match="--optimizer must be sgd"):
        prepare_loading(changed(**run, load=str(tmp_path), pretrained_checkpoint=None))
