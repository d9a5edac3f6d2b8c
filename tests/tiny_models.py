"""Tiny Hugging Face configurations and the Megatron models of the same shape."""

import torch

from tests.host import start


def tiny_config(kind="deepseek_v32", **changes):
    """config.json of a model with a dense and an expert layer."""
    config = {
        "model_type": kind,
        "vocab_size": 70,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "hidden_act": "silu",
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if kind != "deepseek_v3":
        config |= {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 6}
    return config | changes


def tiny_model(config, stage="sparse", dtype=torch.float32, vocab=80, seed=5, **changes):
    """A Megatron model of the shape of a Hugging Face configuration: random, on the CPU."""
    start()
    from megatron.core.models.gpt import GPTModel

    from megatron_dsa.config import DSAOptions, DSATransformerConfig
    from megatron_dsa.huggingface.conventions import parse_config
    from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec

    settings = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "dsa": DSAOptions(stage=stage),
    }
    ours = DSATransformerConfig(**parse_config(config).fields | settings | changes)
    model = GPTModel(
        ours,
        dsa_block_spec(ours),
        vocab,
        64,
        position_embedding_type="rope",
        mtp_block_spec=dsa_mtp_block_spec(ours),
    ).cpu()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if isinstance(tensor, torch.Tensor):
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                scale, mean = (0.1, float("norm" in name)) if tensor.dim() == 1 else (0.3, 0.0)
                tensor.copy_(values * scale + mean)
        for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
            weight[config["vocab_size"] :] = 0
    return model.eval()
