"""Two layers of DeepSeek-V3.2's width with Megatron's or transformer-engine's linears.

Every matrix is drawn from the seed of its name, which is the same for grouped and single experts:
all ways have the same weights.
"""

import re
import zlib
from dataclasses import dataclass, field

import torch

from benchmarks.megatron_layer import SEED, LayerSpec, layer_config
from megatron_dsa.errors import ImplementationError
from megatron_dsa.versions import why_not_transformer_engine

LOCAL, BF16 = "local", "te-bf16"
_ENGINE = {"transformer_impl": "transformer_engine"}
#: Way -> fields of its configuration, with Megatron's usual FP8 formats.
WAYS = {
    LOCAL: {},
    BF16: _ENGINE,
    "te-tensorwise": _ENGINE | {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "te-blockwise": _ENGINE | {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
LAYERS = 2
DENSE, EXPERTS = "dense", "experts"
#: Preset -> width of a dense MLP, and of an expert; the model has more experts.
WIDTHS = {"v3.2": (18432, 2048), "tiny": (64, 16)}
NUM_EXPERTS, TOPK = 8, 6


def mlp_fields(preset: str, mlp: str, way: str) -> dict:
    """Return the configuration fields of the part after attention."""
    dense, expert = WIDTHS[preset]
    fields = {
        "ffn_hidden_size": dense, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "bias_activation_fusion": True,
    }  # fmt: skip
    if mlp == DENSE:
        return fields
    return fields | {
        "num_moe_experts": NUM_EXPERTS, "moe_router_topk": TOPK, "moe_ffn_hidden_size": expert,
        "moe_layer_freq": 1, "moe_shared_expert_intermediate_size": expert,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": way != LOCAL, "moe_permute_fusion": way != LOCAL,
    }  # fmt: skip


@dataclass
class Stack:
    """Layers in training mode, their input, and the gradient of their output.

    Attributes:
        block: with random weights in bf16.
        x, gradient: ``[tokens, 1, hidden]``, bf16.
        remark: special properties of this way.
    """

    block: torch.nn.Module
    x: torch.Tensor
    gradient: torch.Tensor
    remark: str = field(default="")

    def step(self, tokens: int | None = None) -> torch.Tensor:
        """Run forward and backward as the only microbatch of a step; return the output.

        transformer-engine quantises the weights in it. Gradients are not accumulated. ``tokens``:
        of the input to use, default: all.
        """
        self.clear()
        self.block.set_is_first_microbatch()
        out = self.block(self.x[:tokens], None)
        out.backward(self.gradient[:tokens])
        return out.detach()

    def clear(self) -> None:
        self.x.grad = None
        self.block.zero_grad(set_to_none=True)


def build(way: str, preset: str, tokens: int, mlp: str, workspace_mib: int, device) -> Stack:
    """Return a way's stack; requires a running Megatron.

    Raises:
        ImplementationError: transformer-engine cannot be used here.
    """
    if way != LOCAL:
        reason = why_not_transformer_engine(torch.cuda.is_available())
        if reason is not None:
            raise ImplementationError(f"transformer-engine cannot be used: {reason}")
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_dsa.specs import dsa_block_spec

    heads = 128 if preset == "v3.2" else None
    spec = LayerSpec(
        preset, tokens, heads=heads, selected_attention="sparse", sequence_length=tokens,
        workspace_mib=workspace_mib,
    )  # fmt: skip
    config = layer_config(
        spec, num_layers=LAYERS, **mlp_fields(preset, mlp, way), **WAYS[way]
    )  # fmt: skip
    block = TransformerBlock(config, dsa_block_spec(config), post_layer_norm=True)
    block = block.to(device).bfloat16().train()
    fill_by_name(block)
    shape = (tokens, 1, config.hidden_size)
    generator = torch.Generator(device).manual_seed(SEED)
    x, gradient = (
        torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        for _ in range(2)
    )
    remark = "experts one after the other" if (mlp, way) == (EXPERTS, LOCAL) else ""
    return Stack(block, x.requires_grad_(), gradient, remark)


def common_name(name: str) -> str:
    """Return a parameter's name, equal for both kinds of experts."""
    return re.sub(r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.local_experts.\2.\1.weight",
                  name)  # fmt: skip


def fill_by_name(module: torch.nn.Module) -> None:
    """Draw every matrix from the seed of its name; keep norms."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() < 2:
                continue
            seed = zlib.crc32(common_name(name).encode())
            generator = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
