"""Parser of ``config.json``, and its comparison with a Megatron model."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.model import computes_topk, options_of, uses_indexer, uses_streams
from megatron_dsa.config.presets import POOL_SIZE
from megatron_dsa.config.rules.kda import is_kda_layer
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.files import read_json
from megatron_dsa.extras.huggingface.keys import SIZE, check_keys, check_values, refuse, required
from megatron_dsa.extras.huggingface.model_v4 import FEATURE_FIELDS, HASH_LAYERS
from megatron_dsa.extras.huggingface.models import MODELS
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, PREDICTION, Names
from megatron_dsa.extras.huggingface.pairs import resolved
from megatron_dsa.extras.huggingface.quantised import Quantisation

#: Fields common to all models, absent in config.json.
_COMMON = {
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "multi_latent_attention": True,
}
#: Megatron's defaults for fields that config.json cannot set.
UNSAID: dict[str, Any] = {
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "rotary_percent": 1.0,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    POOL_SIZE: 1,
}
#: Key of a multimodal config.json's text part, and outer keys that apply to the text part.
TEXT = "text_config"
_BESIDE_TEXT = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True)
class HFModel:
    """A Hugging Face model's configuration.

    Attributes:
        raw, text: config.json, and its text part.
        fields: arguments of Megatron's transformer configuration.
        vocab_size: without padding.
        dtype: of unquantised weights; ``None``: as stored.
        latent_norm_epsilon: for MLA's latents; ``None``: as in all norms.
        remarks: small differences in Megatron's layers.
    """

    raw: dict[str, Any]
    text: dict[str, Any]
    fields: dict[str, Any]
    num_layers: int
    mtp_layers: int
    vocab_size: int
    names: Names
    has_indexer: bool
    dtype: torch.dtype | None
    quantisation: Quantisation
    latent_norm_epsilon: float | None
    remarks: tuple[str, ...]


def read_config(path: str | Path) -> HFModel:
    path = Path(path)
    if not path.is_file():
        path /= "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: it says what the weights mean; put it there")
    return parse_config(read_json(path), str(path))


def parse_config(config: dict[str, Any], source: str = "config.json") -> HFModel:
    """Parse a config.json; raise :class:`ConfigError` with source, key, rule and fix."""
    try:
        return _parsed(config)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _parsed(config: dict) -> HFModel:
    kind: Any = config.get("model_type")
    if kind not in tuple(MODELS):
        refuse("model_type", kind, f"must be one of {', '.join(MODELS)}; others are unknown")
    model, raw, config = MODELS[kind], config, _text_of(config)
    text = config
    check_values(config)
    config, notes = resolved(config, model)
    check_keys(config, model)
    fields = {field: required(config, key) for key, field in model.fields.items()}
    for converter in model.converters:
        fields |= converter(config)
    epsilon, dtype = model.latent_norm_epsilon, _unquantised_dtype(config)
    return HFModel(
        raw=raw,
        text=text,
        fields=fields | _COMMON,
        num_layers=config["num_hidden_layers"],
        mtp_layers=config.get("num_nextn_predict_layers") or 0,
        vocab_size=required(config, "vocab_size"),
        names=model.names,
        has_indexer="dsa_indexer_topk" in fields,
        dtype=dtype,
        quantisation=_quantisation(config, dtype or torch.bfloat16),
        latent_norm_epsilon=None if epsilon == fields["layernorm_epsilon"] else epsilon,
        remarks=notes + tuple(remark for key, remark in model.remarks.items() if config.get(key)),
    )


def _text_of(config: dict) -> dict:
    text = config.get(TEXT)
    if text is None:
        return config
    if not isinstance(text, dict):
        refuse(TEXT, text, "must be a JSON object")
    beside = {key: config[key] for key in _BESIDE_TEXT if text.get(key) is None and key in config}
    return text | beside | {"model_type": config["model_type"]}


def _quantisation(config: dict, dtype: torch.dtype) -> Quantisation:
    said = config.get("quantization_config")
    # Releases set ``expert_dtype`` in config.json or in quantization_config.
    fp4 = "fp4" in (config.get("expert_dtype"), (said or {}).get("expert_dtype"))
    if said is None:
        return Quantisation(None, fp4, dtype)
    method, block = said.get("quant_method"), said.get("weight_block_size")
    if method != "fp8":
        refuse("quantization_config.quant_method", method, "must be fp8, or nothing quantised")
    if not (isinstance(block, list) and len(block) == 2 and all(map(SIZE.allows, block))):
        refuse(
            "quantization_config.weight_block_size", block, "must be [rows, columns], both positive"
        )
    return Quantisation(tuple(block), fp4, dtype)


def _unquantised_dtype(config: dict) -> torch.dtype | None:
    said = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    for key, name in said.items():
        if name not in ("bfloat16", "float16", "float32", "float64"):
            refuse(key, name, "must be bfloat16, float16, float32 or float64")
    if len(set(said.values())) > 1:
        refuse("dtype", said["dtype"], f"contradicts torch_dtype = {said['torch_dtype']!r}")
    return getattr(torch, next(iter(said.values()))) if said else None


def model_features(config: Any) -> set[str]:
    fields = {
        HYPER_CONNECTIONS: uses_streams(config),
        HASH_ROUTING: bool(getattr(config, HASH_LAYERS, 0)),
        PREDICTION: bool(config.mtp_num_layers),
    }
    return {feature for feature, has in fields.items() if has}


def differences(hf: HFModel, config: Any) -> dict[str, tuple[Any, Any]]:
    """Return each differing field -> (value in ``config``, value from config.json)."""
    # features.py checks omitted features.
    left_out = {
        name
        for feature, names in FEATURE_FIELDS.items()
        if feature not in model_features(config)
        for name in names
    }
    found = {}
    for name, expected in (UNSAID | hf.fields).items():
        # The router's dtype affects only precision.
        if name == "moe_router_dtype" or (name.startswith("dsa_") and not uses_indexer(config)):
            continue
        if name in left_out:
            continue
        actual = getattr(config, name, None)
        if name == POOL_SIZE:
            actual = options_of(config).indexer_pool_size
        if name == "moe_layer_freq" and isinstance(actual, int):
            actual = [int(layer % actual == 0) for layer in range(config.num_layers)]
        if name == "linear_attention_freq" and isinstance(actual, int):
            actual = [int(is_kda_layer(config, layer)) for layer in range(config.num_layers)]
        if name == "dsa_indexer_k_norm_epsilon" and actual is None:
            actual = config.layernorm_epsilon
        if name == "csa_compress_ratios" and actual is not None:
            # Multi-token prediction is optional.
            expected = expected[: hf.num_layers + (config.mtp_num_layers or 0)]
        if name in ("moe_router_num_groups", "moe_router_group_topk"):
            # A single expert group is equal to ungrouped routing.
            actual = actual if (config.moe_router_num_groups or 1) > 1 else None
        if name == "moe_router_topk_scaling_factor" and actual is None:
            actual = 1.0
        if actual != expected:
            found[name] = actual, expected
    sharing = {"dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"}
    if sharing & found.keys() and _selecting(hf.num_layers, config) == _selecting(
        hf.num_layers, SimpleNamespace(**hf.fields)
    ):
        found = {name: values for name, values in found.items() if name not in sharing}
    actual, of_all = options_of(config).latent_norm_epsilon, hf.fields["layernorm_epsilon"]
    expected = hf.latent_norm_epsilon or of_all
    if (actual or of_all) != expected:
        found["dsa_latent_norm_epsilon"] = actual, expected
    return found


def _selecting(layers: int, sharing: Any) -> list[bool]:
    return [computes_topk(sharing, layer + 1) for layer in range(layers)]


def check_model(hf: HFModel, config: Any) -> None:
    if found := differences(hf, config):
        lines = (
            f"  - {flag_of(name)} is {actual!r} for the model, {expected!r} by config.json"
            if name == "dsa_latent_norm_epsilon"
            else f"  - {name} is {actual!r} in the model, {expected!r} by config.json"
            for name, (actual, expected) in found.items()
        )
        raise ConfigError(
            "the Megatron model is not the model of the checkpoint; change its flags:\n"
            + "\n".join(lines)
        )
