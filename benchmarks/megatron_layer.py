"""An attention layer on one of several ranks: weights, tokens, forward and step.

Weights and inputs are drawn whole from one seed and sharded, so that any number of ranks computes
the same layer; norms of output and input gradient verify it.

The time of a single layer includes the host, which launches kernels while the GPU waits; in a model
the host runs ahead. A chain (``LayerSpec.layers``) shows that: the same module repeatedly, on the
sum of its last input and output. Weights are one layer's, activations all layers'.
"""

import dataclasses
from dataclasses import dataclass

import torch

from megatron_dsa.config.options import DSAOptions

SEED = 0

#: Settings of all presets. Rope's values are V4's and do not affect time.
SETTINGS = {
    "num_layers": 4,
    "mtp_num_layers": None,
    "csa_compress_ratios": [0, 4, 128, 4],
    "rotary_base": 10000.0,
    "csa_compress_rotary_base": 160000.0,
    "rope_type": "yarn",
    "rotary_scaling_factor": 16.0,
    "original_max_position_embeddings": 65536,
    "hidden_dropout": 0.0,
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "dsa_indexer_use_sparse_loss": True,
}
_TINY_CSA = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_head_dim": 24,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 6,
    "csa_window_size": 8,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 8,
    "dsa_indexer_rope_interleaved": True,
}


_TINY_DSA = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10,
    "qk_layernorm": True, "add_bias_linear": False, "attention_dropout": 0.0,
    "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 12,
}  # fmt: skip


@dataclass(frozen=True)
class LayerSpec:
    """Specification of a layer and a rank's part of it.

    Attributes:
        preset: ``v3.2`` (also ``v3.2-h32``), ``glm-5.3-flash``, ``glm-5.3-flash-kda`` (its linear
            attention), ``v4-flash``, ``v4-pro`` or ``tiny``.
        tokens: of all ranks.
        ratio: compression ratio, ``None`` for DSA.
        heads: of a DSA layer's attention, ``None`` for the model's.
        fused: dispatch may take fused kernels.
        selected_attention, sequence_length: see :mod:`megatron_dsa.config.options`; without a
            length, ``auto`` is sparse attention.
        layers: in a chain.
        tp, cp: ranks; cp_layout, tp_mode: see :class:`megatron_dsa.config.options.DSAOptions`.
        workspace_mib: budget of torch implementations, and of blocks of absorbed attention.
        recompute, indexer_loss_queries, indexer_loss_heads: see
            :class:`megatron_dsa.config.options.DSAOptions`.
        coefficient: of the indexer's loss; 0 freezes the indexer.
    """

    preset: str
    tokens: int
    ratio: int | None = None
    heads: int | None = None
    fused: bool = True
    selected_attention: str = "auto"
    sequence_length: int | None = None
    layers: int = 1
    tp: int = 1
    cp: int = 1
    cp_layout: str = "zigzag"
    tp_mode: str = "auto"
    workspace_mib: int = 256
    recompute: str = "nothing"
    indexer_loss_queries: float = DSAOptions.indexer_loss_queries
    indexer_loss_heads: float = DSAOptions.indexer_loss_heads
    coefficient: float = 1.0

    @property
    def is_kda(self) -> bool:
        return self.preset.endswith("-kda")


def layer_config(spec: LayerSpec, **more):
    """Return the configuration of a layer, with fields ``more``; requires a running Megatron."""
    from megatron_dsa.config.presets import preset
    from megatron_dsa.config.transformer import CSATransformerConfig, DSATransformerConfig
    from megatron_dsa.patches import cpu_host

    options = DSAOptions(
        fused=spec.fused, workspace_bytes=spec.workspace_mib * 2**20, cp_layout=spec.cp_layout,
        tp_mode=spec.tp_mode, selected_attention=spec.selected_attention,
        sequence_length=spec.sequence_length, recompute=spec.recompute,
        indexer_loss_queries=spec.indexer_loss_queries, indexer_loss_heads=spec.indexer_loss_heads,
    )  # fmt: skip
    changes = SETTINGS | {
        "use_cpu_initialization": cpu_host.needed(),
        "dsa": options,
        "tensor_model_parallel_size": spec.tp,
        "context_parallel_size": spec.cp,
        "sequence_parallel": spec.tp > 1,
        "dsa_indexer_loss_coeff": spec.coefficient,
        **more,
    }
    tiny = spec.preset.startswith("tiny")
    if spec.ratio is not None:
        if tiny:
            config = CSATransformerConfig(**_TINY_CSA | changes)
        else:
            config = preset(spec.preset, **changes)
    else:
        changes = {key: value for key, value in changes.items() if not key.startswith("csa_")}
        changes |= {"num_layers": more.get("num_layers", 1), "normalization": "RMSNorm"}
        heads = {"num_attention_heads": spec.heads} if spec.heads else {}
        if tiny:
            config = DSATransformerConfig(**_TINY_DSA | changes | heads)
        elif spec.preset.startswith("glm-5.3-flash"):
            changes |= {"num_layers": 2, "linear_attention_freq": [0, 1]}
            config = preset("glm-5.3-flash", **changes | heads)
        else:
            config = preset("v3.2", **changes | heads)
    config.finalize_model_grads_func = None
    return config


class Layer:
    """One rank's part of an attention layer in training mode, with input and gradient."""

    def __init__(self, spec: LayerSpec, device: torch.device):
        from megatron.core.transformer.spec_utils import build_module

        from megatron_dsa.specs import dsa_layer_spec

        self.config = config = layer_config(spec)
        number = 1 if spec.ratio is None else config.csa_compress_ratios.index(spec.ratio) + 1
        built = dsa_layer_spec(config, kda=spec.is_kda).submodules.self_attention
        module = build_module(built, config=config, layer_number=number)
        # Some parameters stay fp32, as in models cast by Megatron.
        self.module = module.to(device).bfloat16().train()
        self.layers = spec.layers
        generator = torch.Generator(device).manual_seed(SEED)
        fill(self.module, config.tensor_model_parallel_size, generator)
        self.sharding = self.module.ranks.sharding
        own = self.sharding.global_positions(spec.tokens, None, device)[self.sharding.rank]

        def normal() -> torch.Tensor:
            shape = (spec.tokens, 1, config.hidden_size)
            whole = torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)
            return whole.index_select(0, own)

        self.x, self.gradient = normal().requires_grad_(), normal()
        self.own_tokens = len(own)

    def forward(self) -> torch.Tensor:
        """Run a training step's forward; the result holds everything for the backward."""
        x, out = self.x, self.module(self.x, None)[0]
        for _ in range(self.layers - 1):
            x = x + out
            out = self.module(x, None)[0]
        return out

    def step(self) -> torch.Tensor:
        """Run forward and backward; return the output. Accumulates gradients."""
        out = self.forward()
        out.backward(self.gradient)
        return out.detach()

    def first_step(self) -> dict:
        """Run a step; return the squared norms of this rank's output and input gradient."""
        return {"out": squared_norm(self.step()), "dx": squared_norm(self.x.grad)}


def fill(module, ranks: int, generator: torch.Generator) -> None:
    """Draw all matrices from one seed: a tensor-parallel rank gets its shard."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() < 2 and not name.endswith("dt_bias"):
                continue  # norms and sinks start alike everywhere
            shape, cut = list(parameter.shape), None
            if getattr(parameter, "tensor_model_parallel", False):
                cut = parameter.partition_dim
                shape[cut] *= ranks
            whole = torch.randn(
                shape, dtype=parameter.dtype, device=parameter.device, generator=generator
            )
            whole *= shape[-1] ** -0.5
            parameter.copy_(whole if cut is None else whole.chunk(ranks, cut)[rank])


def squared_norm(x: torch.Tensor) -> float:
    """Return the sum of squares, in parts to save memory."""
    return sum(part.float().square().sum().item() for part in x.split(4096))


def shortened(spec: LayerSpec, most: int) -> LayerSpec:
    """Return a layer whose step compiles the kernels of ``spec``, with ``most`` tokens if possible.

    Keeps ``sequence_length``, which affects the choice of attention.
    """
    spec = dataclasses.replace(spec, layers=1)
    if spec.ratio and spec.ratio > 4:  # the width of these lists depends on the length
        return spec
    return dataclasses.replace(spec, tokens=min(spec.tokens, most))
