"""Layer kinds of hybrid models, without importing Megatron."""

from typing import Any

from megatron_dsa.config.rules.kda import is_kda_layer
from megatron_dsa.config.rules.sizes import is_moe_layer

#: Letters in Megatron's hybrid layer patterns.
ATTENTION, MLP, EXPERTS, STAGE, PREDICTION = "D", "-", "E", "|", "/"
#: Letter for KDA layers, which Megatron's patterns lack.
KDA = "K"


def has_pattern(config: Any) -> bool:
    return getattr(config, "layer_pattern", None) is not None


def stages_of(pattern: str) -> list[str]:
    return pattern.partition(PREDICTION)[0].split(STAGE)


def decoder_of(pattern: str) -> str:
    return "".join(stages_of(pattern))


def predictions_of(pattern: str) -> list[str]:
    return [part for part in pattern.split(PREDICTION)[1:] if part]


def parts_of_layer(config: Any, number: int, is_mtp: bool = False) -> str:
    """Return the letters of a decoder layer or prediction depth (both numbered from 1)."""
    if has_pattern(config):
        pattern = config.layer_pattern
        return predictions_of(pattern)[number - 1] if is_mtp else decoder_of(pattern)[number - 1]
    index = config.num_layers - 1 if is_mtp else number - 1
    attention = KDA if not is_mtp and is_kda_layer(config, number - 1) else ATTENTION
    return attention + (EXPERTS if is_moe_layer(config, index) else MLP)


def attention_layers(config: Any) -> list[int]:
    """Return the numbers (from 1) of decoder layers with sparse attention."""
    if has_pattern(config):
        letters = decoder_of(config.layer_pattern)
        return [number for number, letter in enumerate(letters, 1) if letter == ATTENTION]
    layers = range(config.num_layers)
    return [index + 1 for index in layers if not is_kda_layer(config, index)]


def attention_number(config: Any, layer_number: int) -> int:
    """Return a decoder layer's index (from 1) among :func:`attention_layers`."""
    if has_pattern(config):
        return decoder_of(config.layer_pattern)[:layer_number].count(ATTENTION)
    return layer_number - sum(is_kda_layer(config, index) for index in range(layer_number))


def logged_layers(config: Any) -> int:
    if has_pattern(config):
        return config.num_layers + len("".join(predictions_of(config.layer_pattern)))
    return config.num_layers + (config.mtp_num_layers or 0)


def count_pairs(pattern: str) -> int | None:
    """Return the layer count of an equivalent GPT, if any: 4 for ``D-D-|DEDE/DE``."""
    letters = decoder_of(pattern)
    pairs = [letters[i : i + 2] for i in range(0, len(letters), 2)]
    pairs += predictions_of(pattern)
    return len(letters) // 2 if set(pairs) <= {ATTENTION + MLP, ATTENTION + EXPERTS} else None
