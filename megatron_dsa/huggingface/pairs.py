"""Keys of a ``config.json`` that say one thing twice: resolved as transformers does, or refused."""

from __future__ import annotations

import math
from typing import Any

from megatron_dsa.huggingface.rules import refuse

#: Second name of a key -> the key.
_ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
#: Base that transformers takes where neither config.json nor the rope that it uses has one.
_DEFAULT_THETA = 10_000.0


def resolved(config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a config.json without second names and with one object for rope, and notes on both.

    Raises:
        ConfigError: two keys contradict each other, and transformers has no rule, or a loss, there.
    """
    config, notes = dict(config), []
    v4 = config.get("model_type") == "deepseek_v4"
    aliases = _ALIASES | ({"intermediate_size": "moe_intermediate_size"} if v4 else {})
    for alias, key in aliases.items():
        if (value := config.pop(alias, None)) is not None:
            _agree(config, alias, value, key, config.get(key))
            config[key] = value
    notes += _one_rope(config, v4)
    if not v4:
        _check_head_dims(config)
    notes += _lists(config)
    return config, tuple(notes)


def _agree(config: dict, key: str, value: Any, other: str, second: Any) -> None:
    if value is not None and second is not None and value != second:
        refuse(key, value, f"contradicts {other} = {second!r}: keep one of them")


def _one_rope(config: dict, v4: bool) -> list[str]:
    """Keep the object of rope that transformers takes: ``rope_scaling``, unless it is empty."""
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
            _check_lengths(config, part, name)
            _check_rotated(config, part, name, v4)
    flat_theta = None if nested else rope.get("rope_theta")
    if v4:
        # transformers overwrites it; its own configurations have rope_theta there.
        if flat_theta not in (None, config.get("rope_theta"), config.get("compress_rope_theta")):
            notes.append(
                f"{where}.rope_theta = {flat_theta!r} is not used, as by transformers: rope_theta "
                "and compress_rope_theta are"
            )
        for name, key in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
            theta = (rope.get(name) or {}).get("rope_theta")
            if theta is not None and config.get(key) not in (None, theta):
                notes.append(f"{where}.{name}.rope_theta = {theta!r} is used, and not {key}")
        return notes
    lost = (dropped or {}).get("rope_theta")
    if flat_theta is None and config.get("rope_theta") is None and lost is not None:
        config["rope_theta"] = _DEFAULT_THETA
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


def _plain(rope: dict) -> dict:
    return {("rope_type" if key == "type" else key): value for key, value in rope.items()}


def _check_lengths(config: dict, rope: dict, where: str) -> None:
    key = "original_max_position_embeddings"
    _agree(config, f"{where}.{key}", rope.get(key), key, config.get(key))
    _agree(config, f"{where}.rope_type", rope.get("rope_type"), "type", rope.get("type"))


def _check_rotated(config: dict, rope: dict, where: str, v4: bool) -> None:
    """Check the rotated share of a V4's head, which ``qk_rope_head_dim`` also gives."""
    share, head, dims = (
        rope.get("partial_rotary_factor"),
        config.get("head_dim"),
        config.get("qk_rope_head_dim"),
    )
    if not v4 or share is None or head is None:
        return
    if dims is None and (own := config.get("partial_rotary_factor")) is not None:
        dims = math.floor(head * own)
    if dims is not None and math.floor(head * share) != dims:
        refuse(f"{where}.partial_rotary_factor", share, f"contradicts qk_rope_head_dim = {dims}")


def _check_head_dims(config: dict) -> None:
    rope, nope = config.get("qk_rope_head_dim"), config.get("qk_nope_head_dim")
    if rope is None or nope is None:
        return
    _agree(config, "head_dim", config.get("head_dim"), "qk_rope_head_dim", rope)
    both = "qk_nope_head_dim + qk_rope_head_dim"
    _agree(config, "qk_head_dim", config.get("qk_head_dim"), both, rope + nope)


def _lists(config: dict) -> list[str]:
    """Say which of a list of layers and its short form is used: the list."""
    layers, kinds = config.get("num_hidden_layers"), config.get("mlp_layer_types")
    notes = []
    for key, kind in (("first_k_dense_replace", "dense"), ("num_hash_layers", "hash_moe")):
        count = config.get(key)
        if not kinds or not layers or count is None:
            continue
        if list(kinds).count(kind) != min(count, layers):
            if config.get("model_type") == "deepseek_v3":  # transformers reads only the count
                refuse("mlp_layer_types", kinds, f"contradicts {key} = {count}: drop one of them")
            notes.append(f"mlp_layer_types is used, and not {key} = {count}")
    return notes
