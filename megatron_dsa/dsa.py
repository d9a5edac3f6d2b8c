"""Multi-latent attention around the DSA core: projections, rope, absorption, output.

The layers are those of Megatron's ``MLASelfAttention``, built by it, with its parameter names. What
differs is the forward pass: the sparse stage attends in the latent space (weight absorption), where
all heads share one 576-dim key, or to all keys under a bit mask; and rope works on rows, so that
packed batches need no host synchronisation.
"""

import dataclasses

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
from megatron.core.transformer.spec_utils import build_module

from megatron_dsa.config.model import exchanges_latents, options_of, validate
from megatron_dsa.layers.cuda_graphs import GraphedLayer
from megatron_dsa.layers.dsa_core import TopKIndices
from megatron_dsa.layers.frame import (
    SelfAttentionFrame,
    weight_gradient_by_autograd,
    weight_of,
)
from megatron_dsa.layers.parallel.gather import (
    Gathering,
    finish_gather,
    gathered_product,
    start_gather,
)
from megatron_dsa.layers.parallel.groups import heads_to_sequence, ranks_of, sequence_to_heads
from megatron_dsa.layers.required_ops import attention_of, tensor_parallel_mode
from megatron_dsa.layers.rope import TokenRope
from megatron_dsa.layers.v4.hyper_connections import HyperConnections
from megatron_dsa.layers.weight_blocks import split_for_muon
from megatron_dsa.ops.cached_keys import MLA_CACHE, as_cached
from megatron_dsa.ops.dispatch import count
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.rope.api import rotate


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
            # The parent would build the core twice; it is built once, below.
            submodules=dataclasses.replace(submodules, core_attention=IdentityOp),
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            **megatron,
        )
        if (epsilon := options_of(config).latent_norm_epsilon) is not None:
            self.q_layernorm.eps = self.kv_layernorm.eps = epsilon
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            softmax_scale=self.softmax_scale,
            pg_collection=self.pg_collection,
        )
        if options_of(config).muon_per_head != "none":
            self._split_heads_for_muon()
        # Whether plain MLA runs under a bit mask, of the selected keys or of all visible ones.
        attention = attention_of(config)
        self.masked = attention.masked
        self.ranks = ranks_of(config, self.pg_collection, tensor_parallel_mode(config, attention))
        self.sparse = options_of(config).stage == "sparse" and not self.masked
        # Whether latents travel in a dense stage, and keys are made of them where they are used.
        self.exchanges_latents = exchanges_latents(config)
        # Whether latents are gathered: then the up projection of keys is read as a plain weight.
        self.gathers_latents = (
            self.sparse or self.exchanges_latents or (self.masked and self.ranks.cp is not None)
        )
        if self.gathers_latents:
            weight_gradient_by_autograd(self.linear_kv_up_proj)
        # TopKIndices handed from layer to layer during one forward call, see IndexSharingLayer.
        self.hands_on_selection = False
        self.shared_selection: TopKIndices | None = None
        self.used_selection: TopKIndices | None = None

    def _split_heads_for_muon(self) -> None:
        """Mark the up projections: a matrix of queries, of keys and of values per head."""
        config = self.config
        up = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        for weight, rows in (
            (up.weight, (self.q_head_dim,)),
            (self.linear_kv_up_proj.weight, (config.qk_head_dim, config.v_head_dim)),
        ):
            split_for_muon(weight, rows, config.tensor_model_parallel_size)

    def attend(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        """See :class:`SelfAttentionFrame`."""
        ranks = self.ranks
        rope = TokenRope(self.rotary_pos_emb, layout, self.config)

        q_latent, kv_latent, k_pe = self._latents(hidden_states)
        if not (self.sparse or self.masked) and ranks.cp is not None:
            count("context_parallel_exchange", "latents" if self.exchanges_latents else "keys")
        keys = None
        if self.gathers_latents:
            keys = self._start_gather(kv_latent, k_pe, rope)
        index_inputs = None
        if self.core_attention.needs_index_inputs():
            index_inputs = self.core_attention.project_index(
                hidden_states, q_latent, layout, rope, ranks
            )
        if keys is None:
            attend = self._attend_dense
            if self.masked:
                selects = options_of(self.config).stage == "sparse"
                attend = self._attend_masked if selects else self._attend_visible
            return attend(q_latent, kv_latent, k_pe, layout, rope, index_inputs)
        attend_gathered = self._attend_latents
        if self.sparse:
            attend_gathered = self._attend_sparse
        elif self.masked:
            attend_gathered = self._attend_masked_latents
        return attend_gathered(q_latent, keys, layout, rope, index_inputs)

    def _latents(self, hidden_states: torch.Tensor):
        """Return the normalised latents of this rank's tokens: q, kv, and the raw rope key.

        Shapes ``[s / ranks, b, q_lora_rank | kv_lora_rank | 64]``.
        """
        config = self.config
        q_latent, kv = self._qkv_down_projection(hidden_states)
        latent_dims = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        if kv.shape[-1] != sum(latent_dims):
            # A column-parallel down projection leaves every rank all tokens of some columns.
            # Rows are scattered again, rope key included: its gradient has to be summed over ranks.
            kv = gather_from_tensor_model_parallel_region(kv)
            if config.sequence_parallel:
                kv = scatter_to_sequence_parallel_region(kv)
        kv_latent, k_pe = kv.split(latent_dims, dim=-1)
        if config.q_lora_rank is not None:
            q_latent = self.q_layernorm(q_latent)
        kv_latent = self.kv_layernorm(kv_latent)
        options = options_of(config)
        if options.kv_rounding != "none":
            kv_latent = as_cached(kv_latent, MLA_CACHE, options.workspace_bytes)
        return q_latent, kv_latent, k_pe

    def _start_gather(self, kv_latent, k_pe, rope: TokenRope) -> Gathering:
        """Start to gather this rank's latents, rope key rotated.

        They travel while the indexer and the queries are computed.
        """
        own = rope.own(self.ranks)
        k_pe = self._turned(k_pe.flatten(0, 1)[:, None], own.tables(k_pe.dtype)).view_as(k_pe)
        return start_gather(torch.cat([kv_latent, k_pe], -1), self.ranks.group)

    def _projected_queries(self, q_latent: torch.Tensor) -> torch.Tensor:
        """Return the queries ``[tokens, H, 192]`` before rope."""
        up = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        q, _ = up(q_latent)
        q = q.view(-1, self.num_attention_heads_per_partition, self.q_head_dim)
        return heads_to_sequence(q, self.ranks.tp) if self.ranks.by_sequence else q

    def _queries(self, q_latent: torch.Tensor, rope: TokenRope) -> torch.Tensor:
        """Return the queries ``[tokens, H, 192]``, their last 64 dims rotated."""
        return self._turned(self._projected_queries(q_latent), rope.tables(q_latent.dtype))

    def _turned(self, x: torch.Tensor, tables) -> torch.Tensor:
        """Rotate the last dims of ``x [tokens, H, D]``.

        Pairs of dims stay in place, in queries and keys: products are those of Megatron's rope.
        """
        return rotate(x, *tables, policy=self.core_attention.policy)

    def _queries_and_rope_key(self, q_latent, k_pe, rope: TokenRope):
        """Return :meth:`_queries` and the rotated rope key ``[tokens, 1, 64]``."""
        tables = rope.tables(q_latent.dtype)
        q = self._turned(self._projected_queries(q_latent), tables)
        return q, self._turned(k_pe.flatten(0, 1)[:, None], tables)

    def _keys_and_values(self, kv_latent: torch.Tensor) -> torch.Tensor:
        """Return per head the key without rope, then the value, ``[tokens, H, 256]``."""
        kv, _ = self.linear_kv_up_proj(kv_latent)
        return kv.view(kv.shape[:2].numel(), self.num_attention_heads_per_partition, -1)

    def _up_weights(self) -> torch.Tensor:
        """Return ``W_uk``, then ``W_uv``, of this rank's heads, ``[H, 128 + 128, latent]``."""
        heads = self.num_attention_heads_per_partition
        return weight_of(self.linear_kv_up_proj).view(heads, -1, self.config.kv_lora_rank)

    def _attend_sparse(self, q_latent, keys: Gathering, layout, rope, index_inputs):
        """Weight-absorbed attention over selected keys; returns ``[tokens, H, v_head_dim]``."""
        weights = self._up_weights()
        q = self.maybe_recomputed(lambda q_latent: self._queries(q_latent, rope), q_latent)
        kv, kv_grad = finish_gather(keys)

        given = self._given_selection(layout)  # of this microbatch, also when recomputed later

        def core(q, kv, kv_grad, weights, *index_tensors):
            inputs = _rebuild(index_inputs, index_tensors)
            out, selection = self.core_attention.forward_sparse(
                q, kv, kv_grad, weights, layout, inputs, given, self.ranks
            )
            return out, *selection

        tensors = (q, kv, kv_grad, weights)
        out = self._run_selecting(core, *tensors, *_tensors(index_inputs))
        return sequence_to_heads(out, self.ranks.tp) if self.ranks.by_sequence else out

    def _attend_masked(self, q_latent, kv_latent, k_pe, layout, rope, index_inputs):
        """Plain MLA over all keys under a mask of those selected; ``[tokens, H, v_head_dim]``."""
        rope = self._rope_of_attended(rope, layout)
        q, kv, k_pe = self._plain(q_latent, kv_latent, k_pe, rope)
        return self._run_masked(q, kv, k_pe, None, layout, index_inputs)

    def _attend_visible(self, q_latent, kv_latent, k_pe, layout, rope, index_inputs):
        """Like :meth:`_attend_dense`, under a mask of the visible keys and without copies."""
        tensors = self._plain(q_latent, kv_latent, k_pe, rope)

        def core(q, kv, k_pe, *index_tensors):
            return self.core_attention.forward_visible(
                q, kv, k_pe, layout, _rebuild(index_inputs, index_tensors)
            )

        return self.run_core(core, *tensors, *_tensors(index_inputs))

    def _plain(self, q_latent, kv_latent, k_pe, rope):
        """Return ``q [tokens, H, 192]``, keys and values ``[tokens, H, 256]`` and the rope key."""
        if self.ranks.tp is not None:
            k_pe = gather_from_sequence_parallel_region(k_pe, group=self.ranks.tp)

        def up(q_latent, kv_latent, k_pe):
            q, k_pe = self._queries_and_rope_key(q_latent, k_pe, rope)
            return q, self._keys_and_values(kv_latent), k_pe.flatten(1)

        return self.maybe_recomputed(up, q_latent, kv_latent, k_pe)

    def _attend_masked_latents(self, q_latent, keys: Gathering, layout, rope, index_inputs):
        """Like :meth:`_attend_masked`, with keys and values made of the latents of all ranks."""
        rope = self._rope_of_attended(rope, layout)

        q = self.maybe_recomputed(lambda q_latent: self._queries(q_latent, rope), q_latent)
        dims = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        (latents, k_pe), (latent_grad, k_pe_grad) = (
            x.split(dims, dim=1) for x in finish_gather(keys)
        )

        def keys_and_values(latents, latent_grad, weight):
            kv = gathered_product(latents, latent_grad, weight)
            return kv.unflatten(1, (self.num_attention_heads_per_partition, -1))

        weight = weight_of(self.linear_kv_up_proj)
        kv = self.maybe_recomputed(keys_and_values, latents, latent_grad, weight)
        return self._run_masked(q, kv, k_pe.contiguous(), k_pe_grad, layout, index_inputs)

    def _rope_of_attended(self, rope: TokenRope, layout: Layout) -> TokenRope:
        """Return the rope of the tokens that attention is for; ``layout`` is of query tokens."""
        if self.ranks.attention_group is None:
            return rope
        layout = self.ranks.attended(layout)
        return TokenRope(self.rotary_pos_emb, layout, self.config)

    def _run_masked(self, q, kv, k_pe, k_pe_grad, layout, index_inputs) -> torch.Tensor:
        given = self._given_selection(layout)  # of this microbatch, also when recomputed later

        def core(q, kv, k_pe, k_pe_grad, *index_tensors):
            inputs = _rebuild(index_inputs, index_tensors)
            out, selection = self.core_attention.forward_masked(
                q, kv, k_pe, k_pe_grad, layout, inputs, given, self.ranks
            )
            return out, *selection

        return self._run_selecting(core, q, kv, k_pe, k_pe_grad, *_tensors(index_inputs))

    def _run_selecting(self, core, *tensors) -> torch.Tensor:
        """Run ``core``, which returns its output and a selection; hand that on if it is shared."""
        out, *selection = self.run_core(core, *tensors)
        if self.hands_on_selection:
            self.used_selection = TopKIndices(*selection)
        return out

    def _given_selection(self, layout) -> TopKIndices | None:
        """Return what is to be attended to in place of the indexer's selection, if anything."""
        if not self.core_attention.computes_topk:
            return self.shared_selection
        replayed = self.core_attention.given_selection(layout, layout, self.ranks)
        return None if replayed is None else TopKIndices(*replayed)

    def _attend_dense(self, q_latent, kv_latent, k_pe, layout, rope, index_inputs):
        """Plain MLA over all visible keys; returns ``[tokens, H, v_head_dim]``."""
        if self.ranks.tp is not None:
            k_pe = gather_from_sequence_parallel_region(k_pe, group=self.ranks.tp)

        def up(q_latent, kv_latent, k_pe):
            q, k_pe = self._queries_and_rope_key(q_latent, k_pe, rope)
            kv = self._keys_and_values(kv_latent)
            k_nope, v = kv.split([self.config.qk_head_dim, self.config.v_head_dim], dim=-1)
            return q, torch.cat([k_nope, k_pe.expand(-1, q.shape[1], -1)], dim=-1), v.contiguous()

        q, k, v = self.maybe_recomputed(up, q_latent, kv_latent, k_pe)

        def core(q, k, v, *index_tensors):
            return self.core_attention.forward_dense(
                q, k, v, layout, _rebuild(index_inputs, index_tensors)
            )

        return self.run_core(core, q, k, v, *_tensors(index_inputs))

    def _attend_latents(self, q_latent, keys: Gathering, layout, rope, index_inputs):
        """Like :meth:`_attend_dense`, with the latents of all ranks instead of keys and values."""
        dims = [self.config.qk_head_dim, self.config.v_head_dim]
        w_uk, w_uv = self._up_weights().split(dims, dim=1)

        q = self.maybe_recomputed(lambda q_latent: self._queries(q_latent, rope), q_latent)
        latents, latent_grad = finish_gather(keys)

        def core(q, latents, latent_grad, w_uk, w_uv, *index_tensors):
            return self.core_attention.forward_latents(
                q, latents, latent_grad, w_uk, w_uv, layout, _rebuild(index_inputs, index_tensors)
            )

        tensors = (q, latents, latent_grad, w_uk, w_uv)
        return self.run_core(core, *tensors, *_tensors(index_inputs))

    def backward_dw(self) -> None:
        """Compute delayed weight gradients of every layer that ran as a linear, indexer included.

        The up projection of keys is not among them where its weight enters as a plain tensor
        (absorbed in sparse attention, or with gathered latents): autograd has its gradient already.
        """
        config = self.config
        linears = [self.linear_kv_down_proj, self.linear_proj]
        if config.q_lora_rank is None:
            linears.append(self.linear_q_proj)
        else:
            linears += [self.linear_q_down_proj, self.linear_q_up_proj]
        if not self.gathers_latents:
            linears.append(self.linear_kv_up_proj)
        for linear in linears:
            if linear.weight.requires_grad:
                linear.backward_dw()
        self.core_attention.backward_dw()


def _tensors(inputs) -> tuple:
    return () if inputs is None else inputs.tensors()


def _rebuild(inputs, tensors):
    """Put checkpointed tensors back into the indexer's inputs."""
    return None if inputs is None else inputs.with_tensors(tensors)


class IndexSharingLayer(GraphedLayer):
    """Transformer layer that hands its attention's selection to the next layer.

    It travels as ``context``, the tensor that Megatron passes from layer to layer for cross
    attention, which a GPT has not. So it belongs to its microbatch, and activation recompute saves
    and restores it like any other input: no layer can see another microbatch's selection.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.self_attention.hands_on_selection = True

    def _forward_attention(self, hidden_states, *args, context=None, **kwargs):
        attention = self.self_attention
        attention.shared_selection = None if context is None else TopKIndices.unpack(context)
        try:
            hidden_states, _ = super()._forward_attention(hidden_states, *args, **kwargs)
            selection = attention.used_selection
        finally:
            attention.shared_selection = attention.used_selection = None
        if not attention.core_attention.computes_topk:
            # Unchanged, not another copy of it. Another object: Megatron's CUDA graphs mark a
            # tensor as the input or the output of a graph.
            return hidden_states, None if context is None else context.detach()
        return hidden_states, None if selection is None else selection.pack()


class IndexSharingHyperConnectionLayer(HyperConnections, IndexSharingLayer):
    """An :class:`IndexSharingLayer` with hyper-connections."""
