"""Megatron models built from config.json on the meta device."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.model import DSAOptions, has_adapters
from megatron_dsa.config.presets import POOL_SIZE
from megatron_dsa.config.transformer import CSATransformerConfig, DSATransformerConfig
from megatron_dsa.extras.huggingface.config_json import HFModel
from megatron_dsa.extras.huggingface.flags import fields_of
from megatron_dsa.layers.warm_up import without_kernels
from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec


def transformer_config(
    hf: HFModel, stage: Any, features: Collection[str] = (), **settings: Any
) -> DSATransformerConfig | CSATransformerConfig:
    """Return the transformer configuration of a model; ``settings`` override its fields.

    Omit features outside ``features``, and multi-token prediction without ``mtp_num_layers``.
    """
    fields = fields_of(hf, features)
    kind = DSATransformerConfig
    if "csa_compress_ratios" in fields:
        kind = CSATransformerConfig
        layers = hf.num_layers + (settings.get("mtp_num_layers") or 0)
        fields["csa_compress_ratios"] = fields["csa_compress_ratios"][:layers]
    fixed = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "dsa_indexer_loss_coeff": 0.0,
        "dsa": DSAOptions(
            stage=stage,
            latent_norm_epsilon=hf.latent_norm_epsilon,
            indexer_pool_size=fields.pop(POOL_SIZE, 1),
        ),
    }
    return kind(**fields | fixed | settings)


def gpt_model(config, vocab_size: int, length: int) -> Any:
    from megatron.core.models.gpt import GPTModel

    config.moe_hash_vocab_size = vocab_size
    model = GPTModel(
        config,
        dsa_block_spec(config),
        vocab_size,
        length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=dsa_mtp_block_spec(config),
    )
    if has_adapters(config):
        load_extra("lora.lora", "--lora-rank").add_adapters(model, config)
    return model


def empty_model(
    hf: HFModel,
    stage: str,
    mtp: bool,
    dtype: torch.dtype | None = None,
    features: Collection[str] = (),
    **settings: Any,
) -> torch.nn.Module:
    """Build the model of config.json on the meta device, without kernels.

    Args:
        mtp: build multi-token prediction.
        dtype: of parameters that are not always fp32; default: config.json's, else bfloat16.
        settings: further configuration fields.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    config = transformer_config(
        hf,
        stage,
        features,
        perform_initialization=False,
        init_model_with_meta_device=True,
        params_dtype=dtype or hf.dtype or torch.bfloat16,
        mtp_num_layers=hf.mtp_layers if mtp else None,
        **settings,
    )
    with torch.device("meta"), without_kernels():
        return gpt_model(config, hf.vocab_size, hf.text.get("max_position_embeddings", 4096))


def widest_dtype(
    model: torch.nn.Module, stored: Callable[[str], torch.dtype | None]
) -> torch.dtype:
    """Return a dtype that holds all parameters unrounded; ``stored``: name -> stored dtype."""
    config: Any = model.config
    free = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.dtype == config.params_dtype
    ]
    found = {dtype for dtype in map(stored, free) if dtype is not None}
    return functools.reduce(torch.promote_types, found) if found else config.params_dtype
