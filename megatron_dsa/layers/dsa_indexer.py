"""Projections of the lightning indexer."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.model import options_of
from megatron_dsa.config.options import TPMode
from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.layers.core import Indexer
from megatron_dsa.layers.linears import (
    Fp32Parameters,
    ReplicatedLinear,
    can_read_weight,
    new_parameter,
    weight_of,
)
from megatron_dsa.layers.parallel.csa_keys import extend, index_keys_of_ranks
from megatron_dsa.layers.parallel.gather import start_gather
from megatron_dsa.layers.parallel.groups import Ranks, finish_index_gather
from megatron_dsa.layers.rope import TokenRope
from megatron_dsa.layers.weight_blocks import mark_table
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.indexer_loss.training import (
    LatentIndexerInputs,
    LatentQueries,
    TrainedIndexer,
)
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.rope.api import rotate_index


@dataclass
class DSAIndexerSubmodules:
    linear_wq_b: ModuleSpec | type = None
    linear_wk: ModuleSpec | type = None
    k_norm: ModuleSpec | type = None
    linear_weights_proj: ModuleSpec | type = None


class DSAIndexer(Fp32Parameters, Indexer):
    """Projections of the indexer (``docs/design/maths.md``; DeepSeek-V3.2, eq. 1).

    ``q_I = rot(rope(W_qb qr))``, ``k_I = rot(rope(LayerNorm(W_k x)))`` and
    ``w = W_w x * HI^-1/2 * DI^-1/2``, with rope on the *first* ``qk_pos_emb_head_dim`` dims and
    ``rot`` a Hadamard transform.

    With ``--dsa-indexer-pool-size`` (GLM-5.3): one key per pool of tokens ``i``, without rope or
    transform, ``k_I = sum_i softmax_i(W_gate x + APE)_i * LayerNorm(W_k x)_i`` per channel;
    parameters ``linear_pool_gate [DI, hidden]`` and ``pool_ape`` fp32 ``[size, DI]``.
    """

    def __init__(self, config, submodules: DSAIndexerSubmodules, tp_mode: TPMode = "heads"):
        super().__init__(config)
        hidden = config.hidden_size
        query_size = config.q_lora_rank if config.q_lora_rank is not None else hidden
        self.linear_wq_b = self.linear(submodules.linear_wq_b, query_size, self.heads * self.dim)
        self.linear_wk = self.linear(submodules.linear_wk, hidden, self.dim)
        self.linear_weights_proj = self.linear(submodules.linear_weights_proj, hidden, self.heads)
        self.mark_query_heads()
        norm_config = copy.copy(config)
        norm_config.normalization = "LayerNorm"
        eps = config.dsa_indexer_k_norm_epsilon
        self.k_norm = build_module(
            submodules.k_norm,
            config=norm_config,
            hidden_size=self.dim,
            eps=config.layernorm_epsilon if eps is None else eps,
        )
        pool_size = options_of(config).indexer_pool_size
        if pool_size > 1:
            self.linear_pool_gate = ReplicatedLinear(
                hidden, self.dim, config=config, init_method=config.init_method
            )
            self.pool_ape = new_parameter(config, pool_size, self.dim)
            self.fp32_parameters = ("pool_ape",)
            mark_table(self.pool_ape)
        for name, parameter in self.named_parameters():
            # Ranks sum gradients from local tokens and average gradients that all ranks share.
            of_queries = name.startswith("linear_wq_b")
            local = tp_mode != "heads" if of_queries else config.sequence_parallel
            parameter.sequence_parallel = local
            parameter.average_gradients_across_tp_domain = not local

    def forward(
        self,
        x: torch.Tensor,
        qr: torch.Tensor,
        rope: TokenRope,
        ranks: Ranks,
        remake_queries: bool = False,
        pools: CompressedKeys | None = None,
    ) -> TrainedIndexer:
        """Return index queries, head weights and the index keys of all ranks.

        Args:
            x, qr: detached local hidden states ``[s, b, hidden]`` and normalised query latent
                ``[s, b, q_lora_rank]``.
            remake_queries: return latents if the sparse loss can recompute queries from them.
            pools: groups of tokens that share one key.
        """
        keys = self._start_keys(x, rope, ranks, pools)
        latent = self.latents(qr, ranks)
        q = None
        if not (remake_queries and can_read_weight(self.linear_wq_b, self.config)):
            q, _ = self.linear_wq_b(latent)
            q = self._rotated(q.view(-1, self.heads, self.dim), rope)
        weights, in_fp32 = self.weights(x, ranks)
        k = keys()
        relu = self.config.dsa_indexer_scoring_relu
        if q is not None:
            return IndexerInputs(q, k, weights, relu, fp32_weights=in_fp32)
        queries = self._latent_queries(latent, rope)
        return LatentIndexerInputs(queries, k, weights, relu, in_fp32)

    def _start_keys(
        self, x: torch.Tensor, rope: TokenRope, ranks: Ranks, pools: CompressedKeys | None
    ) -> Callable[[], torch.Tensor]:
        k, _ = self.linear_wk(x.flatten(0, 1))
        k = self._norm_keys(k)
        if pools is not None:
            gate = self.linear_pool_gate(x)[0].flatten(0, 1)
            if pools.halo is not None:
                k, gate = extend((k, gate), pools.halo, x.shape[1], ranks)
            k = compress(k, gate, self.pool_ape, pools, overlap=False, policy=self.policy)
            return lambda: k if ranks.group is None else index_keys_of_ranks(k, pools, ranks)
        k = self._rotated(k[:, None], rope.held(ranks)).flatten(1)
        if ranks.group is None:
            return lambda: k
        gathering = start_gather(k, ranks.group)
        return lambda: finish_index_gather(gathering, ranks)

    def _latent_queries(self, latent: torch.Tensor, rope: TokenRope) -> LatentQueries:
        config = self.config
        return LatentQueries(
            latent,
            weight_of(self.linear_wq_b),
            *rope.tables(latent.dtype),
            self.heads,
            config.dsa_indexer_rope_interleaved,
            config.dsa_indexer_rotate_activation,
            self.policy,
            self.as_engine,
        )

    def _rotated(self, x: torch.Tensor, rope: TokenRope) -> torch.Tensor:
        config = self.config
        return rotate_index(
            x,
            *rope.tables(x.dtype),
            neighbours=config.dsa_indexer_rope_interleaved,
            transform=config.dsa_indexer_rotate_activation,
            rounded=self.as_engine,
            policy=self.policy,
        )

    def _norm_keys(self, k: torch.Tensor) -> torch.Tensor:
        if not self.config.dsa_indexer_k_norm_fp32:
            return self.k_norm(k)
        if not isinstance(self.k_norm, torch.nn.LayerNorm):
            return self.k_norm(k.float()).to(k.dtype)
        norm = self.k_norm  # torch cannot multiply fp32 input by bf16 weights
        out = torch.nn.functional.layer_norm(
            k.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
        )
        return out.to(k.dtype)

    def backward_dw(self) -> None:
        super().backward_dw()
        self.linear_wk.backward_dw()
