"""Tensor names in checkpoints of other layer classes, stackings and model kinds.

Attention and MLP of a layer share a number in a GPT, and have two in a hybrid model.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_dsa.config.hybrid import EXPERTS, count_pairs, decoder_of
from megatron_dsa.errors import require

# Norms' names without and with transformer-engine's fusion.
_NORM_NAMES = (
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)
_STACKED = re.compile(r"(.*decoder\.layers)\.(?!\d+\.)(.*)")
#: Parameters in the second of the two hybrid layers that equal a GPT layer.
_OF_MLP = r"(?=pre_mlp_layernorm\.|mlp\.)"
#: Pairs of tensor names in GPT and hybrid models.
_PREDICTION = "transformer_layer.", "mtp_model_layer.layers."
_FINAL_NORM = "decoder.final_layernorm.", "decoder.final_norm."


@dataclasses.dataclass(frozen=True)
class OtherKind:
    """Tensor names of a GPT's checkpoint in an equivalent hybrid model, or vice versa.

    ``rename`` maps a name in this run to the checkpoint's; ``num_layers`` is this run's.
    """

    rename: Callable[[str], str]
    gpt_layers: int
    num_layers: int


def other_kind(saved: Any, pattern: str | None, directory: Any) -> OtherKind | None:
    """Return the names for a checkpoint of the other model kind, ``None`` for the same kind.

    Args:
        saved: arguments in the checkpoint, ``None`` for imported weights.
        pattern: ``--hybrid-layer-pattern`` of this run, ``None`` for a GPT.

    Raises:
        ConfigError: the GPT and the hybrid model have different layers.
    """
    then = getattr(saved, "hybrid_layer_pattern", None)
    if (then is None) == (pattern is None):
        return None
    hybrid = str(pattern or then)
    count = count_pairs(hybrid)
    require(
        count is not None,
        f"checkpoint {directory} is of a {'GPT' if pattern else 'hybrid model'}, this run's model "
        f"a {'hybrid one' if pattern else 'GPT'}: --hybrid-layer-pattern must then be pairs D- or "
        f"DE, got {hybrid}. Load a checkpoint of the same kind",
    )
    assert count is not None
    if pattern is None:
        return OtherKind(_hybrid_name, count, count)
    layers = getattr(saved, "num_layers", count)
    require(
        layers == count,
        f"--hybrid-layer-pattern {hybrid} must have {layers} pairs, as checkpoint {directory} of a "
        f"GPT has layers, got {count}",
    )
    return OtherKind(_gpt_name, count, 2 * count)


def arguments_of_gpt(saved: argparse.Namespace) -> argparse.Namespace:
    pattern = getattr(saved, "hybrid_layer_pattern", None)
    if pattern is None or (count := count_pairs(pattern)) is None:
        return saved
    experts = [int(letter == EXPERTS) for letter in decoder_of(pattern)[1::2]]
    changes = {"hybrid_layer_pattern": None, "num_layers": count, "moe_layer_freq": experts}
    return argparse.Namespace(**vars(saved) | changes)


def _gpt_name(name: str) -> str:
    gpt, hybrid = _PREDICTION
    name = re.sub(
        r"decoder\.layers\.(\d+)\.", lambda found: f"decoder.layers.{int(found[1]) // 2}.", name
    )
    return re.sub(re.escape(hybrid) + r"\d+\.", gpt, name).replace(*_FINAL_NORM[::-1])


def _hybrid_name(name: str) -> str:
    gpt, hybrid = _PREDICTION

    def second(rest: str) -> int:
        return int(re.match(_OF_MLP, rest) is not None)

    def decoder(found: re.Match) -> str:
        return f"decoder.layers.{2 * int(found[1]) + second(found[2])}.{found[2]}"

    def prediction(found: re.Match) -> str:
        return f"{hybrid}{second(found[1])}.{found[1]}"

    name = re.sub(r"decoder\.layers\.(\d+)\.(.*)", decoder, name)
    return re.sub(re.escape(gpt) + "(.*)", prediction, name).replace(*_FINAL_NORM)


def is_held(entry, available: dict) -> bool:
    if isinstance(entry, ShardedTensorFactory) and entry.key not in available:
        return all(part.key in available for part in nested_values(entry.build()))
    return entry.key in available


def same_under_another_name(entry, available: dict, kind: OtherKind | None = None):
    if kind is not None:
        entry = _out_of_stack(entry, kind.gpt_layers)
        entry = dataclasses.replace(entry, key=kind.rename(entry.key))
    for key in (entry.key, *_other_norm_names(entry.key)):
        if key in available:
            return dataclasses.replace(entry, key=key)
        # The checkpoint may stack the layers in one tensor.
        match = re.fullmatch(r"(.*decoder\.layers)\.(\d+)\.(.*)", key)
        if match and (stacked := f"{match[1]}.{match[3]}") in available:
            layers = available[stacked].global_shape[0]
            return _in_stack(entry, stacked, int(match[2]), layers)
    return None


def _other_norm_names(key: str):
    for plain, fused in _NORM_NAMES:
        for one, other in ((plain, fused), (fused, plain)):
            if key.endswith(f".{one}"):
                yield key.removesuffix(one) + other


def _in_stack(entry, key: str, layer: int, layers: int):
    if isinstance(entry, ShardedTensor):
        return dataclasses.replace(
            entry,
            key=key,
            global_shape=(layers, *entry.global_shape),
            global_offset=(layer, *entry.global_offset),
            axis_fragmentations=(layers, *entry.axis_fragmentations),
            prepend_axis_num=entry.prepend_axis_num + 1,
        )
    build = entry.build_fn

    def build_stacked(_key, *args):
        # All parts of a ShardedTensorFactory share the stacked key.
        return dict_list_map_inplace(
            lambda part: _in_stack(part, key, layer, layers), build(key, *args)
        )

    return dataclasses.replace(entry, build_fn=build_stacked)


def _out_of_stack(entry, layers: int):
    found = _STACKED.fullmatch(entry.key)
    if found is None:
        return entry
    tensor = entry if isinstance(entry, ShardedTensor) else next(nested_values(entry.build()))
    require(
        tensor.global_shape[0] == layers,
        f"--num-layers must be {layers}, as in the checkpoint, got {tensor.global_shape[0]}",
    )
    key = f"{found[1]}.{tensor.global_offset[0]}.{found[2]}"
    if isinstance(entry, ShardedTensor):
        return _layer_alone(entry, key)
    build = entry.build_fn

    def build_alone(key, *args):
        return dict_list_map_inplace(lambda part: _layer_alone(part, key), build(key, *args))

    return dataclasses.replace(entry, key=key, build_fn=build_alone)


def _layer_alone(tensor: ShardedTensor, key: str) -> ShardedTensor:
    return dataclasses.replace(
        tensor,
        key=key,
        global_shape=tensor.global_shape[1:],
        global_offset=tensor.global_offset[1:],
        axis_fragmentations=tensor.axis_fragmentations[1:],
        prepend_axis_num=tensor.prepend_axis_num - 1,
    )
