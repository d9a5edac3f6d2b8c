"""How a ``config.json`` is read: an entry of the table of models, and keys that models share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_dsa.extras.huggingface.names import Names
from megatron_dsa.extras.huggingface.rules import refuse, required

Fields = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model type. Fields are arguments of Megatron's transformer configuration.

    Attributes:
        architecture: class of ``transformers``, which Megatron-Bridge asks for.
        names: names of the tensors.
        fields: required key -> field of the same meaning.
        only: optional key -> the only value that Megatron's layers implement.
        converters: called in order with config.json; they return further fields, or raise.
        latent_norm_epsilon: epsilon of the norms of latents, if it is not ``rms_norm_eps``.
        remarks: optional key -> where Megatron's layers differ a little if it is set.
    """

    architecture: str
    names: Names
    fields: dict[str, str]
    only: dict[str, Any]
    converters: tuple[Callable[[dict], Fields], ...]
    latent_norm_epsilon: float | None = None
    remarks: dict[str, str] = field(default_factory=dict)


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
    """Whether rope parameters are YaRN's, or raise for a key or type that is not understood.

    ``yarn`` has the keys of this model's YaRN besides :data:`_YARN_KEYS`; ``None``: no YaRN.
    """
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
    """Return the fields of YaRN but for the base and its factors of attention."""
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
    """Return the fields of an indexer, whose rope pairs neighbouring dims or halves."""
    return {ours: required(config, key) for key, ours in INDEXER.items()} | {
        "dsa_indexer_rope_interleaved": rope_interleaved,
        "dsa_indexer_scoring_relu": True,
    }


def expert_fields(config: dict, pattern: list[int]) -> Fields:
    """Return the fields of experts; ``pattern`` has 1 for a layer with experts, 0 for another."""
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
