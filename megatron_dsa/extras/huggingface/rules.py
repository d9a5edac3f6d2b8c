"""Rules for keys of a ``config.json`` that are the same for every model."""

import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_dsa.errors import ConfigError

LARGEST = sys.float_info.max
#: What a message shows of a list and of a string.
_ENTRIES, _CHARACTERS = 8, 60


def refuse(key: str, value: Any, rule: str) -> NoReturn:
    """Raise :class:`ConfigError` for a key of config.json and its value."""
    raise ConfigError(f"{key} = {shown(value)}: {rule}")


def shown(value: Any) -> str:
    """Return how a message shows a value: the start of a long one, with its length."""
    most = _CHARACTERS if isinstance(value, str) else _ENTRIES
    if not isinstance(value, list | str) or len(value) <= most:
        return repr(value)
    return f"{repr(value[:most])[:-1]}... ({len(value)} entries)"


def required(config: dict, key: str) -> Any:
    """Return the value of a key, or raise if it is absent or null."""
    if config.get(key) is None:
        refuse(key, None, "it must be given; use the config.json that came with the weights")
    return config[key]


@dataclass(frozen=True)
class Number:
    """A finite number ``>= least``, ``> above`` and ``<= most``; an integer if ``whole``."""

    least: float = -LARGEST
    above: float = -math.inf
    most: float = LARGEST
    whole: bool = False

    def __str__(self) -> str:
        bounds = ((">=", self.least), (">", self.above), ("<=", self.most))
        rules = [f"{sign} {bound:g}" for sign, bound in bounds if abs(bound) < LARGEST]
        return f"must be a {'whole' if self.whole else 'finite'} number {' and '.join(rules)}"

    def allows(self, value: Any) -> bool:
        """Whether a value is such a number; ``True`` is none."""
        kinds = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        return self.least <= value <= self.most and value > self.above


SIZE, COUNT = Number(least=1, whole=True), Number(least=0, whole=True)
_POSITIVE, _BASE = Number(above=0), Number(above=1)

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_n_heads", "index_head_dim", "index_topk", "index_topk_freq"),
    *("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("o_groups", "o_lora_rank", "sliding_window", "hc_mult", "hc_sinkhorn_iters"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)
_COUNTS = (
    *("num_nextn_predict_layers", "first_k_dense_replace", "n_shared_experts"),
    *("num_hash_layers", "index_skip_topk_offset"),
)
#: Keys at any depth -> their numbers.
_NUMBERS = (
    dict.fromkeys(_SIZES, SIZE)
    | dict.fromkeys(_COUNTS, COUNT)
    | dict.fromkeys(("rope_theta", "compress_rope_theta"), _BASE)
    | dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _POSITIVE)
    | dict.fromkeys(("attention_factor", "routed_scaling_factor"), _POSITIVE)
    | {"hc_eps": Number(least=0, most=0.01)}
    | {
        # Released models have 1e-6 and 1e-5; a hundredth outweighs activations.
        "rms_norm_eps": Number(above=0, most=0.01),
        "factor": Number(least=1),
        "partial_rotary_factor": Number(above=0, most=1),
        "swiglu_limit": Number(least=0),
    }
)
#: Keys with other values than numbers -> type, and its name in JSON.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), (dict, "object")),
    **dict.fromkeys(("main", "compress", "compress_rates"), (dict, "object")),
    **dict.fromkeys(("mlp_layer_types", "layer_types", "compress_ratios"), (list, "list")),
    **dict.fromkeys(("indexer_types", "modules_to_not_convert"), (list, "list")),
    "index_topk_pattern": ((str, list), "string or list"),
}


def check_values(config: dict[str, Any], where: str = "") -> None:
    """Raise for a number out of its range, and for a value of another type.

    Keys that are absent or null pass: the table of models says which are required. ``where`` is
    the key of an object in config.json, with a dot behind.
    """
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


#: Keys that may be absent -> the only value that Megatron's layers implement.
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
}


def check_only(config: dict, only: dict[str, Any]) -> None:
    """Raise unless optional keys have the one value of all models, or of this one (``only``)."""
    for key, value in (_ONLY | only).items():
        if config.get(key, value) not in (value, None):
            refuse(key, config[key], f"only {value!r} is supported; such a model cannot be used")


def check_indexer_keys(config: dict, known: Collection[str]) -> None:
    """Raise for a key of the indexer that is not in ``known``."""
    unknown = sorted(key for key in config if key.startswith("index") and key not in known)
    if unknown:
        refuse(unknown[0], config[unknown[0]], "this key of the indexer is not understood")
