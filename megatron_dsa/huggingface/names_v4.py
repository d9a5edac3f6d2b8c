"""Names of DeepSeek-V4's tensors, as in the released checkpoints.

Sources: the conversion table of ``transformers`` (``deepseek_v4``) and Megatron-Bridge's
``deepseek_v4_bridge.py``, which agree. Not in released Megatron, and so without a place here:
hyper-connections and the tables of hash-routed experts.
"""

from __future__ import annotations

import re

from megatron_dsa.huggingface.names import EXPERT_FC1, EXPERT_FC2, INDEXER, Names, Split, entry

_CORE = "self_attention.core_attention."
_COMPRESSOR = f"{_CORE}compressor."

_MODEL = (
    entry("embed.weight", "embedding.word_embeddings.weight", Split.VOCABULARY),
    entry("norm.weight", "decoder.final_layernorm.weight"),
    entry("head.weight", "output_layer.weight", Split.VOCABULARY),
)

_LAYER = (
    entry("attn_norm.weight", "input_layernorm.weight"),
    entry("attn.wq_a.weight", "self_attention.linear_q_down_proj.weight"),
    entry("attn.q_norm.weight", "self_attention.q_layernorm.weight"),
    entry("attn.wq_b.weight", "self_attention.linear_q_up_proj.weight", Split.ROWS),
    entry("attn.wkv.weight", "self_attention.linear_kv_proj.weight"),
    entry("attn.kv_norm.weight", "self_attention.kv_layernorm.weight"),
    entry("attn.attn_sink", f"{_CORE}attn_sink", Split.ROWS),
    entry("attn.wo_a.weight", "self_attention.linear_o_group_proj.weight", Split.ROWS),
    entry("attn.wo_b.weight", "self_attention.linear_proj.weight", Split.COLUMNS),
    entry("attn.compressor.wkv.weight", f"{_COMPRESSOR}linear_wkv.weight"),
    entry("attn.compressor.wgate.weight", f"{_COMPRESSOR}linear_wgate.weight"),
    entry("attn.compressor.ape", f"{_COMPRESSOR}ape"),
    entry("attn.compressor.norm.weight", f"{_COMPRESSOR}norm.weight"),
    entry("attn.indexer.wq_b.weight", f"{INDEXER}linear_wq_b.weight"),
    entry("attn.indexer.weights_proj.weight", f"{INDEXER}linear_weights_proj.weight"),
    entry("attn.indexer.compressor.wkv.weight", f"{INDEXER}compressor.linear_wkv.weight"),
    entry("attn.indexer.compressor.wgate.weight", f"{INDEXER}compressor.linear_wgate.weight"),
    entry("attn.indexer.compressor.ape", f"{INDEXER}compressor.ape"),
    entry("attn.indexer.compressor.norm.weight", f"{INDEXER}compressor.norm.weight"),
    entry("ffn_norm.weight", "pre_mlp_layernorm.weight"),
    entry("ffn.gate.weight", "mlp.router.weight"),
    entry("ffn.gate.bias", "mlp.router.expert_bias"),
    entry(
        ("ffn.experts.{expert}.w1.weight", "ffn.experts.{expert}.w3.weight"),
        EXPERT_FC1,
        Split.ROWS,
    ),
    entry("ffn.experts.{expert}.w2.weight", EXPERT_FC2, Split.COLUMNS),
    entry(
        ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
        "mlp.shared_experts.linear_fc1.weight",
        Split.ROWS,
    ),
    entry("ffn.shared_experts.w2.weight", "mlp.shared_experts.linear_fc2.weight", Split.COLUMNS),
)

_MTP = (
    entry("enorm.weight", "enorm.weight"),
    entry("hnorm.weight", "hnorm.weight"),
    # The sum of two projections is one of both inputs side by side: embedding, hidden state.
    entry(("e_proj.weight", "h_proj.weight"), "eh_proj.weight", Split.ROWS, join=1),
    entry("norm.weight", "final_layernorm.weight"),
)

HYPER_CONNECTIONS, HASH_ROUTING = "hyper-connections", "hash-routing"

#: How ``save_pretrained`` of transformers names tensors -> released names.
_SAVED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"),
    (re.compile(r"\.attn\.norm\."), ".attn.kv_norm."),
)


def _released(name: str) -> str:
    for pattern, replacement in _SAVED:
        name = pattern.sub(replacement, name)
    return name


V4 = Names(
    models="DeepSeek-V4",
    model=_MODEL,
    layer=_LAYER,
    mtp=_MTP,
    layer_prefix="layers.{}.",
    mtp_prefix="mtp.{}.",
    copies={"emb.tok_emb.weight": "embed.weight", "head.weight": "head.weight"},
    writes_copies=False,
    lacking={
        HYPER_CONNECTIONS: re.compile(r"(.*\.)?hc_(attn|ffn|head)_(fn|base|scale)"),
        HASH_ROUTING: re.compile(r".*\.ffn\.gate\.tid2eid"),
    },
    rename=_released,
)
