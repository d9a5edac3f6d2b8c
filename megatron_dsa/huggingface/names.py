"""Names: which tensors of a Hugging Face checkpoint make up which parameter of a Megatron model.

One table for DeepSeek-V3, DeepSeek-V3.2 and GLM-5; that of DeepSeek-V4 is in ``names_v4.py``.
Hugging Face's names are those of the released checkpoints (one tensor per expert); Megatron's are
those of its MLA, MoE and bundled DSA, which Megatron-Bridge uses, too. Linears have the same
orientation on both sides and no weight is permuted: all a conversion does is to join tensors, as
the gate and the up projection.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

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
        hf: Hugging Face's names; the tensors lie one after the other along ``join`` in Megatron.
        megatron: Megatron's name, and what other layer sets call the same parameter.
        split: how tensor-parallel ranks share it; each of the ``hf`` tensors is split by itself.
        join: dim along which the ``hf`` tensors are joined.
    """

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    split: Split = Split.WHOLE
    join: int = 0

    @property
    def is_expert(self) -> bool:
        """Whether there is one such parameter per routed expert."""
        return "{expert}" in self.hf[0]


def entry(
    hf: str | tuple[str, ...], megatron: str | tuple[str, ...], split=Split.WHOLE, join: int = 0
) -> Entry:
    """Return an entry; single names may be given as they are."""

    def as_tuple(names):
        return (names,) if isinstance(names, str) else names

    return Entry(as_tuple(hf), as_tuple(megatron), split, join)


INDEXER = "self_attention.core_attention.indexer."
#: Both linears of an expert; the second name is that of experts in one grouped linear.
EXPERT_FC1 = (
    "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    "mlp.experts.linear_fc1.weight{expert}",
)
EXPERT_FC2 = (
    "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    "mlp.experts.linear_fc2.weight{expert}",
)

#: Parameters outside the layers.
MODEL = (
    entry("model.embed_tokens.weight", "embedding.word_embeddings.weight", Split.VOCABULARY),
    entry("model.norm.weight", "decoder.final_layernorm.weight"),
    entry("lm_head.weight", "output_layer.weight", Split.VOCABULARY),
)

#: Parameters of a layer, after ``model.layers.<n>.`` and ``decoder.layers.<n>.``. The second
#: Megatron name is that of layers with the norm fused in.
LAYER = (
    entry("input_layernorm.weight", "input_layernorm.weight"),
    entry("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", Split.LATENT),
    entry(
        "self_attn.q_a_layernorm.weight",
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ),
    entry("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", Split.ROWS),
    entry(
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attention.linear_kv_down_proj.weight",
        Split.LATENT,
    ),
    entry(
        "self_attn.kv_a_layernorm.weight",
        (
            "self_attention.kv_layernorm.weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
    ),
    entry("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", Split.ROWS),
    entry("self_attn.o_proj.weight", "self_attention.linear_proj.weight", Split.COLUMNS),
    entry("self_attn.indexer.wq_b.weight", f"{INDEXER}linear_wq_b.weight"),
    entry("self_attn.indexer.wk.weight", f"{INDEXER}linear_wk.weight"),
    entry("self_attn.indexer.k_norm.weight", f"{INDEXER}k_norm.weight"),
    entry("self_attn.indexer.k_norm.bias", f"{INDEXER}k_norm.bias"),
    entry("self_attn.indexer.weights_proj.weight", f"{INDEXER}linear_weights_proj.weight"),
    entry(
        "post_attention_layernorm.weight",
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ),
    entry(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.linear_fc1.weight", Split.ROWS),
    entry("mlp.down_proj.weight", "mlp.linear_fc2.weight", Split.COLUMNS),
    entry("mlp.gate.weight", "mlp.router.weight"),
    entry("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"),
    entry(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        EXPERT_FC1,
        Split.ROWS,
    ),
    entry("mlp.experts.{expert}.down_proj.weight", EXPERT_FC2, Split.COLUMNS),
    entry(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        "mlp.shared_experts.linear_fc1.weight",
        Split.ROWS,
    ),
    entry(
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_experts.linear_fc2.weight",
        Split.COLUMNS,
    ),
)

#: What a multi-token-prediction layer (``mtp.layers.<n>.``) has besides a decoder layer.
MTP = (
    entry("enorm.weight", "enorm.weight"),
    entry("hnorm.weight", "hnorm.weight"),
    entry("eh_proj.weight", "eh_proj.weight", Split.ROWS),
    entry("shared_head.norm.weight", "final_layernorm.weight"),
)


@dataclass(frozen=True)
class Match:
    """What a parameter of a Megatron model is made of: its entry and the full names of ``hf``."""

    entry: Entry
    hf: tuple[str, ...]


@dataclass(frozen=True)
class Location:
    """Where a tensor of a Hugging Face checkpoint belongs: prefix of its layer, routed expert."""

    name: str
    prefix: str
    expert: int | None


@dataclass(frozen=True)
class Names:
    """The table of a family of models.

    Attributes:
        models: what the family is called in messages.
        model: parameters outside the layers.
        layer: those of a layer, without the layer's prefix.
        mtp: what a multi-token-prediction layer has besides a decoder layer.
        layer_prefix: of a layer's tensors, with ``{}`` for its number.
        mtp_prefix: of a multi-token-prediction layer's; ``None``: these layers are numbered on
            behind the decoder's.
        copies: what checkpoints keep a second time in their multi-token-prediction layers, and of
            which tensor. Megatron shares the parameter itself.
        writes_copies: an export writes them.
        lacking: feature that released Megatron lacks -> pattern of the tensors that belong to it.
        rename: turns the name in a file into the released one.
    """

    models: str
    model: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    mtp: tuple[Entry, ...]
    layer_prefix: str
    mtp_prefix: str | None
    copies: dict[str, str]
    writes_copies: bool = True
    lacking: dict[str, re.Pattern] = field(default_factory=dict)
    rename: Callable[[str], str] = str

    def match(self, name: str, num_layers: int) -> Match:
        """Return what the Megatron parameter ``name`` is made of.

        Args:
            name: with the numbers of layers and experts in the whole model, see
                ``ranks.global_name``.
            num_layers: decoder layers of the whole model.

        Raises:
            ConfigError: the table does not know the parameter.
        """
        for pattern, table, is_mtp in (
            (r"decoder\.layers\.(\d+)\.(.*)", self.layer, False),
            (r"mtp\.layers\.(\d+)\.mtp_model_layer\.(.*)", self.layer, True),
            (r"mtp\.layers\.(\d+)\.(.*)", self.mtp, True),
        ):
            layer = re.fullmatch(pattern, name)
            if layer and (found := _find(table, "megatron", layer[2])):
                line, expert = found
                prefix = self.prefix(int(layer[1]), is_mtp, num_layers)
                return Match(line, tuple(prefix + hf.format(expert=expert) for hf in line.hf))
        if found := _find(self.model, "megatron", name):
            return Match(found[0], found[0].hf)
        raise ConfigError(
            f"parameter {name} has no counterpart in Hugging Face checkpoints of {self.models}: "
            "drop the flag that added it, or give it a line in megatron_dsa/huggingface/names*.py"
        )

    def prefix(self, layer: int, is_mtp: bool, num_layers: int) -> str:
        """Return how the names of a layer's tensors begin; ``layer`` counts from 0 in its kind."""
        if is_mtp and self.mtp_prefix is not None:
            return self.mtp_prefix.format(layer)
        return self.layer_prefix.format(layer + num_layers * is_mtp)

    def _split(self, hf_name: str) -> tuple[int, bool, str] | None:
        """Return number, whether the prefix is that of prediction layers, and rest of a name."""
        for template, is_mtp in ((self.layer_prefix, False), (self.mtp_prefix, True)):
            if template is None:
                continue
            before, after = map(re.escape, template.split("{}"))
            if found := re.fullmatch(rf"{before}(\d+){after}(.*)", hf_name):
                return int(found[1]), is_mtp, found[2]
        return None

    def is_known(self, hf_name: str) -> bool:
        """Whether the table has a place for a tensor of a Hugging Face checkpoint."""
        if _find(self.model, "hf", hf_name):
            return True
        parts = self._split(hf_name)
        return parts is not None and (
            parts[2] in self.copies or _find(self.layer + self.mtp, "hf", parts[2]) is not None
        )

    def is_mtp(self, hf_name: str, num_layers: int) -> bool:
        """Whether a tensor of a checkpoint belongs to multi-token prediction."""
        parts = self._split(hf_name)
        return parts is not None and (parts[1] or parts[0] >= num_layers)

    def locate(self, hf_name: str) -> Location | None:
        """Return where a tensor of a checkpoint belongs; ``None``: outside the layers."""
        parts = self._split(hf_name)
        if parts is None:
            return None
        rest = parts[2]
        found = _find(self.layer + self.mtp, "hf", rest)
        expert = found[1] if found else None
        prefix = hf_name.removesuffix(rest)
        return Location(hf_name, prefix, None if expert is None else int(expert))

    def lacked(self, hf_name: str) -> str | None:
        """Return the feature that a tensor belongs to and released Megatron lacks, if any."""
        for feature, pattern in self.lacking.items():
            if pattern.fullmatch(hf_name):
                return feature
        return None


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\{expert\}", r"(?P<expert>\d+)")


@functools.cache
def _compiled(table: tuple[Entry, ...], side: str) -> tuple[tuple[re.Pattern, Entry], ...]:
    return tuple((re.compile(_regex(name)), line) for line in table for name in getattr(line, side))


def _find(table: tuple[Entry, ...], side: str, name: str) -> tuple[Entry, str | None] | None:
    for pattern, line in _compiled(table, side):
        if found := pattern.fullmatch(name):
            return line, found.groupdict().get("expert")
    return None


#: DeepSeek-V3, DeepSeek-V3.2 and GLM-5.
V3 = Names(
    models="DeepSeek-V3, DeepSeek-V3.2 and GLM-5",
    model=MODEL,
    layer=LAYER,
    mtp=MTP,
    layer_prefix="model.layers.{}.",
    mtp_prefix=None,
    copies={
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
)
