"""Shapes of the float64 references, from a configuration."""

from tests.reference import csa_float64, dsa_float64


def dsa_shape(config):
    return dsa_float64.Shape(
        kv_lora=config.kv_lora_rank,
        nope=config.qk_head_dim,
        v=config.v_head_dim,
        k_norm_eps=config.dsa_indexer_k_norm_epsilon,
        pool=config.dsa.indexer_pool_size,
        **_common(config, "mscale", "mscale_all_dim"),
    )


def csa_shape(config):
    return csa_float64.Shape(
        head_dim=config.v_head_dim,
        window=config.csa_window_size,
        ratio=config.csa_compress_ratios[0],
        o_groups=config.o_groups,
        o_lora=config.o_lora_rank,
        compress_rotary_base=config.csa_compress_rotary_base,
        **_common(config),
    )


def _common(config, *yarn):
    return {
        "heads": config.num_attention_heads,
        "hidden": config.hidden_size,
        "q_lora": config.q_lora_rank,
        "rope": config.qk_pos_emb_head_dim,
        "index_heads": config.dsa_indexer_n_heads,
        "index_dim": config.dsa_indexer_head_dim,
        "topk": config.dsa_indexer_topk,
        "rotary_base": config.rotary_base,
        "eps": config.layernorm_epsilon,
        "index_rope_interleaved": config.dsa_indexer_rope_interleaved,
        "index_hadamard": config.dsa_indexer_rotate_activation,
        "index_relu": config.dsa_indexer_scoring_relu,
        "yarn": _yarn(config, *yarn) if config.rope_type == "yarn" else None,
    }


def _yarn(config, *more):
    return {
        "scaling_factor": config.rotary_scaling_factor,
        "original_max_position": config.original_max_position_embeddings,
        **{name: getattr(config, name) for name in ("beta_fast", "beta_slow", *more)},
    }
