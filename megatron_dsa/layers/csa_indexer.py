"""Indexer of DeepSeek-V4's CSA layers."""

from dataclasses import dataclass

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.options import TPMode
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.layers.core import Indexer
from megatron_dsa.layers.linears import ReplicatedLinear
from megatron_dsa.layers.parallel.csa_keys import index_keys_of_ranks
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.layers.rope import PositionRope, hadamard
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.rope.api import rotate_index


@dataclass
class CSAIndexerSubmodules:
    linear: ModuleSpec | type = ReplicatedLinear
    compressor: ModuleSpec | type = None


class CSAIndexer(Indexer):
    """Projections of the indexer over compressed keys (DeepSeek-V4).

    ``q_I = rot(rope(W_qb qr))``, ``k_I = rot(compressor(x))``, ``w = W_w x * HI^-1/2 * DI^-1/2``
    with rope on the *last* dims and ``rot`` a Hadamard transform.
    """

    def __init__(self, config, submodules: CSAIndexerSubmodules, tp_mode: TPMode = "heads"):
        super().__init__(config)
        linear = submodules.linear
        self.linear_wq_b = self.linear(linear, config.q_lora_rank, self.heads * self.dim)
        # Ranks that score all tokens have equal gradients; averaging keeps gradients bitwise equal.
        weight = self.linear_wq_b.weight
        weight.sequence_parallel = tp_mode == "sequence"
        weight.average_gradients_across_tp_domain = tp_mode != "sequence"
        self.mark_query_heads()
        self.linear_weights_proj = self.linear(linear, config.hidden_size, self.heads)
        # The projection reads local tokens, so ranks sum its gradient.
        self.linear_weights_proj.weight.sequence_parallel = config.sequence_parallel
        self.compressor = build_module(
            submodules.compressor, config=config, ratio=CSA_RATIO, dim=self.dim
        )

    def forward(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        keys: CompressedKeys,
        layout: Layout,
        rope: PositionRope,
        ranks: Ranks,
    ) -> IndexerInputs:
        """Return index queries, head weights and the compressed index keys of all slots.

        ``x [s, b, hidden]`` and normalised ``qr [s, b, q_lora_rank]`` are detached and local.
        """
        config = self.config
        q, _ = self.linear_wq_b(self.latents(qr, ranks))
        q = q.view(-1, self.heads, self.dim)
        transform = config.dsa_indexer_rotate_activation
        tables = rope.of_tokens(layout, q.dtype)
        q = rotate_index(
            q, *tables, first=False, transform=transform, rounded=self.as_engine,
            policy=self.policy,
        )  # fmt: skip
        k = self.compressor(x, keys, rope, ranks)
        weights, in_fp32 = self.weights(x, ranks)
        if transform:
            k = self._transformed(k)
        if ranks.group is not None:
            k = index_keys_of_ranks(k, keys, ranks)
        relu = config.dsa_indexer_scoring_relu
        return IndexerInputs(q, k, weights, relu, fp32_weights=in_fp32)

    def _transformed(self, k: torch.Tensor) -> torch.Tensor:
        if not self.as_engine:
            return hadamard(k)
        # ``rotate_index`` rounds once, like inference engines.
        none = k.new_empty(len(k), 0, dtype=accumulation_dtype(k.dtype))
        return rotate_index(k[:, None], none, none, policy=self.policy).squeeze(1)
