"""The compressor of DeepSeek-V4: several positions become one key, weighted per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.compressed_keys import CompressedKeys
from megatron_dsa.config import options_of
from megatron_dsa.csa_config import CSA_RATIO
from megatron_dsa.csa_kernels import compress, rotate
from megatron_dsa.fp32_parameters import Fp32Parameters
from megatron_dsa.layers import ReplicatedLinear, new_parameter
from megatron_dsa.position_rope import PositionRope


@dataclass
class CompressorSubmodules:
    """The norm; the linears are never quantised and therefore not for a spec to choose."""

    norm: ModuleSpec | type = None


class Compressor(Fp32Parameters, MegatronModule):
    """``rope(RMSNorm(pool(W_kv x, W_gate x + APE)))`` for every group of ``ratio`` positions.

    Groups overlap iff ``ratio`` is 4. Parameter names are those of Megatron's development branch:
    ``linear_wkv``, ``linear_wgate`` ``[c * dim, hidden]``, ``ape`` fp32 ``[ratio, c * dim]``,
    ``norm``. Under sequence parallelism every rank projects its own rows and pools all of them.
    """

    fp32_parameters = ("ape",)

    def __init__(self, config, submodules: CompressorSubmodules, *, ratio: int, dim: int):
        super().__init__(config=config)
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == CSA_RATIO
        width = dim * (2 if self.overlap else 1)
        for name in ("linear_wkv", "linear_wgate"):
            linear = ReplicatedLinear(
                config.hidden_size, width, config=config, init_method=config.init_method
            )
            # Of its own rows only: the gradient is summed over tensor-parallel ranks.
            linear.weight.sequence_parallel = config.sequence_parallel
            setattr(self, name, linear)
        self.ape = new_parameter(config, ratio, width)
        self.norm = build_module(
            submodules.norm, config=config, hidden_size=dim, eps=config.layernorm_epsilon
        )
        for parameter in (self.ape, *self.norm.parameters()):
            parameter.sequence_parallel = False
            # Ranks compute the same gradient; averaging keeps them equal to the last bit.
            parameter.average_gradients_across_tp_domain = True

    def forward(
        self, x: torch.Tensor, keys: CompressedKeys, rope: PositionRope, group
    ) -> torch.Tensor:
        """Return the compressed keys ``[keys.count, dim]``.

        Args:
            x: ``[s / ranks, b, hidden]``, this rank's hidden states.
            keys: the groups of the whole microbatch.
            rope: rotates a key by the position of its group's first token.
            group: the tensor-parallel group under sequence parallelism, else ``None``.
        """
        policy = options_of(self.config).policy
        values, scores = (
            gather_split(linear(x)[0], group).flatten(0, 1)
            for linear in (self.linear_wkv, self.linear_wgate)
        )
        pooled = compress(values, scores, self.ape, keys, overlap=self.overlap, policy=policy)
        pooled = self.norm(pooled)
        tables = rope.of_groups(keys, pooled.dtype)
        return rotate(pooled[:, None], *tables, policy=policy)[:, 0]


def gather_split(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather rows; in the backward every rank, having the whole gradient, takes its rows."""
    if group is None or group.size() == 1:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group)
