"""The DSA core: select keys, attend to them, train the selector (DeepSeek-V3.2).

One module serves the three stages. ``sparse`` attends to the indexer's top-k; ``warmup`` attends to
everything and trains the indexer on that; ``dense`` attends to everything and has no indexer.
"""

from __future__ import annotations

import logging
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
from megatron_dsa.dispatch import Problem, choose
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    dense_attention,
    dense_indexer_loss,
    indexer_topk,
    sparse_attention,
    sparse_indexer_loss,
)
from megatron_dsa.errors import ConfigError
from megatron_dsa.health import selection_health
from megatron_dsa.layout import Layout
from megatron_dsa.losses import IndexerLog, attach_loss, install_loss_scale
from megatron_dsa.rotary import RowRope

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
        config, on_gpu = self.config, torch.cuda.is_available()
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        device = {
            "device": "cuda" if on_gpu else "cpu",
            "capability": torch.cuda.get_device_capability() if on_gpu else None,
            "dtype": config.params_dtype,
        }
        index = {
            "heads": config.dsa_indexer_n_heads,
            "qk_dim": config.dsa_indexer_head_dim,
            "v_dim": 0,
        }
        policy = self.options.policy
        if self.options.stage == "sparse":
            sparse = Problem(
                **device, heads=heads, qk_dim=latent, v_dim=config.kv_lora_rank,
                topk=config.dsa_indexer_topk,
            )  # fmt: skip
            choose("sparse_attention_forward", sparse, policy)
            choose("sparse_attention_backward", sparse, policy)
            if self.computes_topk:
                choose(
                    "indexer_topk", Problem(**device, **index, topk=config.dsa_indexer_topk), policy
                )
        else:
            dense = Problem(
                **device, heads=heads, qk_dim=config.qk_head_dim + config.qk_pos_emb_head_dim,
                v_dim=config.v_head_dim,
            )  # fmt: skip
            choose("dense_attention", dense, policy)
        if indexer_is_trained(config) and self.indexer is not None:
            sparse_loss = self._loss_is_sparse()
            topk = config.dsa_indexer_topk if sparse_loss else None
            name = "sparse_indexer_loss" if sparse_loss else "dense_indexer_loss"
            choose(name, Problem(**device, **index, topk=topk), policy)

    def _loss_is_sparse(self) -> bool:
        return self.options.stage == "sparse" and self.config.dsa_indexer_use_sparse_loss

    def _trains_indexer_now(self) -> bool:
        # Without gradients (evaluation, first pass of a recomputed layer) there is nothing to do.
        return (
            self.indexer is not None
            and torch.is_grad_enabled()
            and (self.training and indexer_is_trained(self.config))
        )

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
        result = sparse_attention(
            q,
            kv,
            selection.indices,
            softmax_scale=self.softmax_scale,
            v_dim=config.kv_lora_rank,
            topk_length=selection.length,
            kv_grad=kv_grad,
            want_p_sum=trains and self._loss_is_sparse(),
            policy=policy,
        )
        out = result.out
        if trains:
            if self._loss_is_sparse():
                teacher = self._sum_over_heads(result.p_sum)
                loss_sum = sparse_indexer_loss(
                    index_inputs, selection.indices, teacher, layout,
                    topk_length=selection.length, policy=policy,
                )  # fmt: skip
            else:
                loss_sum = self._dense_loss(index_inputs, q, kv[:, None], layout)
            health = {}
            if self.options.health_rows:
                health = selection_health(
                    index_inputs, layout, config.dsa_indexer_topk, q, kv, result.lse,
                    self.softmax_scale, self.options.health_rows, policy.workspace_bytes,
                )  # fmt: skip
            out = self._attach(out, loss_sum, layout, health)
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
            out = self._attach(out, self._dense_loss(index_inputs, q, k, layout), layout, {})
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

    def _attach(self, out, loss_sum, layout: Layout, health: dict) -> torch.Tensor:
        """Scale the loss, hang it onto ``out`` and record the figures."""
        coeff = self.config.dsa_indexer_loss_coeff
        rows = layout.real_rows()
        mean = loss_sum / (max(rows, 1) if isinstance(rows, int) else rows.clamp_min(1))
        # Per-token loss: Megatron divides the gradients by the number of tokens itself.
        loss = coeff * (loss_sum if self.config.calculate_per_token_loss else mean)
        IndexerLog.record(self.layer_index, {"indexer loss": coeff * mean, **health})
        return attach_loss(out, loss, self.loss_scale)

    def needs_index_inputs(self) -> bool:
        """Whether this forward pass selects keys or trains the indexer."""
        return self.indexer is not None and (
            self.options.stage == "sparse" or self._trains_indexer_now()
        )

    def project_index(self, x: torch.Tensor, qr: torch.Tensor, rope: RowRope) -> IndexerInputs:
        """Return the indexer's projections of ``x [rows, hidden]`` and ``qr [rows, q_lora]``."""
        with torch.set_grad_enabled(self._trains_indexer_now()):
            return self.indexer(x.detach(), qr.detach(), rope)

    def backward_dw(self) -> None:
        """Compute the indexer's delayed weight gradients, if it is trained."""
        if self.indexer is not None and self.training and indexer_is_trained(self.config):
            self.indexer.backward_dw()
