"""Multi-latent attention around the DSA core.

Layers and parameter names are Megatron's. In stage sparse, weight absorption lets all heads attend
to one 576-dim latent per token.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.attention_choice import attention_of
from megatron_dsa.config.model import options_of, validate
from megatron_dsa.errors import require
from megatron_dsa.layers.dsa_core import TopKIndices
from megatron_dsa.layers.frame import SelfAttentionFrame
from megatron_dsa.layers.linears import weight_gradient_by_autograd, weight_of
from megatron_dsa.layers.parallel.gather import (
    Gathering,
    finish_with_proxy,
    gathered_product,
    start_gather,
)
from megatron_dsa.layers.parallel.groups import heads_to_sequence, ranks_of, sequence_to_heads
from megatron_dsa.layers.rope import TokenRope
from megatron_dsa.layers.weight_blocks import mark_row_blocks
from megatron_dsa.ops.cached_keys import MLA_CACHE, as_cached
from megatron_dsa.ops.dispatch import count
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.rope.api import rotate


class _Latents(NamedTuple):
    """Normalised local latents, ``[s, b, q_lora_rank | kv_lora_rank | 64]``.

    ``shared`` concatenates ``kv`` and rotated ``k_pe``; its all-gather overlaps with the indexer.
    """

    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    shared: torch.Tensor | None = None
    gathering: Gathering | None = None

    def of_all_ranks(self) -> tuple[torch.Tensor, Any]:
        """Return shared latents ``[keys, 576]``, and their gradient proxy if sharded."""
        assert self.shared is not None
        if self.gathering is None:
            return self.shared.flatten(0, 1), None
        return finish_with_proxy(self.gathering)


@dataclasses.dataclass
class DSASelfAttentionSubmodules(MLASelfAttentionSubmodules):
    """Submodules of MLA, and the linear of ``--dsa-output-gate``."""

    linear_gate: ModuleSpec | type | None = None


class DSASelfAttention(SelfAttentionFrame, MLASelfAttention):
    """MLA self-attention with DeepSeek Sparse Attention as its core.

    Input and output are ``[s, b, hidden]`` (``s / tensor-parallel size`` under sequence
    parallelism; packed batches have ``b == 1``).
    """

    def __init__(
        self,
        config,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type=AttnMaskType.causal,
        **megatron,
    ):
        validate(config)
        super().__init__(
            config=config,
            submodules=dataclasses.replace(submodules, core_attention=IdentityOp),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            **megatron,
        )
        self.options = options_of(config)
        if (epsilon := self.options.latent_norm_epsilon) is not None:
            self.q_layernorm.eps = self.kv_layernorm.eps = epsilon
        self.choice = attention_of(config)
        self.shares_latents = self.choice.shares_latents
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            softmax_scale=self.softmax_scale,
            pg_collection=self.pg_collection,
            choice=self.choice,
        )
        self.ranks = ranks_of(config, self.pg_collection, self.choice.tp_mode)
        self.linear_gate: Any = None
        if self.options.output_gate:
            linear = getattr(submodules, "linear_gate", None)
            require(
                linear is not None,
                "--dsa-output-gate needs linear_gate in the spec of the attention, got none: give "
                "it megatron_dsa.dsa.DSASelfAttentionSubmodules",
            )
            columns = config.num_attention_heads * config.v_head_dim
            self.linear_gate = build_module(
                linear, config.hidden_size, columns, config=config,
                init_method=config.init_method, gather_output=False, bias=False,
                skip_bias_add=False, is_expert=False, tp_comm_buffer_name="gate",
                tp_group=self.pg_collection.tp,
            )  # fmt: skip
        if self.options.muon_per_head != "none":
            # Muon orthogonalises one matrix per head.
            ranks = config.tensor_model_parallel_size
            mark_row_blocks(self._query_linear().weight, (self.q_head_dim,), ranks)
            dims = config.qk_head_dim, config.v_head_dim
            mark_row_blocks(self.linear_kv_up_proj.weight, dims, ranks)
        if self.shares_latents:
            weight_gradient_by_autograd(self.linear_kv_up_proj)
        self.hands_on_selection = False
        self.shared_selection: TopKIndices | None = None
        self.used_selection: TopKIndices | None = None

    def _query_linear(self):
        return self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj

    def attend(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        ranks, way = self.ranks, self.choice.way
        rope = TokenRope(self.rotary_pos_emb, layout, self.config)
        latents = self._latents(hidden_states, rope)
        if ranks.cp is not None and way in ("dense", "dense_latents"):
            count("context_parallel_exchange", "keys" if way == "dense" else "latents")
        index_inputs = None
        if self.core_attention.needs_index_inputs():
            index_inputs = self.core_attention.project_index(
                hidden_states, latents.q, layout, rope, ranks
            )
        if ranks.attention_tp is not None:
            attended = ranks.attention_layout(layout)
            rope = TokenRope(self.rotary_pos_emb, attended, self.config)
        core_forward, tensors = _WAYS[way](self, latents, rope)
        out = self._run(core_forward, tensors, layout, index_inputs)
        out = sequence_to_heads(out, ranks.tp) if ranks.by_sequence else out
        return out if self.linear_gate is None else self._gated(out, hidden_states)

    def _gated(self, out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        gate = self.maybe_recomputed(lambda x: self.linear_gate(x)[0].sigmoid(), hidden_states)
        return out * gate.view_as(out)

    def _latents(self, hidden_states: torch.Tensor, rope: TokenRope) -> _Latents:
        config, ranks = self.config, self.ranks
        q_latent, kv = self._qkv_down_projection(hidden_states)
        latent_dims = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        if kv.shape[-1] != sum(latent_dims):
            # The scatter sums the rope key's gradient over ranks.
            kv = gather_from_tensor_model_parallel_region(kv)
            if config.sequence_parallel:
                kv = scatter_to_sequence_parallel_region(kv)
        kv_latent, k_pe = kv.split(latent_dims, dim=-1)
        if config.q_lora_rank is not None:
            q_latent = self.q_layernorm(q_latent)
        kv_latent = self.kv_layernorm(kv_latent)
        if self.options.kv_rounding != "none":
            kv_latent = as_cached(kv_latent, MLA_CACHE, self.options.workspace_bytes)
        if not self.shares_latents:
            return _Latents(q_latent, kv_latent, k_pe)
        tables = rope.held(ranks).tables(k_pe.dtype)
        k_pe = self._rotated(k_pe.flatten(0, 1)[:, None], tables).view_as(k_pe)
        shared = torch.cat([kv_latent, k_pe], -1)
        gathering = None if ranks.group is None else start_gather(shared, ranks.group)
        return _Latents(q_latent, kv_latent, k_pe, shared, gathering)

    def _rotated(self, x: torch.Tensor, tables) -> torch.Tensor:
        """Apply rope to the last dims of ``x [tokens, H, D]`` without reordering pairs."""
        return rotate(x, *tables, policy=self.core_attention.policy)

    def _queries(self, q_latent: torch.Tensor, rope: TokenRope) -> torch.Tensor:
        """Return queries ``[tokens, H, 192]`` with rope on the last 64 dims."""
        q, _ = self._query_linear()(q_latent)
        q = q.view(-1, self.num_attention_heads_per_partition, self.q_head_dim)
        if self.ranks.by_sequence:
            q = heads_to_sequence(q, self.ranks.tp)
        return self._rotated(q, rope.tables(q_latent.dtype))

    def _recomputed_queries(self, q_latent, rope: TokenRope) -> torch.Tensor:
        return self.maybe_recomputed(lambda q_latent: self._queries(q_latent, rope), q_latent)

    def _plain(self, latents: _Latents, rope: TokenRope, finish) -> tuple[torch.Tensor, ...]:
        """Call ``finish(q [tokens, H, 192], kv [tokens, H, 256], k_pe [tokens, 1, 64])``.

        ``kv`` concatenates keys without rope and values.
        """
        k_pe = latents.k_pe
        if self.ranks.tp is not None:
            k_pe = gather_from_sequence_parallel_region(k_pe, group=self.ranks.tp)

        def up(q_latent, kv_latent, k_pe):
            q = self._queries(q_latent, rope)
            k_pe = self._rotated(k_pe.flatten(0, 1)[:, None], rope.tables(q_latent.dtype))
            kv, _ = self.linear_kv_up_proj(kv_latent)
            kv = kv.view(kv.shape[:2].numel(), self.num_attention_heads_per_partition, -1)
            return finish(q, kv, k_pe)

        return self.maybe_recomputed(up, latents.q, latents.kv, k_pe)

    def _up_weights(self) -> torch.Tensor:
        """Return ``W_uk`` and ``W_uv`` of local heads, stacked ``[H, 128 + 128, latent]``."""
        heads = self.num_attention_heads_per_partition
        return weight_of(self.linear_kv_up_proj).view(heads, -1, self.config.kv_lora_rank)

    def _sparse(self, latents: _Latents, rope: TokenRope):
        weights = self._up_weights()
        q = self._recomputed_queries(latents.q, rope)
        kv, kv_grad = latents.of_all_ranks()
        return self.core_attention.forward_sparse, (q, kv, kv_grad, weights)

    def _masked(self, latents: _Latents, rope: TokenRope):
        q, kv, k_pe = self._plain(latents, rope, _flat_rope_key)
        return self.core_attention.forward_masked, (q, kv, k_pe, None)

    def _masked_latents(self, latents: _Latents, rope: TokenRope):
        q = self._recomputed_queries(latents.q, rope)
        dims = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        (kv_latent, k_pe), (kv_grad, k_pe_grad) = (
            x.split(dims, dim=1) for x in latents.of_all_ranks()
        )

        def keys_and_values(kv_latent, kv_grad, weight):
            kv = gathered_product(kv_latent, kv_grad, weight)
            return kv.unflatten(1, (self.num_attention_heads_per_partition, -1))

        weight = weight_of(self.linear_kv_up_proj)
        kv = self.maybe_recomputed(keys_and_values, kv_latent, kv_grad, weight)
        return self.core_attention.forward_masked, (q, kv, k_pe.contiguous(), k_pe_grad)

    def _visible(self, latents: _Latents, rope: TokenRope):
        return self.core_attention.forward_visible, self._plain(latents, rope, _flat_rope_key)

    def _dense(self, latents: _Latents, rope: TokenRope):
        def q_k_v(q, kv, k_pe):
            k_nope, v = kv.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
            return q, torch.cat([k_nope, k_pe.expand(-1, q.shape[1], -1)], dim=-1), v.contiguous()

        return self.core_attention.forward_dense, self._plain(latents, rope, q_k_v)

    def _dense_latents(self, latents: _Latents, rope: TokenRope):
        dims = [self.config.qk_head_dim, self.config.v_head_dim]
        w_uk, w_uv = self._up_weights().split(dims, dim=1)
        q = self._recomputed_queries(latents.q, rope)
        return self.core_attention.forward_latents, (q, *latents.of_all_ranks(), w_uk, w_uv)

    def _run(self, core_forward, tensors, layout, index_inputs) -> torch.Tensor:
        """Run a method of the core attention, saving ``tensors`` for recompute."""
        count, selects = len(tensors), self.options.stage == "sparse"
        of_indexer = () if index_inputs is None else index_inputs.tensors()
        # Read the selection now, since recompute may run after the next microbatch.
        given = self._given_selection(layout) if selects else None
        shared = () if given is None or given.packed is None else (given.packed,)
        hands_on = self.hands_on_selection and self.core_attention.computes_topk

        def core(*tensors):
            inputs = index_inputs
            if inputs is not None:
                inputs = inputs.with_tensors(tensors[count : count + len(of_indexer)])
            if not selects:
                return core_forward(*tensors[:count], layout, inputs)
            used = TopKIndices.unpack(tensors[-1]) if shared else given
            out, selection = core_forward(*tensors[:count], layout, inputs, used, self.ranks)
            return (out, *selection.tensors()) if hands_on else out

        out = self.run_core(core, *tensors, *of_indexer, *shared)
        if selects and hands_on:
            out, *selection = out
            self.used_selection = TopKIndices.of_tensors(selection)
        return out

    def _given_selection(self, layout) -> TopKIndices | None:
        """Return the selection of an earlier layer or of a replay, if any."""
        if not self.core_attention.computes_topk:
            return self.shared_selection
        replayed = self.core_attention.given_selection(layout, layout, self.ranks)
        return None if replayed is None else TopKIndices(*replayed)

    def delayed_linears(self) -> list:
        config = self.config
        linears = [self.linear_kv_down_proj, self.linear_proj, self._query_linear()]
        if self.linear_gate is not None:
            linears.append(self.linear_gate)
        if config.q_lora_rank is not None:
            linears.append(self.linear_q_down_proj)
        if not self.shares_latents:
            linears.append(self.linear_kv_up_proj)
        return linears


_WAYS = {
    "sparse": DSASelfAttention._sparse,
    "masked": DSASelfAttention._masked,
    "masked_latents": DSASelfAttention._masked_latents,
    "visible": DSASelfAttention._visible,
    "dense": DSASelfAttention._dense,
    "dense_latents": DSASelfAttention._dense_latents,
}


def _flat_rope_key(q, kv, k_pe):
    return q, kv, k_pe.flatten(1)
