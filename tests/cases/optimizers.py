"""Megatron's optimizers of small models, and their checkpoints."""

import copy

import torch

from tests import host

LAYERS = 3


def build(dtype, distributed, seed=0, frozen=False, chain=False, **settings):
    """Return DDP-wrapped linears in several buckets, and Megatron's optimizer.

    ``chain``: return all optimizers of a model that has several.
    """
    host.start()
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
    # Not multiples of a bucket's alignment.
    linears = torch.nn.Sequential(*(torch.nn.Linear(7, 11, dtype=dtype) for _ in range(LAYERS)))
    linears.requires_grad_(not frozen)
    layout = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=True, bucket_size=50
    )
    model = DistributedDataParallel(config, layout, linears)
    defaults = {
        "optimizer": "adam", "lr": 1e-2, "bf16": bf16, "use_distributed_optimizer": distributed,
        "clip_grad": 0.0, "weight_decay": 0.1, "params_dtype": dtype,
    }  # fmt: skip
    optimizer = get_megatron_optimizer(OptimizerConfig(**defaults | settings), [model])
    return model, optimizer if chain else optimizer.chained_optimizers[0]


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.main_grad.copy_(gradient.to(parameter.device))
    optimizer.step()


def sharded_model(model, norm="{}.bias"):
    """Return a Megatron module's ``sharded_state_dict``; ``norm`` names its one-dimensional
    parameter.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    def key(name):
        layer, _, kind = name.partition(".")
        return "decoder.layers." + (norm.format(layer) if kind == "bias" else name)

    return {
        name: ShardedTensor.from_rank_offsets(key(name), parameter)
        for name, parameter in model.module.named_parameters()
    }


def save_and_load(model, optimizer, other, other_optimizer, folder, metadata, norms=()):
    """Save ``model`` and ``optimizer``, load them into the others like the entry point.

    ``norms``: saved and loaded names of norms, see :func:`sharded_model`.
    """
    from megatron.core import dist_checkpointing

    from megatron_dsa.training.checkpoints import load

    def state(model, optimizer, is_loading):
        tensors = sharded_model(model, *norms[is_loading : is_loading + 1])
        states = optimizer.sharded_state_dict(
            copy.copy(tensors), is_loading=is_loading, metadata=metadata
        )
        return {"model": tensors, "optimizer": states}

    dist_checkpointing.save(state(model, optimizer, False), str(folder))
    loaded = load(state(other, other_optimizer, True), str(folder))
    with torch.no_grad():
        for name, parameter in other.module.named_parameters():
            parameter.copy_(loaded["model"][name])
    other_optimizer.load_state_dict(loaded["optimizer"])


FORMATS = {
    "plain": (False, {}),
    "distributed": (True, {"distrib_optim_sharding_type": "dp_reshardable"}),
    "fully_reshardable": (True, {"distrib_optim_sharding_type": "fully_reshardable"}),
}


def mixed(distributed):
    """Return a CSA layer in bf16 with fp32 parameters, and Megatron's optimizer after a step."""
    device = host.start()
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = host.small_csa_config(4, dtype=torch.float32, bf16=True)
    module = host.attention_module(config).bfloat16()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16, torch.float32}
    settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, settings, module)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=distributed, clip_grad=0.0,
        weight_decay=0.0, adam_beta1=0.9,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.main_grad.copy_(gradient.to(device))
    optimizer.step()
    return module, optimizer.chained_optimizers[0]


def check_moments(module, optimizer):
    """Check each parameter's first moment in a plain optimizer's checkpoint; return it."""
    state = optimizer.sharded_state_dict(module.sharded_state_dict(prefix="layer."))
    saved = {
        entry.key: entry.data
        for states in state["optimizer"]["state"].values() if isinstance(states, dict)
        for entry in states.values()
    }  # fmt: skip
    for name, parameter in module.named_parameters():
        moment = saved[f"optimizer.state.exp_avg.layer.{name}"]
        assert torch.allclose(moment, 0.1 * parameter.main_grad.float(), rtol=1e-5), name
    return state
