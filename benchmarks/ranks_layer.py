"""An attention layer as one of several ranks holds it: weights, rows, and one case's measurements.

Weights and inputs are drawn whole from one seed and cut, so that any number of ranks computes the
same layer; the norms of output and input gradient show that they do.

Of one layer after a synchronisation, the time is also that of the host, which launches kernels
while the GPU waits for them. In a model the host is ahead after the first layer. A chain of layers
(``Case.layers``) shows that: the same module again and again, each time on the sum of its last
input and output, as residual connections have it. Weights and their gradients are so those of one
layer, activations those of all.
"""

from __future__ import annotations

import dataclasses
import gc
import time

import torch

from benchmarks.hybrid_layer import _TINY, MODELS, SETTINGS
from benchmarks.ranks_cases import Case, Grid
from benchmarks.ranks_plain import collectives
from benchmarks.ranks_timing import measured, traced_shares
from benchmarks.ranks_traffic import Design, counted, formula_bytes, hidden_bytes
from benchmarks.timing import Clock

SEED = 0
#: Steps that only prepare compile what depends on shapes other than the length.
PREPARE_ROWS = 8192

_TINY_DSA = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_head_dim": 12, "qk_pos_emb_head_dim": 8, "v_head_dim": 10,
    "qk_layernorm": True, "add_bias_linear": False, "attention_dropout": 0.0,
    "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 12,
}  # fmt: skip


def layer_config(case: Case, grid: Grid, workspace_mib: int):
    """Return the configuration of a case's layer; Megatron has to be running."""
    from megatron_dsa.config import CSATransformerConfig, DSAOptions, DSATransformerConfig
    from megatron_dsa.patches import cpu_host
    from megatron_dsa.presets import preset

    options = DSAOptions(
        workspace_bytes=workspace_mib * 2**20, cp_layout=case.cp_layout, tp_mode=case.tp_mode
    )
    changes = SETTINGS | {
        "use_cpu_initialization": cpu_host.needed(),
        "dsa": options,
        "tensor_model_parallel_size": grid.tp,
        "context_parallel_size": grid.cp,
        "sequence_parallel": grid.tp > 1,
    }
    tiny = case.preset.startswith("tiny")
    if case.ratio is not None:
        if tiny:
            config = CSATransformerConfig(**_TINY | changes)
        else:
            config = preset(MODELS[case.preset], **changes)
    else:
        changes = {key: value for key, value in changes.items() if not key.startswith("csa_")}
        changes |= {"num_layers": 1, "normalization": "RMSNorm"}
        if tiny:
            config = DSATransformerConfig(**_TINY_DSA | changes)
        else:
            heads = {"num_attention_heads": case.heads}
            config = preset("deepseek-v3.2", **changes | heads)
    config.finalize_model_grads_func = None
    return config


class Layer:
    """One rank's part of an attention layer in training mode, of its input and its gradient."""

    def __init__(self, case: Case, grid: Grid, device: torch.device, workspace_mib: int):
        from megatron.core.transformer.spec_utils import build_module

        from megatron_dsa.specs import dsa_layer_spec

        self.config = config = layer_config(case, grid, workspace_mib)
        number = 1 if case.ratio is None else config.csa_compress_ratios.index(case.ratio) + 1
        spec = dsa_layer_spec(config).submodules.self_attention
        module = build_module(spec, config=config, layer_number=number)
        # Some parameters stay in fp32, as in a model that Megatron casts.
        self.module = module.to(device).bfloat16().train()
        self.layers = case.layers
        generator = torch.Generator(device).manual_seed(SEED)
        fill(self.module, config.tensor_model_parallel_size, generator)
        self.sharding = self.module.ranks.sharding
        own = self.sharding.global_positions(case.rows, None, device)[self.sharding.rank]

        def rows() -> torch.Tensor:
            shape = (case.rows, 1, config.hidden_size)
            whole = torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)
            return whole.index_select(0, own)

        self.x, self.gradient = rows().requires_grad_(), rows()
        self.design = Design(
            config, case.ratio, len(own), grid.tp, grid.cp, self.sharding.runs(None)
        )

    def forward(self) -> torch.Tensor:
        """Run the forward of a training step; the result holds all that the backward needs."""
        x, out = self.x, self.module(self.x, None)[0]
        for _ in range(self.layers - 1):
            x = x + out
            out = self.module(x, None)[0]
        return out

    def step(self) -> None:
        """Forward and backward; gradients are added to those that there are."""
        self.forward().backward(self.gradient)

    def first_step(self) -> dict:
        """Run a step; return the squared norms of this rank's output and input gradient."""
        out = self.forward()
        squares = {"out": squared_norm(out.detach())}
        out.backward(self.gradient)
        return squares | {"dx": squared_norm(self.x.grad)}


def fill(module, ranks: int, generator: torch.Generator) -> None:
    """Fill all matrices from one seed: a tensor-parallel rank gets its part of the whole one."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            if parameter.dim() < 2:
                continue  # norms and sinks start alike everywhere
            shape, cut = list(parameter.shape), None
            if getattr(parameter, "tensor_model_parallel", False):
                cut = parameter.partition_dim
                shape[cut] *= ranks
            whole = torch.randn(
                shape, dtype=parameter.dtype, device=parameter.device, generator=generator
            )
            whole *= shape[1] ** -0.5
            parameter.copy_(whole if cut is None else whole.chunk(ranks, cut)[rank])


def squared_norm(x: torch.Tensor) -> float:
    """Sum of squares, in parts: an fp32 copy of everything might not fit."""
    return sum(part.float().square().sum().item() for part in x.split(4096))


def measure_layer(case: Case, grid: Grid, device: torch.device, settings: dict) -> dict:
    """Measure a layer on this rank: times, memory, bytes sent, shares of communication."""
    clock = Clock(device)
    begin = time.perf_counter()
    layer = Layer(case, grid, device, settings["workspace_mib"])  # compiles, as the step does
    result: dict = {"heads": layer.config.num_attention_heads}
    with collectives(case.collectives):
        # Also makes the gradients' memory, which so is not part of a step's.
        with counted() as traffic:
            result["squares"] = layer.first_step()
        clock.wait()
        result["warm_up_s"] = time.perf_counter() - begin
        gc.collect()
        result |= measured(layer.forward, layer.step, clock, device, settings)
        if grid.ranks > 1 and clock.on_gpu:
            result |= traced_shares(layer.step, clock, device)
    for times in result["times"].values():
        times[:] = [ms / case.layers for ms in times]
    if grid.ranks > 1:
        rows = layer.design.rows
        result["bytes_per_token"] = traffic.bytes / rows / case.layers
        result["formula_bytes_per_token"] = formula_bytes(layer.design) / rows
    if grid.cp > 1 and grid.tp == 1:  # tensor-parallel linears gather hidden states anyway
        result["hidden_bytes_per_token"] = hidden_bytes(layer.design) / rows
    return result


def prepare_layer(case: Case, grid: Grid, device: torch.device, settings: dict) -> None:
    """Run a short step of a case's kind, so that its kernels are compiled."""
    case = dataclasses.replace(case, layers=1)
    if not case.ratio or case.ratio <= 4:  # of longer groups, lists are as wide as the length says
        case = dataclasses.replace(case, rows=min(case.rows, PREPARE_ROWS))
    Layer(case, grid, device, settings["workspace_mib"]).step()
