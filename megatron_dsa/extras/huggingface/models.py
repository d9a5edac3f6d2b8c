"""Table of models: keys of ``config.json`` and tensor names.

A misread key loads silently and gives a worse model, so unknown keys are errors.
"""

from megatron_dsa.config.presets import POOL_SIZE
from megatron_dsa.extras.huggingface.keys import EXPERTS, INDEXER
from megatron_dsa.extras.huggingface.model_glm_5_3 import GLM_5_3_FLASH
from megatron_dsa.extras.huggingface.model_v3 import DEEPSEEK_V3, with_indexer
from megatron_dsa.extras.huggingface.model_v4 import DEEPSEEK_V4

#: Models by ``model_type``.
MODELS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": with_indexer("DeepseekV32ForCausalLM", interleaved=False),
    "glm_moe_dsa": with_indexer("GlmMoeDsaForCausalLM", interleaved=True),
    "glm5_next": GLM_5_3_FLASH,
    "deepseek_v4": DEEPSEEK_V4,
}

#: Field -> its config.json key, if the names differ.
_KEYS = {
    "rotary_base": "rope_theta",
    "csa_compress_rotary_base": "compress_rope_theta",
    "rope_type": "rope_scaling.type",
    "rotary_scaling_factor": "rope_scaling.factor",
    "csa_compress_ratios": "compress_ratios",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "dsa_indexer_topk_freq": "index_topk_freq",
    "dsa_indexer_skip_topk_offset": "index_skip_topk_offset",
    "dsa_indexer_rope_interleaved": "model_type, or indexer_rope_interleave",
    "moe_layer_freq": "first_k_dense_replace, or mlp_layer_types",
    "moe_shared_expert_intermediate_size": "n_shared_experts * moe_intermediate_size",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_score_function": "scoring_func",
    "moe_hash_layers": "num_hash_layers, or mlp_layer_types",
    "activation_func_clamp_value": "swiglu_limit",
    POOL_SIZE: "index_kpool",
    "linear_attention_freq": "layer_types",
}


def key_of(name: str) -> str:
    tables = (_KEYS, *({x: k for k, x in kind.fields.items()} for kind in MODELS.values()))
    shared = {field: key for keys in (INDEXER, EXPERTS) for key, field in keys.items()}
    return next((table[name] for table in (shared, *tables) if name in table), name)
