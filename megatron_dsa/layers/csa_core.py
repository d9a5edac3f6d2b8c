"""Core attention of DeepSeek-V4.

Layers with a compression ratio also attend to compressed keys; CSA layers (ratio 4) select them.
"""

import dataclasses
from dataclasses import dataclass

import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.model import uses_indexer
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.dsa_kernels import IndexerInputs, dense_indexer_loss, sparse_attention
from megatron_dsa.layers.core import CoreAttention
from megatron_dsa.layers.parallel.csa_keys import join_keys_of_ranks
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.layers.rope import PositionRope
from megatron_dsa.metrics.health import Attended
from megatron_dsa.ops.cached_keys import CSA_CACHE, as_cached
from megatron_dsa.ops.indexer_loss.api import selected_keys_loss
from megatron_dsa.ops.indexer_loss.sample import QuerySample
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.halo import halo_of
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.sparse_attention.mapped import MappedQueries, mapped_attention


@dataclass
class CSACoreAttentionSubmodules:
    compressor: ModuleSpec | type = None
    indexer: ModuleSpec | type = None


class CSACoreAttention(CoreAttention):
    """Attention to a sliding window and compressed keys, with a learned sink per head."""

    def __init__(
        self, config, submodules: CSACoreAttentionSubmodules, layer_number: int, *args, **kwargs
    ):
        super().__init__(config, layer_number, *args, **kwargs)
        self.ratio = config.ratio(layer_number, self.is_mtp)
        self.build_sink()
        self.compressor = None
        if self.ratio:
            self.compressor = build_module(
                submodules.compressor, config=config, ratio=self.ratio, dim=config.head_dim
            )
        if self.ratio == CSA_RATIO and uses_indexer(config):
            self.build_indexer(submodules.indexer)
        self.attends_to_selected = self.indexer is not None and self.options.stage == "sparse"
        self.selected_only = self.options.csa_teacher == "compressed"
        self.resolve_kernels()

    def selecting_numbers(self) -> list[int]:
        numbers = range(1, self.config.num_layers + 1)
        return [number for number in numbers if self.config.ratio(number) == CSA_RATIO]

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_latent: torch.Tensor,
        q: torch.Tensor | MappedQueries,
        kv: torch.Tensor,
        layout: Layout,
        rope: PositionRope,
        ranks: Ranks,
    ) -> torch.Tensor:
        """Return attention outputs ``[tokens, H, D]`` before inverse rope, or mapped outputs.

        Args:
            hidden_states, q_latent, kv: local, ``[s, b, hidden | q_lora_rank | D]``; ``kv`` is
                rotated.
            q: ``[tokens, H, D]``, rotated; for tokens and heads see :class:`Ranks`.
        """
        policy = self.policy
        keys = compressed = inputs = None
        if self.compressor is not None:
            keys = compressed_keys(layout, self.ratio, self.compressor.overlap)
            compressed = self.compressor(hidden_states, keys, rope, ranks)
            if self.options.kv_rounding != "none":
                rope_dims = self.config.qk_pos_emb_head_dim
                compressed = as_cached(compressed, CSA_CACHE, policy.workspace_bytes, rope_dims)
        halo = None
        if ranks.query_sharding.ranks > 1:
            halo = halo_of(layout, ranks.query_sharding, max(self.config.csa_window_size - 1, 1))
        if ranks.group is None:
            kv, kv_grad = kv.flatten(0, 1), None
            if compressed is not None:
                kv = torch.cat([compressed, kv])
        else:
            kv, kv_grad = join_keys_of_ranks(kv, compressed, keys, halo, ranks)
        sink = self.sinks(ranks)
        assert sink is not None
        trains, evaluates = self.trains_indexer_now(), self.evaluates_indexer_now()
        given = None
        if self.attends_to_selected:
            assert keys is not None
            given = self.given_selection(layout, keys.layout, ranks)
        if (self.attends_to_selected and given is None) or trains or evaluates:
            with torch.set_grad_enabled(trains):
                inputs = self.indexer(
                    hidden_states.detach(), q_latent.detach(), keys, layout, rope, ranks
                )
            assert keys is not None
            inputs = self.checked(inputs, keys.layout)
        lists = KeyLists(
            layout, self.config.csa_window_size, keys, held=None if halo is None else halo.held
        )
        if self.attends_to_selected:
            lists = self._select(inputs, lists, ranks, given)
        training = None
        if trains and self.loss_is_sparse:
            assert inputs is not None and keys is not None
            training = self.sparse_training(inputs, keys.layout, layout, self.selected_only)
        arguments = {
            "softmax_scale": self.softmax_scale, "v_dim": q.shape[2], "attn_sink": sink,
            "kv_grad": kv_grad, "indexer": training, "policy": policy,
        }  # fmt: skip
        if isinstance(q, MappedQueries):
            result = mapped_attention(q, kv, lists, **arguments)
        else:
            wanted = evaluates and self.loss_is_sparse and not self.selected_only
            result = sparse_attention(q, kv, lists, want_p_sum=wanted, **arguments)
        out, sample = result.out, self.draw_sample(layout)
        if trains and not self.loss_is_sparse:
            out = self.attach(out, self._dense_loss(inputs, q, kv, lists, sink, sample), layout)
        if self.attends_to_selected and inputs is not None and self.measures_selection_now():
            assert keys is not None and lists.selected is not None
            total = torch.logaddexp(result.lse, sink.detach())
            attended = Attended(
                inputs.detach(), keys.layout, self.config.dsa_indexer_topk, layout, q,
                kv[: keys.count], lists.selected, total, self.softmax_scale,
            )  # fmt: skip
            self.record_health(attended)
        if evaluates:
            self.record_evaluation(self._evaluate(inputs, q, kv, lists, sink, result.p_sum), layout)
        return out

    def _select(
        self, inputs: IndexerInputs | None, lists: KeyLists, ranks: Ranks, given
    ) -> KeyLists:
        assert lists.compressed is not None
        checked = given is None
        if given is None:
            assert inputs is not None
            given = self.topk(inputs, lists.layout, ranks, lists.compressed)
        indices, length = given
        self.note_selection(indices, lists.compressed.layout)
        return dataclasses.replace(lists, selected=indices, selected_length=length, checked=checked)

    def _dense_loss(
        self, inputs, q, kv, lists: KeyLists, sink: torch.Tensor, sample: QuerySample | None = None
    ) -> torch.Tensor:
        """Return the indexer's KL loss, summed over all visible compressed keys.

        The teacher's softmax includes window and sink unless ``--dsa-csa-teacher compressed``.
        """
        keys, other = lists.compressed, None
        assert keys is not None
        if not self.selected_only:
            with torch.no_grad():
                window = sparse_attention(
                    q, kv[keys.count :], dataclasses.replace(lists, compressed=None, selected=None),
                    softmax_scale=self.softmax_scale, v_dim=q.shape[2], policy=self.policy,
                )  # fmt: skip
                other = torch.logaddexp(window.lse, sink.to(window.lse.dtype))
        return dense_indexer_loss(
            inputs, q, kv[: keys.count, None], keys.layout,
            softmax_scale=self.softmax_scale, other_lse=other, head_group=self.heads_group(),
            sample=sample, policy=self.policy,
        )  # fmt: skip

    def _evaluate(self, inputs, q, kv, lists: KeyLists, sink, p_sum) -> torch.Tensor:
        if not self.loss_is_sparse:
            return self._dense_loss(inputs, q, kv, lists, sink)
        policy = self.policy
        assert lists.selected is not None and lists.compressed is not None
        if p_sum is None:
            p_sum = sparse_attention(
                q, kv, lists.selected, softmax_scale=self.softmax_scale, v_dim=q.shape[2],
                topk_length=lists.selected_length, want_p_sum=True, policy=policy,
            ).p_sum  # fmt: skip
        return selected_keys_loss(
            inputs, lists.compressed.layout, lists.selected, lists.selected_length, p_sum, policy,
            self.heads_group(),
        ).value  # fmt: skip
