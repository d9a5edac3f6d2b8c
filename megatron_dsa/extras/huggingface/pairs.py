"""Redundant keys of ``config.json``, resolved as in transformers or rejected."""

import math
from types import SimpleNamespace
from typing import Any

from megatron_dsa.config.model import computes_topk
from megatron_dsa.extras.huggingface.keys import Model, refuse, shown
from megatron_dsa.extras.huggingface.model_v4 import layer_ratios

#: Rope base that transformers uses by default.
_DEFAULT_THETA = 10_000.0
_DEFAULT_NOTE = f"rope_theta = {_DEFAULT_THETA:g} is used, as by transformers: none is given"
#: transformers' default index_skip_topk_offset.
_DEFAULT_OFFSET = 2


def resolved(config: dict[str, Any], model: Model) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return config.json without aliases and with one rope object, and notes on the choices.

    Raises:
        ConfigError: a contradiction that transformers does not resolve.
    """
    config, notes = dict(config), []
    v4 = config.get("model_type") == "deepseek_v4"
    for alias, key in model.aliases.items():
        if (value := config.pop(alias, None)) is not None:
            _agree(alias, value, key, config.get(key))
            config[key] = value
    if config.get("qk_rope_head_dim") != 0:
        notes += _one_rope(config, v4)
    for key, others in model.same:
        terms = [config.get(other) for other in others.split(" + ")]
        _agree(key, config.get(key), others, None if None in terms else sum(terms))
    quantised = config.get("quantization_config") or {}
    inner, outer = quantised.get("expert_dtype"), config.get("expert_dtype")
    _agree("expert_dtype", outer, "quantization_config.expert_dtype", inner)
    notes += _lists(config)
    return config, tuple(notes)


def _agree(key: str, value: Any, other: str, second: Any) -> None:
    if value is not None and second is not None and value != second:
        refuse(key, value, f"contradicts {other} = {second!r}: keep one of them")


def _one_rope(config: dict, v4: bool) -> list[str]:
    """Keep rope as transformers reads it: ``rope_scaling`` unless empty."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope, notes, dropped = config.get(where) or {}, [], None
    if where == "rope_scaling":
        dropped = config.pop("rope_parameters", None) or None
    if dropped and _plain(dropped) != _plain(rope):
        notes.append(
            f"rope_scaling = {rope!r} is used, as by transformers, and not rope_parameters = "
            f"{dropped!r}"
        )
    nested = [f"{where}.{name}" for name in ("main", "compress") if name in rope]
    for name in nested or [where]:
        part = rope.get(name.rpartition(".")[2]) if nested else rope
        if isinstance(part, dict):
            notes += _check_lengths(config, part, name)
            _check_rotated(config, part, name, v4)
    flat_theta = None if nested else rope.get("rope_theta")
    if v4:
        if flat_theta not in (None, config.get("rope_theta"), config.get("compress_rope_theta")):
            notes.append(
                f"{where}.rope_theta = {flat_theta!r} is not used, as by transformers: rope_theta "
                "and compress_rope_theta are"
            )
        return notes + _v4_bases(config, rope if nested else {}, where)
    lost = (dropped or {}).get("rope_theta")
    if flat_theta is None and config.get("rope_theta") is None:
        config["rope_theta"] = _DEFAULT_THETA
        notes.append(_DEFAULT_NOTE)
    base = config.get("rope_theta") if flat_theta is None else flat_theta
    if lost is not None and base != lost:
        refuse(
            "rope_parameters.rope_theta",
            lost,
            f"transformers takes rope_scaling and the base {base}: write the base that you mean "
            "into rope_scaling, and drop rope_parameters",
        )
    if flat_theta is not None and config.get("rope_theta") not in (None, flat_theta):
        notes.append(
            f"{where}.rope_theta = {flat_theta!r} is used, as by transformers, and not rope_theta "
            f"= {config['rope_theta']!r}"
        )
    return notes


def _v4_bases(config: dict, nested: dict, where: str) -> list[str]:
    # transformers has one default for both rope bases.
    notes = []
    if config.get("rope_theta") is None and (nested.get("main") or {}).get("rope_theta") is None:
        config["rope_theta"] = _DEFAULT_THETA
        notes.append(_DEFAULT_NOTE)
    default = config.get("rope_theta") or _DEFAULT_THETA
    for name, key in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
        said, part = config.get(key), nested.get(name)
        theta = (part or {}).get("rope_theta")
        if said in (None, theta):
            continue
        if theta is not None:
            notes.append(f"{where}.{name}.rope_theta = {theta!r} is used, and not {key}")
        elif part is not None and said != default:
            refuse(
                key,
                said,
                f"transformers takes {default:g} there, as {where}.{name} has no rope_theta: write "
                "the base that you mean into it",
            )
    return notes


def _plain(rope: dict) -> dict:
    return {("rope_type" if key == "type" else key): value for key, value in rope.items()}


def _check_lengths(config: dict, rope: dict, where: str) -> list[str]:
    key = "original_max_position_embeddings"
    original, longest = rope.get(key), config.get("max_position_embeddings")
    _agree(f"{where}.{key}", original, key, config.get(key))
    _agree(f"{where}.rope_type", rope.get("rope_type"), "type", rope.get("type"))
    factor = rope.get("factor")
    if original is None or longest is None or factor is None:
        return []
    implied = longest / original
    if implied in (1, factor):
        return []
    return [
        f"{where}.factor = {factor!r} is used, as by transformers, and not "
        f"max_position_embeddings / {key} = {implied:g}"
    ]


def _check_rotated(config: dict, rope: dict, where: str, v4: bool) -> None:
    share, head, dims = (
        rope.get("partial_rotary_factor"),
        config.get("head_dim"),
        config.get("qk_rope_head_dim"),
    )
    if not v4 or share is None or head is None:
        return
    if dims is None and (factor := config.get("partial_rotary_factor")) is not None:
        dims = math.floor(head * factor)
    if dims is not None and math.floor(head * share) != dims:
        refuse(f"{where}.partial_rotary_factor", share, f"contradicts qk_rope_head_dim = {dims}")


def _lists(config: dict) -> list[str]:
    layers, kinds = config.get("num_hidden_layers"), config.get("mlp_layer_types")
    notes = []
    for key, kind in (("first_k_dense_replace", "dense"), ("num_hash_layers", "hash_moe")):
        count = config.get(key)
        if not kinds or not layers or count is None:
            continue
        if [each == kind for each in kinds] != [layer < count for layer in range(layers)]:
            if config.get("model_type") == "deepseek_v3":
                refuse("mlp_layer_types", kinds, f"contradicts {key} = {count}: drop one of them")
            notes.append(f"mlp_layer_types is used, and not {key} = {count}")
    listed = list(config.get("compress_ratios") or ())
    if config.get("layer_types") and listed and config.get("model_type") == "deepseek_v4":
        ratios = layer_ratios(config)
        if any(one != other for one, other in zip(ratios, listed, strict=False)):
            ratios_said = f"compress_ratios = {shown(listed)}"
            notes.append(f"layer_types is used, as by transformers, and not {ratios_said}")
    return notes + _index_sharing(config)


def _index_sharing(config: dict) -> list[str]:
    """Return notes on contradicting index sharing; the first key wins."""
    said = {}
    for key in ("indexer_types", "index_topk_pattern"):
        if config.get(key):
            said[key] = [kind in ("full", "F") for kind in config[key]]
    layers, freq = config.get("num_hidden_layers"), config.get("index_topk_freq")
    if said and layers and freq is not None:
        offset = config.get("index_skip_topk_offset")
        rule = SimpleNamespace(
            dsa_indexer_topk_freq=freq,
            dsa_indexer_skip_topk_offset=_DEFAULT_OFFSET if offset is None else offset,
        )
        said["index_topk_freq"] = [computes_topk(rule, layer + 1) for layer in range(layers)]
    used, *others = said or [""]
    return [
        f"{used} is used, and not {key} = {shown(config[key])}"
        for key in others
        if said[key] != said[used]
    ]
