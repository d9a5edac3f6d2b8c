"""Tensors of a Hugging Face checkpoint for each parameter of a Megatron model.

Tables map released names to Megatron-Bridge's; tensors are joined, never permuted.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megatron_dsa.errors import ConfigError


class Split(enum.Enum):
    """Division of a parameter over tensor-parallel ranks."""

    WHOLE = "every rank holds it in full"
    ROWS = "by dim 0 (column-parallel linears)"
    COLUMNS = "by dim 1 (row-parallel linears)"
    VOCABULARY = "by dim 0, after padding with rows of zeros"
    LATENT = "by dim 0 without transformer-engine, else whole (down projections)"
    TABLE = "every rank holds it in full, after padding with rows that name the first experts"

    @property
    def is_padded(self) -> bool:
        return self in (Split.VOCABULARY, Split.TABLE)


@dataclass(frozen=True)
class Entry:
    """Mapping of one parameter.

    Attributes:
        hf: Hugging Face's names, joined along dim ``join``.
        megatron: Megatron's names, one per layer spec.
        split: tensor-parallel division, applied to each ``hf`` tensor separately.
    """

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    split: Split = Split.WHOLE
    join: int = 0

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.hf[0]


@dataclass(frozen=True)
class Match:
    entry: Entry
    hf: tuple[str, ...]

    @property
    def is_table(self) -> bool:
        return self.entry.split is Split.TABLE


@dataclass(frozen=True)
class Location:
    name: str
    prefix: str = ""
    is_mtp: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class Names:
    """Tensor names of a model family.

    Attributes:
        models: family name in messages.
        model, layer: parameters outside and inside layers.
        mtp: further parameters of multi-token prediction.
        mtp_prefix: of MTP layers; ``None``: numbered after the decoder layers.
        copies: repeated tensor in MTP -> original tensor, which Megatron shares.
        features: optional feature -> its tensors.
        quantised: weights quantised in releases.
        scale: name of their scales.
        rename: translates a stored tensor name to the released name.
        outside: tensors outside the text model.
    """

    models: str
    model: tuple[Entry, ...]
    layer: tuple[Entry, ...]
    mtp: tuple[Entry, ...]
    layer_prefix: str
    mtp_prefix: str | None
    copies: dict[str, str]
    writes_copies: bool = True
    features: dict[str, re.Pattern] = field(default_factory=dict)
    quantised: re.Pattern = re.compile(r"(?!)")
    scale: str = "{}.weight_scale_inv"
    rename: Callable[[str], str] = str
    outside: re.Pattern = re.compile(r"(?!)")

    def match(self, name: str, num_layers: int) -> Match:
        """Return a parameter's tensors; ``name`` has global layer and expert numbers."""
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
            "drop the flag that added it, or give it a line in extras/huggingface/names.py"
        )

    def prefix(self, layer: int, is_mtp: bool, num_layers: int) -> str:
        """Return a layer's name prefix; decoder and MTP layers each count from 0."""
        if is_mtp and self.mtp_prefix is not None:
            return self.mtp_prefix.format(layer)
        return self.layer_prefix.format(layer + num_layers * is_mtp)

    def mtp_prefixes(self, count: int, num_layers: int) -> list[str]:
        return [self.prefix(layer, True, num_layers) for layer in range(count)]

    def locate(self, hf_name: str, num_layers: int) -> Location | None:
        if _find(self.model, "hf", hf_name):
            return Location(hf_name)
        for template, is_mtp in ((self.layer_prefix, False), (self.mtp_prefix, True)):
            pattern = re.escape(template or "").replace(r"\{\}", r"(\d+)")
            layer = re.fullmatch(f"({pattern})(.*)", hf_name) if template else None
            if layer is None:
                continue
            prefix, number, rest = layer.groups()
            found = _find(self.layer + self.mtp, "hf", rest)
            if found is None and rest not in self.copies:
                return None
            expert = int(found[1]) if found and found[1] else None
            return Location(hf_name, prefix, is_mtp or int(number) >= num_layers, expert)
        return None

    def by_feature(self, hf_names: Iterable[str]) -> dict[str, list[str]]:
        names = sorted(hf_names)
        found = {x: [n for n in names if p.fullmatch(n)] for x, p in self.features.items()}
        return {feature: tensors for feature, tensors in found.items() if tensors}


@functools.cache
def _compiled(table: tuple[Entry, ...], side: str) -> tuple[tuple[re.Pattern, Entry], ...]:
    def regex(name: str) -> re.Pattern:
        return re.compile(re.escape(name).replace(r"\{expert\}", r"(?P<expert>\d+)"))

    return tuple((regex(name), line) for line in table for name in getattr(line, side))


def _find(table: tuple[Entry, ...], side: str, name: str) -> tuple[Entry, str | None] | None:
    for pattern, line in _compiled(table, side):
        if found := pattern.fullmatch(name):
            return line, found.groupdict().get("expert")
    return None


def _entry(hf: str | tuple[str, ...], megatron: str | tuple[str, ...], *rest) -> Entry:
    hf, megatron = ((x,) if isinstance(x, str) else x for x in (hf, megatron))
    return Entry(hf, megatron, *rest)


#: Megatron names of gated MLPs' linears; the second name is for grouped experts.
_DENSE = ("mlp.linear_{fc}.weight",)
_SHARED = ("mlp.shared_experts.linear_{fc}.weight",)
_EXPERT = (
    "mlp.experts.local_experts.{expert}.linear_{fc}.weight",
    "mlp.experts.linear_{fc}.weight{expert}",
)


def _mlp(prefix: str, ours: tuple[str, ...], gate: str, up: str, down: str) -> tuple[Entry, Entry]:
    fc1, fc2 = (tuple(x.replace("{fc}", fc) for x in ours) for fc in ("fc1", "fc2"))
    both = (f"{prefix}{gate}.weight", f"{prefix}{up}.weight")
    return _entry(both, fc1, Split.ROWS), _entry(f"{prefix}{down}.weight", fc2, Split.COLUMNS)


def _connection(kind: str, ours: str = "") -> tuple[Entry, ...]:
    names = [f"hc_{kind}_{part}" for part in ("fn", "base", "scale")]
    return tuple(_entry(name, f"{ours}{name}") for name in names)


_ATTN = "self_attention."
_CORE = f"{_ATTN}core_attention."
INDEXER = f"{_CORE}indexer."

# ------------------------------------------------------------ DeepSeek-V3, DeepSeek-V3.2, GLM-5

# In a pair of Megatron names, the second is for layers with a fused norm.

_V3_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

V3 = Names(
    models="DeepSeek-V3, DeepSeek-V3.2 and GLM-5",
    model=(
        _entry("model.embed_tokens.weight", "embedding.word_embeddings.weight", Split.VOCABULARY),
        _entry("model.norm.weight", "decoder.final_layernorm.weight"),
        _entry("lm_head.weight", "output_layer.weight", Split.VOCABULARY),
    ),
    layer=(
        _entry("input_layernorm.weight", "input_layernorm.weight"),
        _entry("self_attn.q_a_proj.weight", f"{_ATTN}linear_q_down_proj.weight", Split.LATENT),
        _entry(
            "self_attn.q_a_layernorm.weight",
            (f"{_ATTN}q_layernorm.weight", f"{_ATTN}linear_q_up_proj.layer_norm_weight"),
        ),
        _entry("self_attn.q_b_proj.weight", f"{_ATTN}linear_q_up_proj.weight", Split.ROWS),
        _entry(
            "self_attn.kv_a_proj_with_mqa.weight",
            f"{_ATTN}linear_kv_down_proj.weight",
            Split.LATENT,
        ),
        _entry(
            "self_attn.kv_a_layernorm.weight",
            (f"{_ATTN}kv_layernorm.weight", f"{_ATTN}linear_kv_up_proj.layer_norm_weight"),
        ),
        _entry("self_attn.kv_b_proj.weight", f"{_ATTN}linear_kv_up_proj.weight", Split.ROWS),
        _entry("self_attn.o_proj.weight", f"{_ATTN}linear_proj.weight", Split.COLUMNS),
        _entry("self_attn.indexer.wq_b.weight", f"{INDEXER}linear_wq_b.weight"),
        _entry("self_attn.indexer.wk.weight", f"{INDEXER}linear_wk.weight"),
        _entry("self_attn.indexer.k_norm.weight", f"{INDEXER}k_norm.weight"),
        _entry("self_attn.indexer.k_norm.bias", f"{INDEXER}k_norm.bias"),
        _entry("self_attn.indexer.weights_proj.weight", f"{INDEXER}linear_weights_proj.weight"),
        _entry(
            "post_attention_layernorm.weight",
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ),
        _entry("mlp.gate.weight", "mlp.router.weight"),
        _entry("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias"),
        *_mlp("mlp.", _DENSE, *_V3_PROJECTIONS),
        *_mlp("mlp.experts.{expert}.", _EXPERT, *_V3_PROJECTIONS),
        *_mlp("mlp.shared_experts.", _SHARED, *_V3_PROJECTIONS),
    ),
    mtp=(
        _entry("enorm.weight", "enorm.weight"),
        _entry("hnorm.weight", "hnorm.weight"),
        _entry("eh_proj.weight", "eh_proj.weight", Split.ROWS),
        _entry("shared_head.norm.weight", "final_layernorm.weight"),
    ),
    layer_prefix="model.layers.{}.",
    mtp_prefix=None,
    copies={
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
    quantised=re.compile(
        r".*\.self_attn\.(\w+_proj|kv_a_proj_with_mqa|indexer\.(wq_b|wk))\.weight"
        r"|.*\.mlp\.(.*\.)?(gate|up|down)_proj\.weight"
    ),
)

# ------------------------------------------------------------------------------- GLM-5.3-Flash


def _kda(hf: str, ours: str, split: Split = Split.ROWS) -> Entry:
    return _entry(f"self_attn.{hf}", f"{_ATTN}{ours}", split)


GLM_5_3 = dataclasses.replace(
    V3,
    models="GLM-5.3-Flash",
    model=(
        _entry(
            "model.language_model.embed_tokens.weight",
            "embedding.word_embeddings.weight",
            Split.VOCABULARY,
        ),
        _entry("model.language_model.norm.weight", "decoder.final_layernorm.weight"),
        _entry("lm_head.weight", "output_layer.weight", Split.VOCABULARY),
    ),
    layer=(
        *V3.layer,
        _entry("self_attn.indexer.index_kpool_compress_gate", f"{INDEXER}linear_pool_gate.weight"),
        _entry("self_attn.indexer.index_kpool_compress_ape", f"{INDEXER}pool_ape"),
        *_connection("attn"),
        *_connection("ffn"),
        *(_kda(f"{x}_proj.weight", f"linear_{x}_proj.weight") for x in ("q", "k", "v", "b")),
        *(_kda(f"{x}_conv1d.weight", f"{x}_conv1d.weight") for x in ("q", "k", "v")),
        *(_kda(f"{x}_a_proj.weight", f"linear_{x}_a_proj.weight", Split.WHOLE) for x in "fg"),
        *(_kda(f"{x}_b_proj.weight", f"linear_{x}_b_proj.weight") for x in "fg"),
        _kda("dt_bias", "dt_bias"),
        _kda("A_log", "A_log"),
        _kda("o_norm.weight", "o_norm.weight", Split.WHOLE),
    ),
    layer_prefix="model.language_model.layers.{}.",
    copies={
        "embed_tokens.weight": "model.language_model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    },
    writes_copies=False,
    quantised=re.compile(r".*\.mlp\.(.*\.)?(gate|up|down)_proj\.weight"),
    # Text-only checkpoints omit ``language_model.``.
    rename=functools.partial(
        re.sub, r"^model\.(?!language_model\.|visual\.)", "model.language_model."
    ),
    outside=re.compile(r"model\.visual\."),
)

# ----------------------------------------------------------------------------------- DeepSeek-V4

# See transformers' deepseek_v4 conversion and Megatron-Bridge's deepseek_v4_bridge.py.

HYPER_CONNECTIONS, HASH_ROUTING = "hyper-connections", "hash-routing"
PREDICTION = "multi-token-prediction"

#: transformers' names -> released names.
_V4_SAVED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)


def _v4_released(name: str) -> str:
    for pattern, replacement in _V4_SAVED:
        name = re.sub(pattern, replacement, name)
    return name


def _v4_compressor(hf: str, ours: str) -> tuple[Entry, ...]:
    return (
        _entry(f"{hf}wkv.weight", f"{ours}linear_wkv.weight"),
        _entry(f"{hf}wgate.weight", f"{ours}linear_wgate.weight"),
        _entry(f"{hf}ape", f"{ours}ape"),
        _entry(f"{hf}norm.weight", f"{ours}norm.weight"),
    )


V4 = Names(
    models="DeepSeek-V4",
    model=(
        _entry("embed.weight", "embedding.word_embeddings.weight", Split.VOCABULARY),
        _entry("norm.weight", "decoder.final_layernorm.weight"),
        _entry("head.weight", "output_layer.weight", Split.VOCABULARY),
        *_connection("head", "decoder.final_layernorm."),
    ),
    layer=(
        *_connection("attn"),
        *_connection("ffn"),
        _entry("attn_norm.weight", "input_layernorm.weight"),
        _entry("attn.wq_a.weight", f"{_ATTN}linear_q_down_proj.weight"),
        _entry("attn.q_norm.weight", f"{_ATTN}q_layernorm.weight"),
        _entry("attn.wq_b.weight", f"{_ATTN}linear_q_up_proj.weight", Split.ROWS),
        _entry("attn.wkv.weight", f"{_ATTN}linear_kv_proj.weight"),
        _entry("attn.kv_norm.weight", f"{_ATTN}kv_layernorm.weight"),
        _entry("attn.attn_sink", f"{_CORE}attn_sink", Split.ROWS),
        _entry("attn.wo_a.weight", f"{_ATTN}linear_o_group_proj.weight", Split.ROWS),
        _entry("attn.wo_b.weight", f"{_ATTN}linear_proj.weight", Split.COLUMNS),
        *_v4_compressor("attn.compressor.", f"{_CORE}compressor."),
        _entry("attn.indexer.wq_b.weight", f"{INDEXER}linear_wq_b.weight"),
        _entry("attn.indexer.weights_proj.weight", f"{INDEXER}linear_weights_proj.weight"),
        *_v4_compressor("attn.indexer.compressor.", f"{INDEXER}compressor."),
        _entry("ffn_norm.weight", "pre_mlp_layernorm.weight"),
        _entry("ffn.gate.weight", "mlp.router.weight"),
        _entry("ffn.gate.bias", "mlp.router.expert_bias"),
        _entry("ffn.gate.tid2eid", "mlp.router.tid2eid", Split.TABLE),
        *_mlp("ffn.experts.{expert}.", _EXPERT, "w1", "w3", "w2"),
        *_mlp("ffn.shared_experts.", _SHARED, "w1", "w3", "w2"),
    ),
    mtp=(
        _entry("enorm.weight", "enorm.weight"),
        _entry("hnorm.weight", "hnorm.weight"),
        # Without streams, one linear projects [embedding, hidden state].
        _entry(("e_proj.weight", "h_proj.weight"), "eh_proj.weight", Split.ROWS, 1),
        # With streams, the embedding and every stream are projected separately.
        _entry("e_proj.weight", "e_proj.weight"),
        _entry("h_proj.weight", "h_proj.weight"),
        _entry("norm.weight", "final_layernorm.weight"),
        *_connection("head", "final_layernorm."),
    ),
    layer_prefix="layers.{}.",
    mtp_prefix="mtp.{}.",
    copies={"emb.tok_emb.weight": "embed.weight", "head.weight": "head.weight"},
    writes_copies=False,
    features={
        HYPER_CONNECTIONS: re.compile(r"(.*\.)?hc_(attn|ffn|head)_(fn|base|scale)"),
        HASH_ROUTING: re.compile(r".*\.ffn\.gate\.tid2eid"),
        PREDICTION: re.compile(r"mtp\..*"),
    },
    quantised=re.compile(
        r".*\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight"
        r"|.*\.ffn\.(experts\.\d+|shared_experts)\.w[123]\.weight"
        r"|mtp\.\d+\.[eh]_proj\.weight"
    ),
    scale="{}.scale",
    rename=_v4_released,
)
