"""Which numbers the keys of a ``config.json`` may have, for every model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_dsa.errors import ConfigError


def refuse(key: str, value: Any, rule: str) -> None:
    """Raise :class:`ConfigError` for a key of config.json and its value."""
    raise ConfigError(f"{key} = {value!r}: {rule}")


@dataclass(frozen=True)
class Number:
    """A finite number within bounds.

    Attributes:
        least: the smallest allowed value.
        above: the value must be larger than this one.
        most: the largest allowed value.
        whole: the value must be an integer.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    whole: bool = False

    def __str__(self) -> str:
        bounds = ((">=", self.least), (">", self.above), ("<=", self.most))
        rules = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
        kind = "a whole number" if self.whole else "a finite number"
        return f"must be {kind} {' and '.join(rules)}"

    def allows(self, value: Any) -> bool:
        """Whether a value is such a number; ``True`` is none."""
        kinds = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        return (
            _is_finite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


SIZE = Number(least=1, whole=True)
COUNT = Number(least=0, whole=True)
POSITIVE = Number(above=0)
BASE = Number(above=1)

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_n_heads", "index_head_dim", "index_topk", "index_topk_freq"),
    *("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("o_groups", "o_lora_rank", "sliding_window", "hc_mult"),
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
    | {
        # Released models have 1e-6 and 1e-5; a hundredth outweighs activations.
        "rms_norm_eps": Number(above=0, most=0.01),
        "rope_theta": BASE,
        "compress_rope_theta": BASE,
        "factor": Number(least=1),
        "beta_fast": POSITIVE,
        "beta_slow": POSITIVE,
        "mscale": POSITIVE,
        "mscale_all_dim": POSITIVE,
        "attention_factor": POSITIVE,
        "partial_rotary_factor": Number(above=0, most=1),
        "routed_scaling_factor": POSITIVE,
        "swiglu_limit": Number(least=0),
    }
)
#: Keys with other values than numbers -> type, and what JSON calls it.
_KINDS = {
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), (dict, "object")),
    **dict.fromkeys(("main", "compress", "compress_rates"), (dict, "object")),
    **dict.fromkeys(("mlp_layer_types", "layer_types", "compress_ratios"), (list, "list")),
    **dict.fromkeys(("indexer_types",), (list, "list")),
    **dict.fromkeys(("index_topk_pattern",), ((str, list), "string or list")),
}


def check_values(config: dict[str, Any], where: str = "") -> None:
    """Raise for a number out of its range, and for a value of another type.

    Keys that are absent or null pass: whether a key is needed is not decided here.

    Args:
        config: config.json or an object in it.
        where: the key of that object, with a dot behind.

    Raises:
        ConfigError: names the key, its value and the rule.
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
