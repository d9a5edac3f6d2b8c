"""A one-process Megatron for module tests, and small DSA configurations."""

import copy
import functools
import os
import sys
import tempfile

import torch

from megatron_dsa.patches import cpu_host


def stop() -> None:
    """Destroy the process groups; :func:`start` makes new ones."""
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    start.cache_clear()


@functools.cache
def start() -> torch.device:
    """Initialise Megatron's process groups and random state once per process; return the device."""
    if cpu_host.needed():
        cpu_host.activate()
    from megatron.core import parallel_state, tensor_parallel

    handle, store = tempfile.mkstemp()
    os.close(handle)
    backend = "gloo" if cpu_host.needed() else "nccl"
    torch.distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return torch.device("cpu" if cpu_host.needed() else "cuda")


def _small_settings(dtype):
    return {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "rope_type": "rope",
        "transformer_impl": "local",
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": cpu_host.needed(),
        "params_dtype": dtype,
        "dsa_indexer_n_heads": 3,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_loss_coeff": 0.7,
        "dsa_indexer_use_sparse_loss": True,
    }


def of_all_queries(options):
    """Return options whose indexers train on all query tokens, unless another share is set."""
    if options.indexer_loss_queries != type(options).indexer_loss_queries:
        return options
    options = copy.copy(options)  # not dataclasses.replace: some tests set invalid values
    object.__setattr__(options, "indexer_loss_queries", 1.0)
    return options


def small_config(*, dtype=torch.float64, options=None, **changes):
    """Return a DSA configuration of a few thousand parameters."""
    start()
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import DSATransformerConfig

    settings = _small_settings(dtype) | {
        "kv_lora_rank": 16,
        "v_head_dim": 10,
        "dsa_indexer_topk": 12,
    }
    config = DSATransformerConfig(**settings | changes, dsa=of_all_queries(options or DSAOptions()))
    config.finalize_model_grads_func = None
    return config


def small_hybrid_config(pattern, **changes):
    layers = len(pattern.partition("/")[0].replace("|", ""))
    settings = {"num_layers": layers, "mtp_num_layers": pattern.count("/") or None} | changes
    return small_config(layer_pattern=pattern, is_hybrid_model=True, **settings)


def small_csa_config(ratio, *, dtype=torch.float64, options=None, **changes):
    """Return a configuration of hybrid attention with one compression ratio."""
    start()
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import CSATransformerConfig

    settings = _small_settings(dtype) | {
        "kv_lora_rank": 12,
        "v_head_dim": 20,
        "o_groups": 2,
        "o_lora_rank": 6,
        "csa_compress_ratios": [ratio, ratio],
        "csa_window_size": 7,
        "csa_compress_rotary_base": 160000.0,
        "normalization": "RMSNorm",
        "dsa_indexer_topk": 5,
        "dsa_indexer_rope_interleaved": True,
    }
    config = CSATransformerConfig(**settings | changes, dsa=of_all_queries(options or DSAOptions()))
    config.finalize_model_grads_func = None
    return config


def v32_config(options, heads=16, **changes):
    """Return DeepSeek-V3.2's attention in bf16, in a narrow model of two layers."""
    from megatron_dsa.config.presets import preset

    start()
    settings = {
        "num_layers": 2, "num_attention_heads": heads, "hidden_size": 1024,
        "ffn_hidden_size": 1024, "num_moe_experts": None, "moe_layer_freq": 1,
        "transformer_impl": "local", "params_dtype": torch.bfloat16, "bf16": True,
        "dsa_indexer_loss_coeff": 0.01, "dsa_indexer_use_sparse_loss": options.stage == "sparse",
        "gradient_accumulation_fusion": False, "persist_layer_norm": False,
        "bias_dropout_fusion": False,
    }  # fmt: skip
    return preset("v3.2", dsa=options, **settings | changes)


def hidden_like(module, rows, batch=1):
    """Draw hidden states ``[tokens, batch, hidden]`` for a module, the same on every device."""
    generator = torch.Generator().manual_seed(11)
    shape = (rows, batch, module.config.hidden_size)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(start(), module.config.params_dtype).requires_grad_()


def attention_module(config, layer_number=1, seed=3, full=None):
    """Build the self-attention of a layer spec with random weights large enough to matter.

    ``full(name, weight)`` slices a full weight under tensor parallelism.
    """
    from megatron.core.transformer.spec_utils import build_module

    from megatron_dsa.config.rules.kda import is_kda_layer
    from megatron_dsa.specs import dsa_layer_spec

    device = start()
    spec = dsa_layer_spec(
        config, kda=is_kda_layer(config, layer_number - 1)
    ).submodules.self_attention
    module = build_module(spec, config=config, layer_number=layer_number).to(device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            shape = list(parameter.shape)
            if getattr(parameter, "tensor_model_parallel", False) and full is not None:
                shape[parameter.partition_dim] *= config.tensor_model_parallel_size
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 1:
                values = values * 0.2 + (0 if name.endswith("bias") else 1)
            else:
                values = values * 1.5 * shape[1] ** -0.5
            parameter.copy_(values if full is None else full(name, values))
    return module


def parsed(flags, world, monkeypatch):
    """Return the entry point's validated arguments for ``flags``."""
    start()
    from megatron.training import arguments

    from megatron_dsa import pretrain
    from megatron_dsa.arguments import add_dsa_arguments

    monkeypatch.setattr(sys, "argv", ["pretrain", *flags])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    pretrain.preset_flags(sys.argv)
    args = arguments.parse_args(add_dsa_arguments)
    arguments.validate_args(args)
    return args


def unstreamed() -> list[str]:
    """Return the flag that dequantises FP8 weights before loading, if there is one."""
    from megatron.training.config.training_config import CheckpointConfig

    streams = hasattr(CheckpointConfig, "stream_ckpt_dequant")
    return ["--no-stream-ckpt-dequant"] if streams else []


def packed_of(lengths, longest, padded=None):
    """Return Megatron's PackedSeqParams of cumulative lengths, without and with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip


def packed(*lengths, padded_lengths=None):
    """Return Megatron's PackedSeqParams of sequence lengths."""

    def cumulative(values):
        ends = torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ends.to(start())

    padded = cumulative(padded_lengths) if padded_lengths else None
    return packed_of(cumulative(lengths), max(padded_lengths or lengths), padded)
