"""Small GPT models with adapters, on one or several ranks."""

import dataclasses

import torch

from megatron_dsa.config.model import DSAOptions, is_adapter_parameter
from tests import host
from tests.cases.models import CORE, full
from tests.host import small_config, small_csa_config

RANK, ALPHA = 3, 6.0
#: Dense MLP, then experts with shared ones.
MIXED = {
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1],
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
}
UP = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]}
#: Options, and settings of the transformer configuration.
VARIANTS = {
    "sparse": ({}, {}),
    "sparse, remade outputs": ({"recompute": "latent_output"}, {}),
    "masked": ({"selected_attention": "masked"}, {}),
    "dense loss": ({}, {"dsa_indexer_use_sparse_loss": False}),
    "dense": ({"stage": "dense"}, {}),
    "warm-up of everything": (
        {"stage": "warmup", "freeze_main": False},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "fully recomputed": ({}, full(1)),
    "selectively recomputed": ({}, UP),
    "masked, recomputed": ({"selected_attention": "masked"}, CORE),
}
#: The same of DeepSeek-V4.
V4_VARIANTS = {
    "V4": ({}, {}),
    "V4, dense loss": ({}, {"dsa_indexer_use_sparse_loss": False}),
    "V4, warm-up of everything": (
        {"stage": "warmup", "freeze_main": False},
        {"dsa_indexer_use_sparse_loss": False},
    ),
    "V4 on streams, fully recomputed": ({}, full(1) | {"hc_mult": 2}),
    "V4, selectively recomputed": ({}, UP),
    "V4, queries computed again": ({"recompute": "queries"}, {}),
}


def config_of(variant, targets=("all-linear",), rank=RANK, **changes):
    """Return the configuration of a variant; without adapters if ``targets`` is empty."""
    options, settings = (VARIANTS | V4_VARIANTS)[variant]
    options = DSAOptions(**options)
    if targets:
        options = dataclasses.replace(
            options, lora_rank=rank, lora_alpha=ALPHA, lora_targets=targets
        )
    settings = {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
    } | settings
    if variant in VARIANTS:
        return small_config(options=options, **settings | MIXED | changes)
    # A layer with an indexer and one with longer groups, both with experts like the releases.
    v4 = {"csa_compress_ratios": [4, 6], "moe_layer_freq": 1}
    return small_csa_config(4, options=options, **settings | MIXED | v4 | changes)


def model_of(config, ups=True, part=None):
    """Return a GPT model with random weights and adapters, frozen as in training.

    Args:
        ups: random ``B`` instead of zeros.
        part: ``(parameter, full values) -> values`` of this rank.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.extras.lora.lora import add_adapters
    from megatron_dsa.layers.freezing import freeze_for_stage
    from megatron_dsa.specs import dsa_block_spec

    model = GPTModel(config, dsa_block_spec(config), 96, 64, position_embedding_type="rope")
    model = model.to(host.start(), config.params_dtype).train()
    add_adapters(model, config)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1 or (name.endswith("_lora_B") and not ups):
                continue
            shape = list(parameter.shape)
            if getattr(parameter, "tensor_model_parallel", False):
                shape[parameter.partition_dim] *= config.tensor_model_parallel_size
            # Equal weights with and without adapters.
            generator = generators[is_adapter_parameter(name)]
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            values *= 0.3 if is_adapter_parameter(name) else shape[1] ** -0.5
            parameter.copy_(values if part is None else part(name, parameter, values))
    freeze_for_stage([model])
    return model


def gradients_of(model):
    """Return the gradients of trained parameters by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
