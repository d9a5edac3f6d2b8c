"""Megatron's optimizers without transformer-engine: a loaded one continues to the last bit."""

import copy

import pytest
import torch

from tests.host import start

LAYERS = 3


def build(dtype, distributed, seed=0):
    """Return DDP-wrapped linears in several buckets, and Megatron's optimizer for them."""
    start()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dsa.patches import install_checkpoint_repairs

    install_checkpoint_repairs()
    torch.manual_seed(seed)
    bf16 = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16, params_dtype=dtype
    )
    # Sizes that are no multiple of a bucket's alignment.
    linears = torch.nn.Sequential(*(torch.nn.Linear(7, 11, dtype=dtype) for _ in range(LAYERS)))
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=True, bucket_size=50
    )
    model = DistributedDataParallel(config, settings, linears)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=bf16, use_distributed_optimizer=distributed, clip_grad=0.0,
        weight_decay=0.1, params_dtype=dtype,
    )  # fmt: skip
    return model, get_megatron_optimizer(settings, [model]).chained_optimizers[0]


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.main_grad.copy_(gradient.to(parameter.device))
    optimizer.step()


def sharded_model(model):
    """Return what ``sharded_state_dict`` of a Megatron module would."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {
        name: ShardedTensor.from_rank_offsets(f"layer.{name}", parameter)
        for name, parameter in model.module.named_parameters()
    }


def save_and_load(model, optimizer, other, other_optimizer, folder, metadata):
    """Save ``model`` and ``optimizer``, load them into the others."""
    from megatron.core import dist_checkpointing

    def state(model, optimizer, is_loading):
        tensors = sharded_model(model)
        states = optimizer.sharded_state_dict(
            copy.copy(tensors), is_loading=is_loading, metadata=metadata
        )
        return {"model": tensors, "optimizer": states}

    dist_checkpointing.save(state(model, optimizer, False), str(folder))
    loaded = dist_checkpointing.load(state(other, other_optimizer, True), str(folder))
    with torch.no_grad():
        for name, parameter in other.module.named_parameters():
            parameter.copy_(loaded["model"][name])
    other_optimizer.load_state_dict(loaded["optimizer"])


FORMATS = {
    "plain": (False, {}),
    "distributed": (True, {"distrib_optim_sharding_type": "dp_reshardable"}),
    "fully_reshardable": (True, {"distrib_optim_sharding_type": "fully_reshardable"}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_loaded_optimizer_continues(kind, dtype, tmp_path):
    """Trap 28: the third step after two, saved and loaded, equals the third of one run."""
    distributed, metadata = FORMATS[kind]
    model, optimizer = build(dtype, distributed)
    for seed in (1, 2):
        step(model, optimizer, seed)
    metadata = {**metadata, "chained_optim_avoid_prefix": True}
    other, other_optimizer = build(dtype, distributed, seed=1)
    save_and_load(model, optimizer, other, other_optimizer, tmp_path, metadata)
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    steps = [state["step"].item() for state in other_optimizer.optimizer.state.values()]
    assert len(steps) == 2 * LAYERS and set(steps) == {4.0}
    for (name, one), (_, two) in zip(
        model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert one.equal(two), name
    states = zip(
        optimizer.optimizer.state.values(), other_optimizer.optimizer.state.values(), strict=True
    )
    for one, two in states:
        assert all(value.equal(two[key]) for key, value in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_states_are_saved_under_their_parameters(dtype):
    """Adam's first moment after one step is a tenth of the gradient, in every bucket."""
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
        moment = moments[f"optimizer.state.exp_avg.layer.{name}"]
        assert torch.allclose(moment, 0.1 * parameter.main_grad.float().cpu(), rtol=1e-5), name
