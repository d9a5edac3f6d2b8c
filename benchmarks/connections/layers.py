"""Two layers of V4 with experts, with one residual or with streams."""

import torch

from benchmarks.connections.operations import STREAMS
from benchmarks.megatron_layer import LayerSpec, fill, layer_config
from benchmarks.process_groups import alone
from benchmarks.settings import Settings
from benchmarks.timing import Clock, measure, what_ran
from megatron_dsa.ops.dispatch import reset_report

#: Preset -> channels of a stream.
CHANNELS = {"v4-flash": 4096, "v4-pro": 7168, "tiny": 32}
#: Preset -> width of an expert; 8 experts stand for all.
EXPERTS = {"v4-flash": 2048, "v4-pro": 3072, "tiny": 16}
RATIOS = [4, 128]
SEED = 0


def block_of(preset: str, tokens: int, streams: int):
    """Return a block of two layers in training mode, random weights, and its configuration."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    from megatron_dsa.specs import dsa_block_spec

    ratios = RATIOS if preset != "tiny" else [4, 6]
    experts = {
        "num_layers": 2, "csa_compress_ratios": ratios, "num_moe_experts": 8,
        "moe_router_topk": 6, "moe_ffn_hidden_size": EXPERTS[preset], "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": EXPERTS[preset], "gated_linear_unit": True,
        "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        "activation_func": torch.nn.functional.silu, "hc_mult": streams,
    }  # fmt: skip
    spec = LayerSpec(preset, tokens, ratio=ratios[0], sequence_length=tokens)
    config = layer_config(spec, **experts)
    block = TransformerBlock(config, dsa_block_spec(config), post_layer_norm=True)
    return block, config


def measure_layers(preset: str, tokens: int, way: str, clock: Clock, settings: Settings) -> dict:
    device = alone()
    block, config = block_of(preset, tokens, STREAMS if way == "streams" else 1)
    block = block.to(device).bfloat16().train()
    generator = torch.Generator(device).manual_seed(SEED)
    fill(block, 1, generator)
    shape = (tokens, 1, config.hidden_size)
    x, gradient = (
        torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        for _ in range(2)
    )
    x.requires_grad_()

    def step() -> torch.Tensor:
        out = block(x, None)
        out.backward(gradient)
        return out.detach()

    # The models differ, so only finiteness is checked.
    found = [step(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
    if not all(bool(tensor.isfinite().all()) for tensor in found):
        return {"status": "failed", "reason": "output or gradient is not finite"}
    del found
    reset_report()
    row = measure(step, None, clock, settings.repeats, settings.budget)
    return row | {"tokens_per_s": tokens / row["ms"] * 1e3, "ran": what_ran()}
