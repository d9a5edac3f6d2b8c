"""The DSA core: select keys, attend to them, train the selector (DeepSeek-V3.2).

One module serves the three stages. ``sparse`` attends to the indexer's top-k; ``warmup`` attends to
everything and trains the indexer on that; ``dense`` attends to everything and has no indexer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config import (
    computes_topk,
    indexer_is_trained,
    options_of,
    shares_indices,
    uses_indexer,
    validate,
)
from megatron_dsa.dispatch import choose, device_problem
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    dense_attention,
    dense_indexer_loss,
    indexer_topk,
    sparse_attention,
    sparse_indexer_loss,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.health import selection_health
from megatron_dsa.layout import Layout
from megatron_dsa.losses import EVALUATION, IndexerLog, attach_loss, install_loss_scale
from megatron_dsa.rotary import RowRope
from megatron_dsa.support import Problem
from megatron_dsa.warm_up import warm_up

logger = logging.getLogger(__name__)


@dataclass
class DSACoreAttentionSubmodules:
    """The indexer's spec."""

    indexer: ModuleSpec | type = None


class Selection(NamedTuple):
    """Keys selected for every query row; may be handed on to later layers."""

    indices: torch.Tensor  # int32 [rows, K], rows of the key buffer, -1 padded
    length: torch.Tensor  # int32 [rows]

    def pack(self) -> torch.Tensor:
        """Return both as one int32 tensor ``[rows, K + 1]``."""
        return torch.cat([self.indices, self.length[:, None]], dim=1)

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Selection:
        """Undo :meth:`pack`."""
        return cls(packed[:, :-1], packed[:, -1])


class DSACoreAttention(MegatronModule):
    """Core attention with the indexer inside, as ``self_attention.core_attention``.

    Takes the constructor arguments of Megatron's core attentions. ``is_mtp`` marks the attention of
    a multi-token-prediction layer, which logs behind the decoder layers and never shares indices.
    """

    def __init__(
        self,
        config,
        submodules: DSACoreAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        softmax_scale: float | None = None,
        pg_collection=None,
        is_mtp: bool = False,
        **_megatron,
    ):
        super().__init__(config=config)
        validate(config)
        if attn_mask_type != AttnMaskType.causal:
            raise ConfigError(
                f"attn_mask_type must be causal, got {attn_mask_type}: DSA selects among the past"
            )
        self.options = options_of(config)
        self.softmax_scale = softmax_scale
        self.pg_collection = pg_collection
        self.layer_index = layer_number - 1 + (config.num_layers if is_mtp else 0)
        self.loss_scale = install_loss_scale(config)
        self.computes_topk = (
            is_mtp or not shares_indices(config) or computes_topk(config, layer_number)
        )
        self.indexer = None
        if uses_indexer(config) and self.computes_topk:
            self.indexer = build_module(submodules.indexer, config=config)
            if not indexer_is_trained(config):
                # A parameter without a gradient would stall the overlapped gradient reduction.
                self.indexer.requires_grad_(False)
        self._probe()

    def _probe(self) -> None:
        """Settle now what the first step will call, so that a refusal comes before training."""
        policy, calls = self.options.policy, tuple(self._problems())
        for operation, problem in calls:
            choose(operation, problem, policy)
        if self.softmax_scale is not None:
            warm_up(calls, policy, self.softmax_scale)

    def _problems(self) -> Iterator[tuple[str, Problem]]:
        """Yield every operation that a training step will call, with its problem."""
        config = self.config
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        device = "cuda" if torch.cuda.is_available() else "cpu"
        topk = config.dsa_indexer_topk

        def attention(qk_dim: int, v_dim: int, topk: int | None = None) -> Problem:
            return device_problem(
                device, dtype=config.params_dtype, heads=heads, qk_dim=qk_dim, v_dim=v_dim,
                topk=topk,
            )  # fmt: skip

        def index(topk: int | None) -> Problem:
            return device_problem(
                device, dtype=config.params_dtype, heads=config.dsa_indexer_n_heads,
                qk_dim=config.dsa_indexer_head_dim, v_dim=0, topk=topk,
                relu=config.dsa_indexer_scoring_relu,
            )  # fmt: skip

        trains = indexer_is_trained(config) and self.indexer is not None
        if self.options.stage == "sparse":
            latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
            sparse = attention(latent, config.kv_lora_rank, topk)
            if self.computes_topk:
                yield "indexer_scores", index(topk)
                yield "indexer_topk", index(topk)
            yield "sparse_attention_forward", sparse
            yield "sparse_attention_backward", sparse
            if trains and self._loss_is_sparse():
                yield "sparse_attention_probabilities", sparse
                yield "sparse_indexer_loss", index(topk)
                yield "indexer_backward", index(topk)
        else:
            qk_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
            yield "dense_attention", attention(qk_dim, config.v_head_dim)
        if trains and not self._loss_is_sparse():
            yield "dense_indexer_loss", index(None)

    def _loss_is_sparse(self) -> bool:
        return self.options.stage == "sparse" and self.config.dsa_indexer_use_sparse_loss

    def _trains_indexer_now(self) -> bool:
        # Without gradients (evaluation, first pass of a recomputed layer) there is nothing to do.
        return (
            self.indexer is not None
            and torch.is_grad_enabled()
            and (self.training and indexer_is_trained(self.config))
        )

    def _judges_indexer_now(self) -> bool:
        """Whether this is an evaluation pass whose indexer loss is asked for."""
        return self.options.evaluate_indexer and not self.training and self.indexer is not None

    def forward_sparse(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        kv_grad: torch.Tensor,
        layout: Layout,
        index_inputs: IndexerInputs | None,
        shared: Selection | None,
    ) -> tuple[torch.Tensor, Selection]:
        """Attend to selected keys.

        Args:
            q: ``[rows, H, 576]`` absorbed queries of the local heads.
            kv: ``[keys, 576]`` latent keys; kv_grad: the channel for their gradient.
            layout: which keys each row sees.
            index_inputs: the indexer's projections, ``None`` if this layer reuses a selection.
            shared: selection of an earlier layer, for layers that reuse one.

        Returns:
            latent output ``[rows, H, kv_lora_rank]`` and the selection that was used.
        """
        config, policy = self.config, self.options.policy
        if index_inputs is not None:
            selection = Selection(
                *indexer_topk(index_inputs, layout, config.dsa_indexer_topk, policy=policy)
            )
        elif shared is not None:
            selection = shared
        else:
            raise ConfigError(
                f"layer {self.layer_index + 1} reuses the selection of an earlier layer "
                f"(--dsa-indexer-topk-freq {config.dsa_indexer_topk_freq}), but got none: build "
                "the layers with megatron_dsa.specs.dsa_block_spec, which hands selections on"
            )
        trains = index_inputs is not None and self._trains_indexer_now()
        training = None
        if trains and self._loss_is_sparse():
            training = self._sparse_training(index_inputs, layout)
        judges = index_inputs is not None and self._judges_indexer_now()
        result = sparse_attention(
            q,
            kv,
            selection.indices,
            softmax_scale=self.softmax_scale,
            v_dim=config.kv_lora_rank,
            topk_length=selection.length,
            kv_grad=kv_grad,
            want_p_sum=judges and self._loss_is_sparse(),
            indexer=training,
            policy=policy,
        )
        out = result.out
        if trains:
            if not self._loss_is_sparse():
                loss_sum = self._dense_loss(index_inputs, q, kv[:, None], layout)
                out = self._attach(out, loss_sum, layout)
            if self.options.health_rows:
                health = selection_health(
                    index_inputs, layout, config.dsa_indexer_topk, q, kv, result.lse,
                    self.softmax_scale, self.options.health_rows, policy.workspace_bytes,
                )  # fmt: skip
                IndexerLog.record(self.layer_index, health)
        if judges:
            loss_sum = self._judge(index_inputs, q, kv, selection, layout, result.p_sum)
            self._record_evaluation(loss_sum, layout)
        return out, selection

    def forward_dense(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        index_inputs: IndexerInputs | None,
    ) -> torch.Tensor:
        """Attend to every visible key: ``q, k [rows, H, 192]``, ``v [rows, H, 128]`` -> like v."""
        out = dense_attention(
            q, k, v, layout, softmax_scale=self.softmax_scale, policy=self.options.policy
        )
        if index_inputs is not None and self._trains_indexer_now():
            out = self._attach(out, self._dense_loss(index_inputs, q, k, layout), layout)
        elif index_inputs is not None and self._judges_indexer_now():
            self._record_evaluation(self._dense_loss(index_inputs, q, k, layout), layout)
        return out

    def _heads_group(self):
        """The group over which heads are spread, or ``None``."""
        group = self.pg_collection.tp if self.pg_collection is not None else None
        return group if group is not None and group.size() > 1 else None

    def _sum_over_heads(self, p_sum: torch.Tensor) -> torch.Tensor:
        """Complete the teacher's head sum over tensor-parallel ranks."""
        group = self._heads_group()
        if group is not None:
            torch.distributed.all_reduce(p_sum, group=group)
        return p_sum

    def _dense_loss(self, index_inputs, q, k, layout) -> torch.Tensor:
        return dense_indexer_loss(
            index_inputs, q, k, layout, softmax_scale=self.softmax_scale,
            head_group=self._heads_group(), policy=self.options.policy,
        )  # fmt: skip

    def _sparse_training(self, index_inputs: IndexerInputs, layout: Layout) -> IndexerTraining:
        """The sparse loss, whose value and gradients are formed in the attention's backward."""
        coeff = self.config.dsa_indexer_loss_coeff

        def weight():
            # Read in the backward: Megatron sets the scale after the forward pass.
            # Per-token loss: Megatron divides the gradients by the number of tokens itself.
            rows = 1 if self.config.calculate_per_token_loss else _row_count(layout)
            scale = self.loss_scale.value
            # One number: fp64 costs nothing and keeps fp64 models exact.
            return coeff * (scale.double() if isinstance(scale, torch.Tensor) else scale) / rows

        def record(kl_sum: torch.Tensor) -> None:
            mean = coeff * kl_sum / _row_count(layout)
            IndexerLog.record(self.layer_index, {"indexer loss": mean})

        return IndexerTraining(index_inputs, layout, weight, record, self._heads_group())

    def _attach(self, out, loss_sum, layout: Layout):
        """Scale a loss, hang it onto ``out`` and record it."""
        coeff = self.config.dsa_indexer_loss_coeff
        mean = loss_sum / _row_count(layout)
        # Per-token loss: Megatron divides the gradients by the number of tokens itself.
        loss = coeff * (loss_sum if self.config.calculate_per_token_loss else mean)
        IndexerLog.record(self.layer_index, {"indexer loss": coeff * mean})
        return attach_loss(out, loss, self.loss_scale)

    def _judge(self, index_inputs, q, kv, selection, layout, p_sum) -> torch.Tensor:
        """KL sum of an evaluation pass, for which there is no backward."""
        if not self._loss_is_sparse():
            return self._dense_loss(index_inputs, q, kv[:, None], layout)
        return sparse_indexer_loss(
            index_inputs, selection.indices, self._sum_over_heads(p_sum), layout,
            topk_length=selection.length, policy=self.options.policy,
        )  # fmt: skip

    def _record_evaluation(self, loss_sum: torch.Tensor, layout: Layout) -> None:
        mean = self.config.dsa_indexer_loss_coeff * loss_sum / _row_count(layout)
        IndexerLog.record(self.layer_index, {EVALUATION: mean})

    def needs_index_inputs(self) -> bool:
        """Whether this forward pass selects keys or trains the indexer."""
        return self.indexer is not None and (
            self.options.stage == "sparse"
            or self._trains_indexer_now()
            or self._judges_indexer_now()
        )

    def project_index(self, x: torch.Tensor, qr: torch.Tensor, rope: RowRope) -> IndexerInputs:
        """Return the indexer's projections of ``x [rows, hidden]`` and ``qr [rows, q_lora]``."""
        with torch.set_grad_enabled(self._trains_indexer_now()):
            return self.indexer(x.detach(), qr.detach(), rope)

    def backward_dw(self) -> None:
        """Compute the indexer's delayed weight gradients, if it is trained."""
        if self.indexer is not None and self.training and indexer_is_trained(self.config):
            self.indexer.backward_dw()


def _row_count(layout: Layout) -> torch.Tensor | int:
    """Number of real rows, at least 1."""
    rows = layout.real_rows()
    return max(rows, 1) if isinstance(rows, int) else rows.clamp_min(1)
