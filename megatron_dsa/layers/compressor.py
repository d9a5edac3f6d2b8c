"""The compressor of DeepSeek-V4: several positions become one key, weighted per channel."""

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
    """Spec of the norm; linears are never quantised, so no spec chooses them."""

    norm: ModuleSpec | type = None


class Compressor(Fp32Parameters, MegatronModule):
    """``rope(RMSNorm(pool(W_kv x, W_gate x + APE)))`` for every group of ``ratio`` positions.

    Groups overlap iff ``ratio`` is 4. Parameter names are those of Megatron's development branch:
    ``linear_wkv``, ``linear_wgate`` ``[c * dim, hidden]``, ``ape`` fp32 ``[ratio, c * dim]``,
    ``norm``. Every rank projects its local tokens and pools the groups that end in them, with a few
    projected tokens of neighbours.
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
        mark_table(self.ape)  # of positions
        self.norm = build_module(
            submodules.norm, config=config, hidden_size=dim, eps=config.layernorm_epsilon
        )
        for parameter in self.parameters():
            # They see local groups: gradients are summed over tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(
        self, x: torch.Tensor, keys: CompressedKeys, rope: PositionRope, ranks: Ranks
    ) -> torch.Tensor:
        """Return the compressed keys of this rank's groups, ``[slots of keys.groups, dim]``.

        ``x``: ``[s, b, hidden]``, this rank's hidden states. A key is rotated by the position of
        its group's first token.
        """
        values, scores = (
            linear(x)[0].flatten(0, 1) for linear in (self.linear_wkv, self.linear_wgate)
        )
        if keys.halo is not None:
            values, scores = extend((values, scores), keys.halo, x.shape[1], ranks)
        pooled = compress(values, scores, self.ape, keys, overlap=self.overlap, policy=self.policy)
        pooled = self.norm(pooled)
        tables = rope.of_groups(keys, pooled.dtype)
        # The gradient of ``[:, 0]`` would be a copy into zeros.
        return rotate(pooled[:, None], *tables, policy=self.policy).squeeze(1)
