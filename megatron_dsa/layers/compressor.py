"""Compressor of DeepSeek-V4: one key per group of positions."""

from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.model import options_of
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.layers.linears import Fp32Parameters, ReplicatedLinear, new_parameter
from megatron_dsa.layers.parallel.csa_keys import extend
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.layers.rope import PositionRope
from megatron_dsa.layers.weight_blocks import mark_table
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.rope.api import rotate


@dataclass
class CompressorSubmodules:
    norm: ModuleSpec | type = None


class Compressor(Fp32Parameters, MegatronModule):
    """``rope(RMSNorm(pool(W_kv x, W_gate x + APE)))`` per group of ``ratio`` positions.

    Groups overlap iff ``ratio`` is 4. Parameters, named as in Megatron: ``linear_wkv``,
    ``linear_wgate`` ``[c * dim, hidden]``, ``ape`` fp32 ``[ratio, c * dim]``, ``norm``.
    """

    fp32_parameters = ("ape",)

    def __init__(self, config, submodules: CompressorSubmodules, *, ratio: int, dim: int):
        super().__init__(config=config)
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == CSA_RATIO
        self.policy = options_of(config).policy
        width = dim * (2 if self.overlap else 1)
        for name in ("linear_wkv", "linear_wgate"):
            linear = ReplicatedLinear(
                config.hidden_size, width, config=config, init_method=config.init_method
            )
            setattr(self, name, linear)
        self.ape = new_parameter(config, ratio, width)
        mark_table(self.ape)
        self.norm = build_module(
            submodules.norm, config=config, hidden_size=dim, eps=config.layernorm_epsilon
        )
        for parameter in self.parameters():
            # Tensor-parallel ranks compress different groups: sum the gradients.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(
        self, x: torch.Tensor, keys: CompressedKeys, rope: PositionRope, ranks: Ranks
    ) -> torch.Tensor:
        """Compress ``x [s, b, hidden]`` of local tokens to keys ``[slots, dim]``."""
        values, scores = (
            linear(x)[0].flatten(0, 1) for linear in (self.linear_wkv, self.linear_wgate)
        )
        if keys.halo is not None:
            values, scores = extend((values, scores), keys.halo, x.shape[1], ranks)
        pooled = compress(values, scores, self.ape, keys, overlap=self.overlap, policy=self.policy)
        pooled = self.norm(pooled)
        tables = rope.of_groups(keys, pooled.dtype)
        # Unlike ``squeeze``, ``[:, 0]`` would allocate zeros in the backward.
        return rotate(pooled[:, None], *tables, policy=self.policy).squeeze(1)
