"""Kinds of layers: patterns of hybrid models, pipeline stages, prediction layers, KDA layers.

A layer of a hybrid model is attention or an MLP. Layers of a GPT, which has no pattern, are both,
and their attention may be KDA.
Megatron is not imported: commands that only print read these.
"""

from typing import Any

from megatron_dsa.config.rules.kda import is_kda_layer
from megatron_dsa.config.rules.sizes import is_moe_layer

#: Megatron's letters. Layers with other letters are Megatron's own.
ATTENTION, MLP, EXPERTS, STAGE, PREDICTION = "D", "-", "E", "|", "/"
#: Attention of a GPT's layers by ``linear_attention_freq``; no letter of Megatron's.
KDA = "K"


def has_pattern(config: Any) -> bool:
    """Return whether a configuration has a layer pattern."""
    return getattr(config, "layer_pattern", None) is not None


def stages_of(pattern: str) -> list[str]:
    """Return the decoder layers of every (virtual) pipeline stage, a letter each."""
    return pattern.partition(PREDICTION)[0].split(STAGE)


def decoder_of(pattern: str) -> str:
    """Return the decoder layers, a letter each."""
    return "".join(stages_of(pattern))


def predictions_of(pattern: str) -> list[str]:
    """Return the layers of every depth of multi-token prediction, a letter each."""
    return [part for part in pattern.split(PREDICTION)[1:] if part]


def parts_of_layer(config: Any, number: int, is_mtp: bool = False) -> str:
    """Return the parts of decoder layer ``number`` (from 1), or of a prediction depth."""
    if has_pattern(config):
        pattern = config.layer_pattern
        return predictions_of(pattern)[number - 1] if is_mtp else decoder_of(pattern)[number - 1]
    index = config.num_layers - 1 if is_mtp else number - 1
    attention = KDA if not is_mtp and is_kda_layer(config, number - 1) else ATTENTION
    return attention + (EXPERTS if is_moe_layer(config, index) else MLP)


def attention_layers(config: Any) -> list[int]:
    """Return the numbers (from 1) of the decoder layers with sparse attention of this package."""
    if has_pattern(config):
        letters = decoder_of(config.layer_pattern)
        return [number for number, letter in enumerate(letters, 1) if letter == ATTENTION]
    layers = range(config.num_layers)
    return [index + 1 for index in layers if not is_kda_layer(config, index)]


def attention_number(config: Any, layer_number: int) -> int:
    """Return the index (from 1) of a decoder layer among :func:`attention_layers`."""
    if has_pattern(config):
        return decoder_of(config.layer_pattern)[:layer_number].count(ATTENTION)
    return layer_number - sum(is_kda_layer(config, index) for index in range(layer_number))


def logged_layers(config: Any) -> int:
    """Return the number of layers in the log: first the decoder, then prediction."""
    if has_pattern(config):
        return config.num_layers + len("".join(predictions_of(config.layer_pattern)))
    return config.num_layers + (config.mtp_num_layers or 0)


def count_pairs(pattern: str) -> int | None:
    """Return the layers of the GPT with the same layers, ``None`` if there is none.

    Every attention is followed by its MLP, in prediction also: ``D-D-|DEDE/DE``.
    """
    letters = decoder_of(pattern)
    pairs = [letters[i : i + 2] for i in range(0, len(letters), 2)]
    pairs += predictions_of(pattern)
    return len(letters) // 2 if set(pairs) <= {ATTENTION + MLP, ATTENTION + EXPERTS} else None
