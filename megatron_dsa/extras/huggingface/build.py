"""The model of a config.json: as a Megatron model without memory, and as flags."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.fields import flag_words
from megatron_dsa.config.model import (
    CSATransformerConfig,
    DSAOptions,
    DSATransformerConfig,
    has_adapters,
)
from megatron_dsa.config.presets import ALWAYS
from megatron_dsa.extras.huggingface.config_json import HFModel
from megatron_dsa.extras.huggingface.features import check_prediction, described_features
from megatron_dsa.extras.huggingface.models import FEATURE_FIELDS
from megatron_dsa.extras.huggingface.names import PREDICTION
from megatron_dsa.layers.warm_up import without_kernels
from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec


def transformer_config(
    hf: HFModel, stage: Any, features: Collection[str] = (), **settings: Any
) -> DSATransformerConfig | CSATransformerConfig:
    """Return the transformer configuration of a model, with ``settings`` on top.

    Without ``mtp_num_layers`` among them, the model has no multi-token prediction; its residuals
    are plain and its routing is learned but for the ``features`` of ``names.py`` that are given.
    """
    fields = _fields_of(hf, features)
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
        "dsa_indexer_loss_coeff": 0.0,  # nothing is trained
        "dsa": DSAOptions(stage=stage, latent_norm_epsilon=hf.latent_norm_epsilon),
    }
    return kind(**fields | fixed | settings)


def _fields_of(hf: HFModel, features: Collection[str]) -> dict[str, Any]:
    left = {x for feature, keys in FEATURE_FIELDS.items() if feature not in features for x in keys}
    return {name: value for name, value in hf.fields.items() if name not in left}


def gpt_model(config, vocab_size: int, length: int) -> Any:
    """Return a GPT model on one rank for sequences up to ``length``, with its adapters if any."""
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
    """Return the model that config.json describes, without memory and without kernels.

    Args:
        hf: the content of config.json.
        stage: stage of training.
        mtp: whether the model has the layers of multi-token prediction.
        dtype: of parameters that are not fp32 in every model; ``None``: config.json's, else
            bfloat16.
        features: hyper-connections and hash routing, if the model has them.
        settings: further fields of the transformer configuration.
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
        return gpt_model(config, hf.vocab_size, hf.raw.get("max_position_embeddings", 4096))


def widest_dtype(
    model: torch.nn.Module, stored: Callable[[str], torch.dtype | None]
) -> torch.dtype:
    """Return the dtype of an :func:`empty_model` that rounds no parameter.

    ``stored`` returns the dtype in which a parameter is stored, ``None`` if it is not. Parameters
    that are fp32 in every model do not count.
    """
    config: Any = model.config
    free = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.dtype == config.params_dtype
    ]
    found = {dtype for dtype in map(stored, free) if dtype is not None}
    return functools.reduce(torch.promote_types, found) if found else config.params_dtype


def flags_of(hf: HFModel, without: Collection[str] = ()) -> list[str]:
    """Return the flags of ``python -m megatron_dsa.pretrain`` that describe a model.

    Parallel layout, data, precision and schedule are not among them. ``without`` has features that
    are left out.
    """
    features = described_features(hf) - set(without)
    check_prediction(hf, features)
    mtp = hf.mtp_layers if PREDICTION in features else 0
    fields = _fields_of(hf, features) | {
        "dsa_latent_norm_epsilon": hf.latent_norm_epsilon,
        "dsa_stage": None if hf.has_indexer else "dense",
        "mtp_num_layers": mtp or None,
        # The model's own size: a tokenizer may have fewer tokens.
        "padded_vocab_size": hf.vocab_size,
        "max_position_embeddings": hf.raw.get("max_position_embeddings"),
    }
    if "csa_compress_ratios" in fields:
        fields["csa_compress_ratios"] = fields["csa_compress_ratios"][: hf.num_layers + mtp]
    return [x for field, value in fields.items() for x in flag_words(field, value)] + list(ALWAYS)


def unsaid(hf: HFModel) -> list[str]:
    """Return what these flags cannot say of the model, a sentence each."""
    notes = list(hf.remarks)
    base = hf.fields["rotary_base"]
    if base != int(base):
        notes.append(f"rope_theta = {base}: --rotary-base takes whole numbers")
    notes.append(
        "--dsa-indexer-loss-coeff is yours to add: 1.0 trains the indexers, 0 freezes them"
        if hf.has_indexer
        else "the model has no indexers; --dsa-stage warmup adds them, with "
        "--dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk of your choice"
    )
    return notes
