"""Self-attention of Kimi Delta Attention (KDA; Kimi Linear, GLM-5.3-Flash)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.model import options_of, validate
from megatron_dsa.layers.frame import SelfAttentionFrame
from megatron_dsa.layers.linears import (
    HeadParameters,
    local_linear,
    new_norm_weight,
    new_parameter,
    replicated_draws,
)
from megatron_dsa.layers.parallel.groups import ranks_of
from megatron_dsa.layers.required_ops import RequiredOp, kda_ops
from megatron_dsa.layers.warm_up import resolve_kernels
from megatron_dsa.ops.kda.api import delta_attention, gated_norm, short_convolution
from megatron_dsa.ops.layout.layout import Layout

#: Bounds between which new models draw ``softplus(dt_bias)`` log-uniformly.
_TIME_STEPS = 1e-3, 1e-1


@dataclass
class KDASelfAttentionSubmodules:
    by_heads: ModuleSpec | type = None
    of_tokens: ModuleSpec | type = None
    linear_proj: ModuleSpec | type = None


def _new_share(module: HeadParameters, whole: torch.Tensor) -> torch.nn.Parameter:
    """Return the local shard of a parameter that all ranks draw identically."""
    group = module.pg_collection.tp
    part = whole.chunk(group.size())[group.rank()]
    parameter = module.new_head_parameter(*part.shape)
    if not parameter.is_meta:
        parameter.data.copy_(part)
    return parameter


class ShortConvolution(HeadParameters, MegatronModule):
    """Causal depthwise convolution with SiLU; ``weight`` fp32 ``[channels / TP, 1, kernel]``."""

    fp32_parameters = ("weight",)

    def __init__(self, config, channels: int, pg_collection: ProcessGroupCollection):
        super().__init__(config=config)
        self.pg_collection, self.policy = pg_collection, options_of(config).policy
        whole = new_parameter(config, channels, 1, config.linear_conv_kernel_dim).data
        if config.perform_initialization and not whole.is_meta:
            with replicated_draws(whole.device):
                config.init_method(whole)
        self.weight = _new_share(self, whole)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        return short_convolution(x, self.weight, cu_seqlens, policy=self.policy)


class _GatedNorm(MegatronModule):
    def __init__(self, config, dim: int):
        super().__init__(config=config)
        # Tensor-parallel ranks have different heads and sum the weight's gradient.
        self.weight = new_norm_weight(config, dim)
        self.policy = options_of(config).policy

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        eps = self.config.layernorm_epsilon
        return gated_norm(x, gate, self.weight, eps, policy=self.policy)


class KDASelfAttention(SelfAttentionFrame, HeadParameters, MegatronModule):
    """Self-attention layer of Kimi Delta Attention.

    Input and output are ``[s, b, hidden]`` (``s / TP`` under sequence parallelism; packed:
    ``b == 1``). Parameters, for ``H`` heads of ``D`` dims: ``linear_{q,k,v,f_b,g_b}_proj`` with
    ``H * D`` outputs, ``linear_b_proj`` with ``H``, in fp32 ``{q,k,v}_conv1d``,
    ``dt_bias [H * D]`` and ``A_log [H]``, sharded along dim 0; ``linear_proj``, along dim 1;
    replicated ``linear_{f,g}_a_proj [D, hidden]`` and ``o_norm [D]``.
    """

    fp32_parameters = ("A_log", "dt_bias")

    def __init__(
        self,
        config,
        submodules: KDASelfAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_megatron,
    ):
        super().__init__(config=config)
        validate(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.options = options_of(config)
        self.policy = self.options.policy
        self.ranks = ranks_of(config, pg_collection, "heads")
        self.heads = config.linear_num_value_heads // pg_collection.tp.size()
        self.dim = config.linear_value_head_dim
        selective = config.recompute_granularity == "selective"
        self.core_attention, self.recompute_up_proj = None, False
        self.checkpoint_core_attention = selective and "core_attn" in (
            config.recompute_modules or ()
        )
        hidden, width = config.hidden_size, config.linear_num_value_heads * self.dim
        for name, inputs, outputs in (
            ("q", hidden, width), ("k", hidden, width), ("v", hidden, width),
            ("f_b", self.dim, width), ("g_b", self.dim, width),
            ("b", hidden, config.linear_num_value_heads),
        ):  # fmt: skip
            linear = build_module(
                submodules.by_heads, inputs, outputs, config=config,
                init_method=config.init_method, bias=False, skip_bias_add=False,
                gather_output=False, is_expert=False, tp_comm_buffer_name=f"kda_{name}",
                tp_group=pg_collection.tp,
            )  # fmt: skip
            setattr(self, f"linear_{name}_proj", linear)
        for name in ("f_a", "g_a"):
            linear = local_linear(submodules.of_tokens, config, hidden, self.dim)
            setattr(self, f"linear_{name}_proj", linear)
        for name in "qkv":
            setattr(self, f"{name}_conv1d", ShortConvolution(config, width, pg_collection))
        self.A_log = _new_share(self, new_parameter(config, config.linear_num_value_heads).data)
        self.dt_bias = _new_share(self, _new_dt_bias(config, width))
        self.o_norm = _GatedNorm(config, self.dim)
        self.linear_proj = build_module(
            submodules.linear_proj, width, hidden, config=config,
            init_method=config.output_layer_init_method, bias=False, skip_bias_add=False,
            input_is_parallel=True, is_expert=False, tp_comm_buffer_name="proj",
            tp_group=pg_collection.tp,
        )  # fmt: skip
        resolve_kernels(self.required_ops(), self.policy, self.dim**-0.5)

    def required_ops(self) -> list[RequiredOp]:
        return kda_ops(self.config)

    def attend(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        q, k, v, beta = (self._of_heads(name, hidden_states) for name in ("q", "k", "v", "b"))
        g = self._of_heads("f_b", self.linear_f_a_proj(hidden_states)[0])
        gate = self._of_heads("g_b", self.linear_g_a_proj(hidden_states)[0])
        cu_seqlens = layout.derive("documents", lambda: document_bounds(layout))

        def core(q, k, v, g, beta, gate):
            q, k, v = (
                convolution(x, cu_seqlens)
                for x, convolution in ((q, self.q_conv1d), (k, self.k_conv1d), (v, self.v_conv1d))
            )
            q, k, v, g, gate = (x.unflatten(2, (self.heads, -1)) for x in (q, k, v, g, gate))
            out = delta_attention(
                q, k, v, g, beta, self.A_log, self.dt_bias, cu_seqlens,
                lower_bound=self.config.kda_gate_lower_bound, policy=self.policy,
            )  # fmt: skip
            return self.o_norm(out, gate).flatten(2)

        return self.run_core(core, q, k, v, g, beta, gate).transpose(0, 1)

    def _of_heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Project local tokens ``[s, b, inputs]`` to local heads ``[b, tokens, outputs]``."""
        out, _ = getattr(self, f"linear_{name}_proj")(x)
        return out.transpose(0, 1)

    def delayed_linears(self) -> list[Any]:
        names = ("q", "k", "v", "f_a", "f_b", "g_a", "g_b", "b")
        return [self.linear_proj, *(getattr(self, f"linear_{name}_proj") for name in names)]


def _new_dt_bias(config, width: int) -> torch.Tensor:
    bias = new_parameter(config, width).data
    if config.perform_initialization and not bias.is_meta:
        with replicated_draws(bias.device):
            steps = bias.uniform_(*map(math.log, _TIME_STEPS)).exp()
        bias = steps + torch.log(-torch.expm1(-steps))
    return bias


def document_bounds(layout: Layout) -> torch.Tensor | None:
    """Return int64 bounds of packed documents; each run of padding counts as a document."""
    sequences, tokens = layout.sequences, layout.num_queries
    assert sequences is not None
    ends = sequences.cu_seqlens
    if ends is None:
        return None
    starts = ends if sequences.cu_seqlens_padded is None else sequences.cu_seqlens_padded
    bounds = torch.stack([starts[:-1], starts[:-1] + ends.diff()], 1).flatten()
    return torch.cat([bounds, starts[-1:], starts.new_tensor([tokens])]).long()
