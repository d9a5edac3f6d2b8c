"""Megatron's optimizers without transformer-engine: a loaded one continues to the bit."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from tests import host
from tests.cases.optimizers import FORMATS, build, save_and_load, sharded_model, step
from tests.ranks import spawn

FUSED = "{}.mlp.linear_fc1.layer_norm_weight"
ALONE = "{}.pre_mlp_layernorm.weight"


@pytest.mark.parametrize("norms", [(FUSED, ALONE), (ALONE, FUSED)], ids=["fused", "alone"])
@pytest.mark.parametrize("kind", FORMATS)
def test_states_of_norms_with_other_names(kind, norms, tmp_path):
    distributed, metadata = FORMATS[kind]
    model, optimizer = build(torch.bfloat16, distributed)
    step(model, optimizer, 1)
    other, other_optimizer = build(torch.bfloat16, distributed, seed=1)
    metadata = {**metadata, "chained_optim_avoid_prefix": True}
    save_and_load(model, optimizer, other, other_optimizer, tmp_path, metadata, norms)
    step(model, optimizer, 2)
    step(other, other_optimizer, 2)
    others = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.equal(others[name]), name


def test_states_that_a_checkpoint_lacks_are_named():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_dsa.training.checkpoints import _redirect_optimizers

    host.start()
    key = "optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.weight"
    entry = ShardedTensor.from_rank_offsets(key, torch.zeros(4))
    state = {"optimizer": {"state": {0: {"exp_avg": entry}}}}
    with pytest.raises(ConfigError, match=f"{key}.*--no-load-optim"):
        _redirect_optimizers(state, "somewhere", {})
    _redirect_optimizers(state, "somewhere", {key: entry})


LAYER_WISE = {"use_layer_wise_distributed_optimizer": True}
MUON, ADAPTIVE = {"optimizer": "muon"}, {"optimizer": "adaptive_muon"}
#: Every optimizer that README or pages name, and Megatron's that save: settings, checkpoint
#: formats, states of a parameter. fp32 and bf16, except layer-wise ones.
OPTIMIZERS = {
    "adam": ({}, FORMATS, {"exp_avg", "exp_avg_sq", "step"}),
    "adam-l2": ({"decoupled_weight_decay": False}, FORMATS, {"exp_avg", "exp_avg_sq", "step"}),
    "sgd": ({"optimizer": "sgd"}, ["plain"], {"momentum_buffer"}),
    "sgd-0": ({"optimizer": "sgd", "sgd_momentum": 0.0}, ["plain"], set()),
    "muon": (MUON, ["plain"], {"momentum_buffer"}),
    "muon-lion": (MUON | {"muon_scalar_optimizer": "lion"}, ["plain"], {"momentum_buffer"}),
    "muon-layers": (MUON | LAYER_WISE, ["plain"], {"momentum_buffer"}),
    "adaptive_muon": (ADAPTIVE, ["plain"], {"momentum_buffer", "moment2_buffer"}),
    "adaptive_muon-layers": (
        ADAPTIVE | LAYER_WISE, ["plain"], {"momentum_buffer", "moment2_buffer"},
    ),
    "lion": ({"optimizer": "lion"}, ["plain"], {"exp_avg"}),
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inner(optimizer):
    """Return torch's optimizers in one of Megatron's, those with matrix states first."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts]


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        (name, kind, dtype)
        for name, (settings, kinds, _) in OPTIMIZERS.items()
        for kind in kinds
        for dtype in DTYPES
        if dtype == "bf16" or not LAYER_WISE.items() <= settings.items()
    ],
)
def test_loaded_optimizer_continues(name, kind, dtype, tmp_path):
    settings, _, held = OPTIMIZERS[name]
    if name not in ("adam", "adam-l2", "sgd", "sgd-0"):
        pytest.importorskip("emerging_optimizers", minversion="0.3")
        host.start()
        from megatron_dsa.extras.muon.patch import read_marks_of_muon

        read_marks_of_muon()
    distributed, metadata = FORMATS[kind]
    settings = {"chain": True, **settings}
    model, optimizer = build(DTYPES[dtype], distributed, **settings)
    for seed in (1, 2):
        step(model, optimizer, seed)
    metadata = {**metadata, "chained_optim_avoid_prefix": True}
    other, other_optimizer = build(DTYPES[dtype], distributed, seed=1, **settings)
    save_and_load(model, optimizer, other, other_optimizer, tmp_path, metadata)
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    for (parameter, one), (_, two) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert one.equal(two), parameter
    states, others = ([x for each in inner(it) for x in each.state.values()]
                      for it in (optimizer, other_optimizer))  # fmt: skip
    assert set(states[0]) == held if held else not any(states)
    for one, two in zip(states, others, strict=True):
        assert set(one) == set(two) and all(value.equal(two[key]) for key, value in one.items())
        assert one.get("step", 4) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_are_saved_under_their_parameters(dtype):
    """Adam's first moment after one step must be a tenth of the gradient, in every bucket."""
    model, optimizer = build(dtype, True)
    assert len(optimizer.buffers[0].buckets) > 1
    step(model, optimizer, 1)
    state = optimizer.sharded_state_dict(
        sharded_model(model), metadata={"distrib_optim_sharding_type": "fully_reshardable"}
    )
    moments = {
        tensors["exp_avg"].key: tensors["exp_avg"].data for tensors in state["param_state"].values()
    }
    for name, parameter in model.module.named_parameters():
        moment = moments[f"optimizer.state.exp_avg.decoder.layers.{name}"]
        assert torch.allclose(moment, 0.1 * parameter.main_grad.float().cpu(), rtol=1e-5), name


def resume_with_a_frozen_rank(case, _tp, _cp):
    """Train two steps, resume and train two more; return this rank's result and the expected one.

    One rank trains nothing, like a pipeline stage.
    """
    from megatron.core import dist_checkpointing

    kind, dtype, frozen_rank, folder = case
    distributed, metadata = FORMATS[kind]
    metadata = {**metadata, "chained_optim_avoid_prefix": True}
    frozen = torch.distributed.get_rank() == frozen_rank
    model, optimizer = build(dtype, distributed, frozen=frozen)
    other, other_optimizer = build(dtype, distributed, frozen=frozen)
    for seed in (1, 2):
        step(model, optimizer, seed)
    tensors = {} if frozen else sharded_model(model)
    state = optimizer.sharded_state_dict(tensors, metadata=metadata)
    if not frozen:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save({"optimizer": state, "model": tensors}, str(folder))
    other.load_state_dict(model.state_dict())
    tensors = {} if frozen else sharded_model(other)
    state = other_optimizer.sharded_state_dict(tensors, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load({"optimizer": state, "model": tensors}, str(folder))
    other_optimizer.load_state_dict(loaded["optimizer"])
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    counts = [state["step"].item() for state in other_optimizer.optimizer.state.values()]
    return {"parameters": [*zip(model.parameters(), other.parameters(), strict=True)]} | {
        "counts": counts or [group["step"] for group in other_optimizer.param_groups]
    }


def test_ranks_that_train_nothing_keep_the_count(tmp_path):
    """Rank 0's part of a checkpoint serves all ranks."""
    cases = [("plain", dtype, rank) for dtype in (torch.float32, torch.bfloat16) for rank in (0, 1)]
    cases += [("distributed", torch.float32, 0), ("fully_reshardable", torch.bfloat16, 0)]
    cases = {case: (*case, tmp_path / f"saved{number}") for number, case in enumerate(cases)}
    for results in spawn(resume_with_a_frozen_rank, cases, 2, tmp_path):
        for name, result in results.items():
            assert set(result["counts"]) == {4}, name
            assert all(one.equal(two) for one, two in result["parameters"]), name


class Adam(torch.optim.Optimizer):
    """Counts the steps of its groups like transformer-engine's Adam."""

    def __init__(self, counts_empty_groups: bool):
        super().__init__([torch.zeros(1)], {})
        self.counts_empty_groups = counts_empty_groups
        self.param_groups[0]["params"] = []

    def step(self):
        for group in self.param_groups:
            if self.counts_empty_groups:
                group["step"] = group.get("step", 0) + 1


@pytest.mark.parametrize("counts", [False, True], ids=["2.9", "2.20"])
def test_steps_without_parameters_are_counted_once(counts):
    from megatron_dsa.patches.optimizer_states import count_without_parameters

    optimizer = Adam(counts)
    count_without_parameters(optimizer)
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3
