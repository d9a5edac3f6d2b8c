"""Tiny Hugging Face configurations, and models of their shape, Megatron's and transformers'."""

import copy

import pytest
import torch

from tests.host import start

#: A long context of a DeepSeek-V3, V3.2 or GLM-5.
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
_V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 5,
    "compress_ratios": [0, 4, 8, 4],
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 2,
    "compress_rope_theta": 40000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.5,
    "num_hash_layers": 0,
    "hc_mult": 3,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}
#: Keys of a DeepSeek-V3, not of a V4.
_NOT_V4 = (
    *("intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_group"),
    *("topk_group", "first_k_dense_replace"),
)
#: Layers of :data:`_V4` by transformers' names.
_TYPES = {
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["moe"] * 4,
}
#: Prefixes of transformers' classes.
_CLASSES = {
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "deepseek_v4": "DeepseekV4",
    "glm5_next": "Glm5Next",
}


def tiny_v4(**changes):
    common = {k: v for k, v in tiny_config("deepseek_v3").items() if k not in _NOT_V4}
    return common | _V4 | changes


def transformers_v4(**changes):
    """Convert to transformers' description, which has ratios 0, 4 and 128 only."""
    config = tiny_v4(**_TYPES | changes)
    for name in ("compress_ratios", "num_hash_layers"):
        del config[name]
    return config


def tiny_glm_5_3(**changes):
    """config.json of a GLM-5.3-Flash, as transformers writes it; ``changes``: of the text."""
    text = {
        "num_hidden_layers": 4,
        "qk_rope_head_dim": 0,
        "index_topk": 8,
        "index_kpool": 4,
        "layer_types": ["indexed_attention"] * 4,
        "indexer_types": ["full"] * 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 0.5,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "pad_token_id": None,
    }
    left = ("model_type", "rope_theta", "first_k_dense_replace", "torch_dtype")
    common = {key: x for key, x in tiny_config().items() if key not in left}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "projection_intermediate_size": 16,
    }
    return {
        "model_type": "glm5_next",
        "text_config": common | text | changes,
        "vision_config": vision,
    }


def tiny_config(kind="deepseek_v32", **changes):
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


def tiny_model(
    config, stage="sparse", dtype=torch.float32, vocab=80, seed=5, features=(), **changes
):
    """Build a random Megatron model of a Hugging Face configuration, on the CPU.

    Residuals are plain and routing is learned, unless ``features`` says otherwise.
    """
    start()
    from megatron_dsa.extras.huggingface.build import gpt_model, transformer_config
    from megatron_dsa.extras.huggingface.config_json import parse_config

    hf = parse_config(config)
    ours = transformer_config(hf, stage, features, params_dtype=dtype, **changes)
    model = gpt_model(ours, vocab, 64).cpu()
    _randomise(model, seed, 0.3)
    with torch.no_grad():
        for weight in (model.embedding.word_embeddings.weight, model.output_layer.weight):
            weight[hf.vocab_size :] = 0
    return model.eval()


def _randomise(model, seed, scale):
    """Randomise a model: norms near 1, matrices of this scale, tables of 8 experts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if isinstance(tensor, torch.Tensor):
                if not tensor.is_floating_point():  # different experts per token
                    orders = torch.rand(len(tensor), 8, generator=generator).argsort(dim=1)
                    tensor.copy_(orders[:, : tensor.shape[1]])
                    continue
                values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                vector = tensor.dim() == 1
                tensor.copy_(values * (0.1 if vector else scale) + (vector and "norm" in name))


def tensors_of(model):
    from megatron_dsa.extras.huggingface.convert import model_tensors

    return {name: tensor.detach().clone() for name, tensor in model_tensors(model)}


def assert_equal_tensors(model, other):
    """Compare two Megatron models to the bit; return the number of tensors."""
    ours, theirs = tensors_of(model), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    return len(ours)


def tokens(rows=1, length=24):
    return torch.randint(0, 70, (rows, length), generator=torch.Generator().manual_seed(1))


def there_and_back(there, folder, *flags, without=(), config=None):
    """Import and export a checkpoint by commands, within ``folder``; return the export."""
    from megatron_dsa.extras.cli import main

    megatron, back = str(folder / "megatron"), folder / "back"
    left = ["--without", *without] if without else []
    assert main(["import-hf", "--input", str(there), "--output", megatron, *left]) == 0
    paths = ["--input", megatron, "--output", str(back), "--config", str(config or there)]
    assert main(["export-hf", *paths, *flags]) == 0
    return back


def logits_of(model, ids):
    """Return logits ``[batch, tokens, 70]`` of a Megatron model, on the CPU; moves the model."""
    model.to(start())
    ids = ids.to(start())
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        return model(ids, positions, None)[..., :70].cpu()


def transformers_classes(kind):
    """Return transformers' classes of configuration and model; skip the test if missing."""
    # 5.12 rotates GLM-5's index queries and keys like V3.2's, and names V4 differently.
    transformers = pytest.importorskip("transformers", minversion="5.23")
    name = _CLASSES[kind]
    model = f"{name}For{'ConditionalGeneration' if kind == 'glm5_next' else 'CausalLM'}"
    if not hasattr(transformers, model):
        pytest.skip(f"this transformers has no {model}")
    return getattr(transformers, f"{name}Config"), getattr(transformers, model)


def published(config, folder):
    """Save a random model of transformers like a release; return it."""
    # transformers writes defaults into its arguments.
    settings = {name: copy.deepcopy(x) for name, x in config.items() if name != "model_type"}
    config_class, model_class = transformers_classes(config["model_type"])
    model = model_class._from_config(config_class(**settings), attn_implementation="eager").float()
    _randomise(model, 2, 0.25)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model.eval()
