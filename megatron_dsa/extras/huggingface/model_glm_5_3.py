"""GLM-5.3-Flash: keys of ``config.json``."""

import dataclasses

from megatron_dsa.config.presets import POOL_SIZE
from megatron_dsa.extras.huggingface.keys import INDEXER, Fields, refuse, required
from megatron_dsa.extras.huggingface.model_v3 import (
    DEEPSEEK_V3,
    SHARING_KEYS,
    check_heads,
    dsa_indexer,
    grouped_experts,
)
from megatron_dsa.extras.huggingface.model_v4 import clamp, streams
from megatron_dsa.extras.huggingface.names import GLM_5_3

#: Layer type -> 1 for KDA, else 0.
_IS_KDA = {
    "linear_attention": 1,
    "indexed_attention": 0,
    "deepseek_sparse_attention": 0,
    "full_attention": 0,
}
#: Nested KDA keys, which override flat ones.
_KDA = "linear_attn_config"
_KDA_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
#: Defaults in transformers for absent keys.
_GLM_5_3_DEFAULTS = {"first_k_dense_replace": 3, "swiglu_limit": 10.0}


def _clamped_experts(config: dict) -> Fields:
    config = _GLM_5_3_DEFAULTS | {key: x for key, x in config.items() if x is not None}
    return grouped_experts(config) | clamp(config)


def _kda(config: dict) -> Fields:
    layers, kinds = config["num_hidden_layers"], required(config, "layer_types")
    if len(kinds) != layers or any(kind not in _IS_KDA for kind in kinds):
        refuse("layer_types", kinds, f"must say {' or '.join(_IS_KDA)} for every layer")
    pattern = [_IS_KDA[kind] for kind in kinds]
    if not any(pattern):
        return {"linear_attention_freq": None}
    given = config.get(_KDA) or {}
    listed = given.get("kda_layers")
    if listed is not None and listed != [i for i, is_kda in enumerate(pattern) if is_kda]:
        refuse(f"{_KDA}.kda_layers", listed, "contradicts layer_types: keep one of them")
    said = {flat: given.get(key, config.get(flat)) for key, flat in _KDA_KEYS.items()}
    bound = said["linear_lower_bound"]
    if bound is None:
        if given.get("safe_gate") is False or not (given or "linear_lower_bound" not in config):
            refuse("linear_lower_bound", None, "only gates with a lower bound are supported")
        bound = -5.0
    heads, dim = required(said, "linear_num_heads"), required(said, "linear_head_dim")
    return {
        "linear_attention_freq": pattern,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": required(said, "linear_conv_kernel_dim"),
        "kda_gate_lower_bound": bound,
    }


def _pooled_indexer(config: dict) -> Fields:
    size, layers = required(config, "index_kpool"), config.get("layer_types") or ()
    kinds, has_kda = config.get("indexer_types"), any(_IS_KDA.get(kind) for kind in layers)
    if has_kda and not kinds:
        for key in ("index_topk_pattern", "index_topk_freq"):
            # Both keys count all layers, but only DSA layers select keys.
            if config.get(key) not in (None, 1):
                refuse(key, config[key], "give indexer_types, with KDA layers")
    if has_kda and kinds and len(kinds) == len(layers):
        selecting = [x for x, kind in zip(kinds, layers, strict=True) if not _IS_KDA.get(kind)]
        if any(kind not in ("full", "F") for kind in selecting):
            refuse("indexer_types", kinds, "no selection is shared across layers of KDA")
        config = {key: x for key, x in config.items() if key not in SHARING_KEYS}
    return dsa_indexer(config, interleaved=True) | {
        POOL_SIZE: size,
        "dsa_indexer_rotate_activation": False,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def _mean_of_streams(config: dict) -> Fields:
    fields = streams(config)
    return fields if fields["hc_mult"] == 1 else fields | {"hc_collapse": "mean"}


GLM_5_3_FLASH = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Glm5NextForConditionalGeneration",
    names=GLM_5_3,
    only={
        "scoring_func": "sigmoid",
        "qk_rope_head_dim": 0,
        "mla_use_nope": True,
        "mhc": True,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
    },
    closed={
        "index": (
            *("index_kpool", "index_kpool_compress", "index_kpool_always_select_tail"),
            *("indexer_rope_interleave", "index_share_for_mtp_iteration", *INDEXER, *SHARING_KEYS),
        ),
        "linear_": (_KDA, *_KDA_KEYS.values()),
    },
    converters=(check_heads, _clamped_experts, _kda, _pooled_indexer, _mean_of_streams),
    latent_norm_epsilon=None,
)
