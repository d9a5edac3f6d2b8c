"""Ranges, checks and readers of ``config.json`` keys that models share."""

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.names import Names

Fields = dict[str, Any]

_LARGEST = sys.float_info.max
#: Maximum lengths of lists and strings quoted in messages.
_ENTRIES, _CHARACTERS = 8, 60


@dataclass(frozen=True)
class Model:
    """A model type, mapped to Megatron's transformer configuration.

    Attributes:
        fields: required key -> field with the same value.
        only: optional key -> its only supported value.
        same: pairs of keys, or sums ``"a + b"``, that must agree.
        closed: key prefix -> all supported keys.
        aliases: alternative key -> key.
        converters: functions of config.json for the other fields, in order.
        latent_norm_epsilon: default ``rms_norm_eps``.
        remarks: optional key -> a small difference in Megatron's layers.
    """

    architecture: str
    names: Names
    fields: dict[str, str]
    only: dict[str, Any]
    same: tuple[tuple[str, str], ...]
    converters: tuple[Callable[[dict], Fields], ...]
    closed: dict[str, Collection[str]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    latent_norm_epsilon: float | None = None
    remarks: dict[str, str] = field(default_factory=dict)


#: Optional keys of all models -> the only supported value.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
}


def check_keys(config: dict, model: Model) -> None:
    for key, value in (_ONLY | model.only).items():
        if config.get(key, value) not in (value, None):
            refuse(key, config[key], f"only {value!r} is supported; such a model cannot be used")
    for prefix, known in model.closed.items():
        if unknown := sorted(key for key in config if key.startswith(prefix) and key not in known):
            rule = "this key is not understood, and may change what weights mean"
            refuse(unknown[0], config[unknown[0]], rule)


def refuse(key: str, value: Any, rule: str) -> NoReturn:
    raise ConfigError(f"{key} = {shown(value)}: {rule}")


def shown(value: Any) -> str:
    most = _CHARACTERS if isinstance(value, str) else _ENTRIES
    if not isinstance(value, list | str) or len(value) <= most:
        return repr(value)
    return f"{repr(value[:most])[:-1]}... ({len(value)} entries)"


def required(config: dict, key: str) -> Any:
    if config.get(key) is None:
        refuse(key, None, "it must be given; use the config.json that came with the weights")
    return config[key]


@dataclass(frozen=True)
class Number:
    """Range of a number: finite, ``>= least``, ``> above``, ``<= most``, integral if ``whole``."""

    least: float = -_LARGEST
    above: float = -math.inf
    most: float = _LARGEST
    whole: bool = False

    def __str__(self) -> str:
        bounds = ((">=", self.least), (">", self.above), ("<=", self.most))
        rules = [f"{sign} {bound:g}" for sign, bound in bounds if abs(bound) < _LARGEST]
        return f"must be a {'whole' if self.whole else 'finite'} number {' and '.join(rules)}"

    def allows(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        return self.least <= value <= self.most and value > self.above


SIZE, COUNT = Number(least=1, whole=True), Number(least=0, whole=True)
_POSITIVE = Number(above=0)
#: Keys of config.json at any depth -> ranges.
_NUMBERS = {
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
            *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_kpool"),
            *("index_n_heads", "index_head_dim", "index_topk", "index_topk_freq"),
            *("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "num_heads"),
            *("short_conv_kernel_size",),
            *("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
            *("o_groups", "o_lora_rank", "sliding_window", "hc_mult", "hc_sinkhorn_iters"),
            *("max_position_embeddings", "original_max_position_embeddings"),
        ),
        SIZE,
    ),
    **dict.fromkeys(
        (
            *("num_nextn_predict_layers", "first_k_dense_replace", "n_shared_experts"),
            *("num_hash_layers", "index_skip_topk_offset", "qk_rope_head_dim"),
        ),
        COUNT,
    ),
    "head_dim": COUNT,
    **dict.fromkeys(("rope_theta", "compress_rope_theta"), Number(above=1)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _POSITIVE),
    **dict.fromkeys(("attention_factor", "routed_scaling_factor"), _POSITIVE),
    "hc_eps": Number(least=0, most=0.01),
    # An epsilon above 1e-2 would outweigh activations.
    "rms_norm_eps": Number(above=0, most=0.01),
    "factor": Number(least=1),
    "partial_rotary_factor": Number(above=0, most=1),
    "swiglu_limit": Number(least=0),
}
#: Keys without a range -> (Python type, JSON type).
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), (dict, "object")),
    **dict.fromkeys(("main", "compress", "compress_rates"), (dict, "object")),
    **dict.fromkeys(("mlp_layer_types", "layer_types", "compress_ratios"), (list, "list")),
    **dict.fromkeys(("indexer_types", "modules_to_not_convert"), (list, "list")),
    "linear_attn_config": (dict, "object"),
    "index_topk_pattern": ((str, list), "string or list"),
}


def check_values(config: dict[str, Any], where: str = "") -> None:
    """Check types and ranges; ``where`` is a nested object's dotted prefix."""
    for key, value in config.items():
        if value is None:
            continue
        number = _NUMBERS.get(key)
        if number is not None and not number.allows(value):
            refuse(where + key, value, str(number))
        kind, called = _KINDS.get(key, (object, ""))
        if not isinstance(value, kind):
            refuse(where + key, value, f"must be a JSON {called}")
        if isinstance(value, dict) and key in _KINDS:
            check_values(value, f"{where}{key}.")


INDEXER = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
EXPERTS = {
    "n_routed_experts": "num_moe_experts",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "num_experts_per_tok": "moe_router_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
}
_PLAIN_KEYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_YARN_KEYS = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}


def is_yarn(rope: dict, where: str, yarn: set[str] | None) -> bool:
    """Return whether ``rope`` is YaRN; ``yarn``: extra YaRN keys, ``None`` to forbid YaRN."""
    keys = {"default": _PLAIN_KEYS}
    if yarn is not None:
        keys["yarn"] = _PLAIN_KEYS | _YARN_KEYS | yarn
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(keys):
        refuse(f"{where}.rope_type", kind, f"must be {' or '.join(keys)}")
    for key in sorted(set(rope) - keys[kind]):
        refuse(f"{where}.{key}", rope[key], f"not understood for rope type {kind}")
    return kind == "yarn"


def yarn_fields(rope: dict, where: str) -> Fields:
    """Return YaRN's fields except base and attention factors."""
    for key in ("factor", "original_max_position_embeddings"):
        if rope.get(key) is None:
            refuse(f"{where}.{key}", None, "must be given with yarn")
    if rope.get("truncate", True) is not True:
        refuse(f"{where}.truncate", rope["truncate"], "must be true: Megatron rounds YaRN's range")
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    if fast <= slow:
        refuse(f"{where}.beta_fast", fast, f"must be larger than beta_slow ({slow})")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": fast,
        "beta_slow": slow,
    }


def indexer_fields(config: dict, rope_interleaved: bool) -> Fields:
    return {ours: required(config, key) for key, ours in INDEXER.items()} | {
        "dsa_indexer_rope_interleaved": rope_interleaved,
        "dsa_indexer_scoring_relu": True,
    }


def expert_fields(config: dict, pattern: list[int]) -> Fields:
    """Return the expert fields; ``pattern`` has 1 for layers with experts, else 0."""
    fields = {ours: required(config, key) for key, ours in EXPERTS.items()}
    chosen = fields["moe_router_topk"]
    if chosen < 2:
        refuse("num_experts_per_tok", chosen, "must be 2 or more: Megatron does not normalise one")
    shared = config.get("n_shared_experts") or 0
    return fields | {
        "moe_layer_freq": pattern,
        "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"] or None,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }
