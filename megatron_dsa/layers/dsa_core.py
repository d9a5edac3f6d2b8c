"""Core attention of DeepSeek-V3.2."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dsa.config.hybrid import attention_layers
from megatron_dsa.config.model import selects_keys, shares_teacher, uses_indexer, uses_sinks
from megatron_dsa.dsa_kernels import (
    ExpandedKeys,
    IndexerInputs,
    IndexerTraining,
    LatentKeys,
    absorbed_attention,
    dense_attention,
    dense_indexer_loss,
    gathered_latent_attention,
    key_bits,
    masked_attention,
    visible_bits,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.core import CoreAttention
from megatron_dsa.layers.parallel.groups import Ranks, gather_detached
from megatron_dsa.layers.rope import TokenRope
from megatron_dsa.layers.warm_up import resolving
from megatron_dsa.metrics.health import Attended
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.autograd import in_backward
from megatron_dsa.ops.dispatch import choices_are_collected, log_once, on_meta
from megatron_dsa.ops.indexer_loss.api import selected_keys_loss
from megatron_dsa.ops.indexer_loss.sample import draw_number
from megatron_dsa.ops.indexer_loss.shared import (
    HeadSums,
    SharedSelection,
    in_ascending_order,
    train_on_selection,
)
from megatron_dsa.ops.indexer_loss.training import LatentIndexerInputs, Taught, TrainedIndexer
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.pools import KeyPools


@dataclass
class DSACoreAttentionSubmodules:
    indexer: ModuleSpec | type = None


class TopKIndices(NamedTuple):
    """Selected keys per query token."""

    indices: torch.Tensor  # key indices, int32 [tokens, K], padded with -1
    length: torch.Tensor  # number of selected keys, int32 [tokens]
    packed: torch.Tensor | None = None

    def pack(self) -> torch.Tensor:
        if self.packed is not None:
            return self.packed
        return torch.cat([self.indices, self.length[:, None]], dim=1)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> TopKIndices:
        if not packed.is_floating_point():
            return cls(packed[:, :-1], packed[:, -1])
        indices, length, _ = SharedSelection.unpack(packed)
        return cls(indices.int(), length.int(), packed)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self[:2] if self.packed is None else (self.packed,)

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor]) -> TopKIndices:
        return cls.unpack(tensors[0]) if len(tensors) == 1 else cls(*tensors)


class DSACoreAttention(CoreAttention):
    """Core attention with an indexer and one ``forward_*`` per attention method.

    All return ``[tokens, H, v_head_dim]`` and share these arguments:

    * ``q``: ``[tokens, H, 192]`` with local heads, or all heads by sequence;
    * ``layout``: visible keys per query token;
    * ``index_inputs``: the indexer's projections, ``None`` if nothing is scored;
    * ``given``: selection of an earlier layer or replay.
    """

    def __init__(
        self, config, submodules: DSACoreAttentionSubmodules, layer_number: int, *args, **kwargs
    ):
        super().__init__(config, layer_number, *args, **kwargs)
        self.computes_topk = self.is_mtp or self.selects
        self.shares_teacher = shares_teacher(config, layer_number, self.is_mtp)
        if uses_indexer(config) and self.computes_topk:
            self.build_indexer(submodules.indexer)
        if uses_sinks(config):
            self.build_sink()
        if resolving() and not on_meta():
            level = logging.DEBUG if choices_are_collected() else logging.INFO
            log_once(level, self.choice.describe())
        self.resolve_kernels()

    def selecting_numbers(self) -> list[int]:
        numbers = attention_layers(self.config)
        numbers += range(self.config.num_layers + 1, self.layer_number + 1)
        return [number for number in numbers if selects_keys(self.config, number)]

    def forward_sparse(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        kv_grad: torch.Tensor | None,
        weights: torch.Tensor,
        layout: Layout,
        index_inputs: TrainedIndexer | None,
        given: TopKIndices | None,
        ranks: Ranks,
    ) -> tuple[torch.Tensor, TopKIndices]:
        """Attend to selected keys; also return the selection.

        ``kv [keys, 576]``: latents; ``kv_grad``: their gradient proxy, ``None`` on one rank;
        ``weights [local heads, 256, 512]``: up projection.
        """
        selection = self._select(layout, index_inputs, given, ranks)
        group, sink = ranks.tp if ranks.by_sequence else None, self.sinks(ranks)
        result = absorbed_attention(
            q,
            kv,
            weights,
            selection.indices,
            softmax_scale=self.softmax_scale,
            topk_length=selection.length,
            attn_sink=sink,
            kv_grad=kv_grad,
            want_p_sum=self._evaluates_sparse_loss(index_inputs),
            in_order=True,
            indexer=self._loss_in_backward(index_inputs, layout, selection),
            group=group,
            recompute=self.options.recompute == "latent_output",
            policy=self.policy,
        )
        out = self._trained_and_measured(
            result, index_inputs, layout, selection, q, kv, sink,
            w_uk=weights[:, : self.config.qk_head_dim], group=group,
        )  # fmt: skip
        return out, selection

    def forward_masked(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        k_pe: torch.Tensor,
        k_pe_grad: torch.Tensor | None,
        layout: Layout,
        index_inputs: TrainedIndexer | None,
        given: TopKIndices | None,
        ranks: Ranks,
    ) -> tuple[torch.Tensor, TopKIndices]:
        """Attend to selected keys by plain MLA under a bit mask; also return the selection.

        ``q`` has attention's tokens, the selection the indexer's tokens (see :class:`Ranks`).
        ``kv [keys, H, 256]``: keys without rope, then values; ``k_pe [keys, 64]``: rope key;
        ``k_pe_grad``: its gradient proxy, ``None`` if no other rank attends to it.
        """
        selection = self._select(layout, index_inputs, given, ranks)
        bits = key_bits(selection.indices, selection.length, len(kv), policy=self.policy)
        result = masked_attention(
            q,
            kv,
            k_pe,
            bits,
            softmax_scale=self.softmax_scale,
            topk=selection.indices.shape[1],
            attn_sink=self.attn_sink,
            k_pe_grad=k_pe_grad,
            want_p_sum=self._evaluates_sparse_loss(index_inputs),
            indexer=self._loss_in_backward(index_inputs, layout, selection),
            group=ranks.attention_tp,
            policy=self.policy,
        )
        result = result._replace(lse=ranks.queries_of(result.lse))
        q = ranks.queries_of(q)
        out = self._trained_and_measured(
            result, index_inputs, layout, selection, q, kv, self.attn_sink, k_pe=k_pe
        )
        return out, selection

    def _select(self, layout, index_inputs, given, ranks) -> TopKIndices:
        trained = index_inputs
        recomputed = given is not None and in_backward()
        if isinstance(index_inputs, LatentIndexerInputs) and not recomputed:
            index_inputs = self.checked(index_inputs.with_queries(), self.key_layout(layout))
        if given is not None:
            selection = given
        elif index_inputs is not None:
            pools = self.pools(layout)
            selected = self.topk(index_inputs, layout, ranks, pools.keys if pools else None)
            selection = TopKIndices(*(pools.expand(*selected) if pools else selected))
        else:
            raise ConfigError(
                f"layer {self.layer_index + 1} reuses the selection of an earlier layer "
                f"(--dsa-indexer-topk-freq {self.config.dsa_indexer_topk_freq}), but got none: "
                "build the layers with megatron_dsa.specs.dsa_block_spec, which hands selections on"
            )
        if self.computes_topk:
            self.note_selection(selection.indices, layout)
        if self.shares_teacher and self.computes_topk and self.training:
            selection = self._shared(selection, trained, layout)
        return selection

    def _shared(self, selection: TopKIndices, index_inputs, layout: Layout) -> TopKIndices:
        """Prepare to train the indexer on all layers that reuse its selection."""
        share, device = self.options.indexer_loss_queries, layout.start.device
        # Activation recompute must draw query tokens again.
        number = draw_number(layout.num_queries, share, device, self.heads_group())
        drawn = torch.zeros(1, dtype=torch.int64, device=device) if number is None else number[None]
        shared = SharedSelection(selection.indices, selection.length, drawn)
        training, keys = None, layout.key_ownership
        if self.trains_indexer_now():
            training = self._training(index_inputs, layout)
        ascending = self.choice.masked and keys is not None and not keys.in_order
        dtype = accumulation_dtype(self.config.params_dtype)
        packed = train_on_selection(shared, dtype, training, self.policy, ascending)
        return selection._replace(packed=packed)

    def _evaluates_sparse_loss(self, index_inputs) -> bool:
        return index_inputs is not None and self.evaluates_indexer_now() and self.loss_is_sparse

    def _loss_in_backward(self, index_inputs, layout, selection: TopKIndices) -> Taught | None:
        packed = selection.packed
        if packed is not None:
            trains = packed.requires_grad and torch.is_grad_enabled()
            return HeadSums.of(packed, self.options.indexer_loss_queries) if trains else None
        if index_inputs is None or not (self.trains_indexer_now() and self.loss_is_sparse):
            return None
        return self._training(index_inputs, layout)

    def _training(self, index_inputs: TrainedIndexer, layout: Layout) -> IndexerTraining:
        keys, pools = self.key_layout(layout), self.pools(layout)
        return self.sparse_training(index_inputs, keys, layout, pools=pools)

    def pools(self, layout: Layout) -> KeyPools | None:
        size = self.options.indexer_pool_size
        return None if size == 1 else KeyPools.of(layout, size)

    def key_layout(self, layout: Layout) -> Layout:
        pools = self.pools(layout)
        return layout if pools is None else pools.keys.layout

    def _trained_and_measured(
        self, result, index_inputs, layout, selection, q, kv, sink, **keys
    ) -> torch.Tensor:
        sample = self.draw_sample(layout)
        if index_inputs is None:
            return result.out
        mass = result.lse if sink is None else torch.logaddexp(result.lse, sink.detach())
        attended = Attended(
            index_inputs, layout, self.config.dsa_indexer_topk, layout, q, kv, selection.indices,
            mass, self.softmax_scale, **keys,
        )  # fmt: skip
        out = result.out
        if self.trains_indexer_now() and not self.loss_is_sparse:
            loss_sum = self._dense_loss(index_inputs, q, attended.keys(), layout, sample=sample)
            out = self.attach(out, loss_sum, layout)
        if self.measures_selection_now():
            self.record_health(attended)
        if self.evaluates_indexer_now():
            loss_sum = self._evaluate(attended, selection.length, result.p_sum)
            self.record_evaluation(loss_sum, layout)
        return out

    def forward_dense(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        index_inputs: TrainedIndexer | None,
    ) -> torch.Tensor:
        """Attend to all visible keys ``k [tokens, H, 192]``, ``v [tokens, H, 128]``."""
        group = self.pg_collection.cp if layout.num_shards > 1 else None
        out, lse = dense_attention(
            q, k, v, layout, softmax_scale=self.softmax_scale, group=group,
            policy=self.policy,
        )  # fmt: skip
        if group is not None and self._wants_dense_loss(index_inputs):
            k = gather_detached(k, group)
        return self._with_loss(out, lse, index_inputs, q, k, layout)

    def forward_visible(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        k_pe: torch.Tensor,
        layout: Layout,
        index_inputs: TrainedIndexer | None,
    ) -> torch.Tensor:
        """Attend to all visible keys by plain MLA under a bit mask, on one rank."""
        result = masked_attention(
            q, kv, k_pe, visible_bits(layout, self.policy), softmax_scale=self.softmax_scale,
            policy=self.policy,
        )  # fmt: skip
        keys = ExpandedKeys(kv, k_pe, self.config.v_head_dim)
        return self._with_loss(result.out, result.lse, index_inputs, q, keys, layout)

    def forward_latents(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        latent_grad: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        layout: Layout,
        index_inputs: TrainedIndexer | None,
    ) -> torch.Tensor:
        """Attend to all visible keys of all context-parallel ranks.

        ``w_uk`` and ``w_uv [H, 128, 512]`` expand ``latents [keys, 576]``.
        """
        out, lse = gathered_latent_attention(
            q, latents, w_uk, w_uv, layout, softmax_scale=self.softmax_scale,
            latent_grad=latent_grad, policy=self.policy,
        )  # fmt: skip
        return self._with_loss(out, lse, index_inputs, q, LatentKeys(latents, w_uk), layout)

    def _wants_dense_loss(self, index_inputs) -> bool:
        return index_inputs is not None and (
            self.trains_indexer_now() or self.evaluates_indexer_now()
        )

    def _with_loss(self, out, lse, index_inputs, q, k, layout) -> torch.Tensor:
        sample = self.draw_sample(layout)
        if not self._wants_dense_loss(index_inputs):
            return out
        loss_sum = self._dense_loss(index_inputs, q, k, layout, lse, sample)
        if self.trains_indexer_now():
            return self.attach(out, loss_sum, layout)
        self.record_evaluation(loss_sum, layout)
        return out

    def _dense_loss(self, index_inputs, q, k, layout, lse=None, sample=None) -> torch.Tensor:
        pools = self.pools(layout)
        if pools is not None:
            # Attention's log-sum-exp includes tokens that no pool contains.
            (keys, layout), lse = pools.by_token(index_inputs.k), None
            index_inputs = replace(index_inputs, k=keys)
        return dense_indexer_loss(
            index_inputs, q, k, layout, softmax_scale=self.softmax_scale, lse=lse,
            head_group=self.heads_group(), sample=sample, policy=self.policy,
        )  # fmt: skip

    def _evaluate(self, attended: Attended, length, p_sum) -> torch.Tensor:
        if not self.loss_is_sparse:
            return self._dense_loss(attended.inputs, attended.q, attended.keys(), attended.layout)
        masked = attended.k_pe is not None
        indices = _in_buffer_order(attended) if masked else attended.indices
        pools = self.pools(attended.layout)
        if pools is not None:
            indices, length, p_sum = pools.of_lists(indices, length, p_sum)
        return selected_keys_loss(
            attended.inputs.with_queries(), self.key_layout(attended.layout), indices, length,
            p_sum, self.policy, self.heads_group(),
        ).value  # fmt: skip

    def needs_index_inputs(self) -> bool:
        selects = self.options.stage == "sparse" and self.selection_source is None
        return self.indexer is not None and (
            selects or self.trains_indexer_now() or self.evaluates_indexer_now()
        )

    def project_index(
        self, x: torch.Tensor, qr: torch.Tensor, layout: Layout, rope: TokenRope, ranks: Ranks
    ) -> TrainedIndexer:
        # Activation recompute must make the same choice, so ignore grad mode.
        remake = self.training and self.indexer_is_trained and self.loss_is_sparse
        with torch.set_grad_enabled(self.trains_indexer_now()):
            pools = self.pools(layout)
            inputs = self.indexer(
                x.detach(), qr.detach(), rope, ranks, remake, pools.keys if pools else None
            )
        layout = self.key_layout(layout)
        return self.checked(inputs, layout) if isinstance(inputs, IndexerInputs) else inputs


def _in_buffer_order(attended: Attended) -> torch.Tensor:
    """Sort the selected keys of each query by index."""
    keys, indices = attended.layout.key_ownership, attended.indices
    return indices if keys is None or keys.in_order else in_ascending_order(indices)
