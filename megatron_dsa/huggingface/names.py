"""Names: which tensors of a Hugging Face checkpoint make up which parameter of a Megatron model.

One table for DeepSeek-V3, DeepSeek-V3.2 and GLM-5. Hugging Face's names are those of the released
checkpoints (one tensor per expert); Megatron's are those of its MLA, MoE and bundled DSA, which
Megatron-Bridge uses, too. Linears have the same orientation on both sides and no weight is
permuted: all a conversion does is to put gate and up projection on top of each other.
"""

from __future__ import annotations

import enum
import functools
import re
from dataclasses import dataclass

from megatron_dsa.errors import ConfigError


class Split(enum.Enum):
    """How tensor-parallel ranks share a parameter."""

    WHOLE = "every rank holds it in full"
    ROWS = "by dim 0 (column-parallel linears)"
    COLUMNS = "by dim 1 (row-parallel linears)"
    VOCABULARY = "by dim 0, after padding with rows of zeros"
    LATENT = "by dim 0 without transformer-engine, else whole (down projections)"


@dataclass(frozen=True)
class Entry:
    """One parameter.

    Attributes:
        hf: Hugging Face's names; the tensors lie one after the other along dim 0 in Megatron.
        megatron: Megatron's name, and what other layer sets call the same parameter.
        split: how tensor-parallel ranks share it; each of the ``hf`` tensors is split by itself.
    """

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    split: Split = Split.WHOLE

    @property
    def is_expert(self) -> bool:
        """Whether there is one such parameter per routed expert."""
        return "{expert}" in self.hf[0]


def _entry(hf: str | tuple[str, ...], megatron: str | tuple[str, ...], split=Split.WHOLE) -> Entry:
    def as_tuple(names):
        return (names,) if isinstance(names, str) else names

    return Entry(as_tuple(hf), as_tuple(megatron), split)


_INDEXER = "self_attention.core_attention.indexer."

#: Parameters outside the layers.
MODEL = (
    _entry("model.embed_tokens.weight", "embedding.word_embeddings.weight", Split.VOCABULARY),
    _entry("model.norm.weight", "decoder.final_layernorm.weight"),
    _entry("lm_head.weight", "output_layer.weight", Split.VOCABULARY),
)

#: Parameters of a layer, after ``model.layers.<n>.`` and ``decoder.layers.<n>.``. The second
#: Megatron name is that of layers with the norm fused in, or of experts in one grouped linear.
LAYER = (
    _entry("input_layernorm.weight", "input_layernorm.weight"),
    _entry("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", Split.LATENT),
    _entry(
        "self_attn.q_a_layernorm.weight",
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ),
    _entry("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", Split.ROWS),
    _entry(
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_down_proj.weight",
        Split.LATENT,
    ),
    _entry(
        "self_attn.kv_a_layernorm.weight",
        (
            "self_attention.kv_layernorm.weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
    ),
    _entry("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", Split.ROWS),
    _entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight", Split.COLUMNS),
    _entry("self_attn.indexer.wq_b.weight", f"{_INDEXER}linear_wq_b.weight"),
    _entry("self_attn.indexer.wk.weight", f"{_INDEXER}linear_wk.weight"),
    _entry("self_attn.indexer.k_norm.weight", f"{_INDEXER}k_norm.weight"),
    _entry("self_attn.indexer.k_norm.bias", f"{_INDEXER}k_norm.bias"),
    _entry("self_attn.indexer.weights_proj.weight", f"{_INDEXER}linear_weights_proj.weight"),
    _entry(
        "post_attention_layernorm.weight",
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ),
    _entry(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.linear_fc1.weight", Split.ROWS),
    _entry("mlp.down_proj.weight", "mlp.linear_fc2.weight", Split.COLUMNS),
    _entry("mlp.gate.weight", "mlp.router.weight"),
    _entry("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"),
    _entry(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        (
            "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            "mlp.experts.linear_fc1.weight{expert}",
        ),
        Split.ROWS,
    ),
    _entry(
        "mlp.experts.{expert}.down_proj.weight",
        (
            "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            "mlp.experts.linear_fc2.weight{expert}",
        ),
        Split.COLUMNS,
    ),
    _entry(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "mlp.shared_experts.linear_fc1.weight",
        Split.ROWS,
    ),
    _entry(
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_experts.linear_fc2.weight",
        Split.COLUMNS,
    ),
)

#: What a multi-token-prediction layer has besides a decoder layer. Hugging Face numbers these
#: layers on behind the decoder; Megatron has ``mtp.layers.<n>.``.
MTP = (
    _entry("enorm.weight", "enorm.weight"),
    _entry("hnorm.weight", "hnorm.weight"),
    _entry("eh_proj.weight", "eh_proj.weight", Split.ROWS),
    _entry("shared_head.norm.weight", "final_layernorm.weight"),
)

#: Copies that checkpoints keep in their multi-token-prediction layers, and of what. Megatron
#: shares the parameter itself.
MTP_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Match:
    """What a parameter of a Megatron model is made of: its entry and the full names of ``hf``."""

    entry: Entry
    hf: tuple[str, ...]


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\{expert\}", r"(?P<expert>\d+)")


@functools.cache
def _compiled(table: tuple[Entry, ...], side: str) -> tuple[tuple[re.Pattern, Entry], ...]:
    return tuple(
        (re.compile(_regex(name)), entry) for entry in table for name in getattr(entry, side)
    )


def _find(table: tuple[Entry, ...], side: str, name: str) -> tuple[Entry, str | None] | None:
    for pattern, entry in _compiled(table, side):
        if found := pattern.fullmatch(name):
            return entry, found.groupdict().get("expert")
    return None


def match(name: str, num_layers: int) -> Match:
    """Return what the Megatron parameter ``name`` is made of.

    Args:
        name: with the numbers of layers and experts in the whole model, see ``ranks.global_name``.
        num_layers: decoder layers of the whole model.

    Raises:
        ConfigError: the table does not know the parameter.
    """
    for pattern, table, first in (
        (r"decoder\.layers\.(\d+)\.(.*)", LAYER, 0),
        (r"mtp\.layers\.(\d+)\.mtp_model_layer\.(.*)", LAYER, num_layers),
        (r"mtp\.layers\.(\d+)\.(.*)", MTP, num_layers),
    ):
        if (layer := re.fullmatch(pattern, name)) and (found := _find(table, "megatron", layer[2])):
            entry, expert = found
            prefix = f"model.layers.{int(layer[1]) + first}."
            return Match(entry, tuple(prefix + hf.format(expert=expert) for hf in entry.hf))
    if found := _find(MODEL, "megatron", name):
        return Match(found[0], found[0].hf)
    raise ConfigError(
        f"parameter {name} has no counterpart in Hugging Face checkpoints of DeepSeek-V3, "
        "DeepSeek-V3.2 or GLM-5: drop the flag that added it, or give it a line in "
        "megatron_dsa/huggingface/names.py"
    )


def is_known(hf_name: str) -> bool:
    """Whether the table has a place for a tensor of a Hugging Face checkpoint."""
    if _find(MODEL, "hf", hf_name):
        return True
    layer = re.fullmatch(r"model\.layers\.\d+\.(.*)", hf_name)
    return layer is not None and (
        layer[1] in MTP_COPIES or _find(LAYER + MTP, "hf", layer[1]) is not None
    )


def layer_of(hf_name: str) -> int | None:
    """Return the number of the layer that a Hugging Face tensor belongs to, or ``None``."""
    layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
    return None if layer is None else int(layer[1])
