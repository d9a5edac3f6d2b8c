"""What the float64 reference has to know of a configuration."""

from tests.reference import dsa_float64


def shape_of(config):
    """The reference's description of the same model."""
    yarn = None
    if config.rope_type == "yarn":
        yarn = {
            "scaling_factor": config.rotary_scaling_factor,
            "original_max_position": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
        }
    return dsa_float64.Shape(
        heads=config.num_attention_heads,
        hidden=config.hidden_size,
        q_lora=config.q_lora_rank,
        kv_lora=config.kv_lora_rank,
        nope=config.qk_head_dim,
        rope=config.qk_pos_emb_head_dim,
        v=config.v_head_dim,
        index_heads=config.dsa_indexer_n_heads,
        index_dim=config.dsa_indexer_head_dim,
        topk=config.dsa_indexer_topk,
        rotary_base=config.rotary_base,
        eps=config.layernorm_epsilon,
        k_norm_eps=config.dsa_indexer_k_norm_epsilon,
        index_rope_interleaved=config.dsa_indexer_rope_interleaved,
        index_hadamard=config.dsa_indexer_rotate_activation,
        index_relu=config.dsa_indexer_scoring_relu,
        yarn=yarn,
    )
