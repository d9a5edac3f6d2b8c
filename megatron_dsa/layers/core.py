"""Base class of DSA and CSA core attention."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.attention_choice import AttentionChoice, attention_of
from megatron_dsa.config.model import (
    indexer_is_trained,
    loss_is_sparse,
    options_of,
    selected_keys,
    validate,
)
from megatron_dsa.config.rules.cuda_graphs import graphs_attention
from megatron_dsa.dsa_kernels import IndexerInputs, IndexerTraining, indexer_topk
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.linears import HeadParameters, replicated_linear
from megatron_dsa.layers.parallel.balanced_topk import balanced_topk
from megatron_dsa.layers.parallel.groups import Ranks, gather_detached, gather_same
from megatron_dsa.layers.required_ops import RequiredOp, required_ops
from megatron_dsa.layers.warm_up import resolve_kernels, resolving
from megatron_dsa.layers.weight_blocks import mark_row_blocks
from megatron_dsa.metrics.health import Attended, selection_health
from megatron_dsa.metrics.log import (
    EVALUATION,
    IndexerLog,
    attach_loss,
    install_loss_scale,
    say_how_trained,
)
from megatron_dsa.ops.common.autograd import in_backward
from megatron_dsa.ops.common.scaling import Factor, Scaled
from megatron_dsa.ops.dispatch.policy import EXACT
from megatron_dsa.ops.indexer_loss.sample import QuerySample, draw_sample
from megatron_dsa.ops.indexer_loss.training import TrainedIndexer
from megatron_dsa.ops.indexer_topk.api import require_finite_scores
from megatron_dsa.ops.indexer_topk.engine import fp32_weights
from megatron_dsa.ops.layout.compressed import CompressedKeys
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.pools import KeyPools


class Indexer(MegatronModule):
    """Base class of indexers.

    Subclasses set ``linear_wq_b`` and ``linear_weights_proj``.
    """

    def __init__(self, config):
        super().__init__(config=config)
        self.heads, self.dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.policy = options_of(config).policy
        self.as_engine = self.policy.indexer_numerics != EXACT

    def linear(self, spec, input_size: int, output_size: int) -> Any:
        return replicated_linear(spec, self.config, input_size, output_size)

    def mark_query_heads(self) -> None:
        if options_of(self.config).muon_per_head == "all":
            ranks = self.config.tensor_model_parallel_size
            mark_row_blocks(self.linear_wq_b.weight, (self.dim,), ranks)

    def latents(self, qr: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        if ranks.indexer_tp is not None:
            qr = gather_detached(qr, ranks.indexer_tp)
        return qr.flatten(0, 1)

    def weights(self, x: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scaled head weights, also in fp32 if scores imitate an inference engine."""
        weights, _ = self.linear_weights_proj(x)
        if ranks.indexer_tp is not None:
            weights = gather_same(weights, ranks.indexer_tp)
        weights = weights.flatten(0, 1)
        in_fp32 = fp32_weights(weights, self.dim) if self.as_engine else None
        return weights * (self.heads**-0.5 * self.dim**-0.5), in_fp32

    def backward_dw(self) -> None:
        self.linear_wq_b.backward_dw()
        self.linear_weights_proj.backward_dw()


class CoreAttention(HeadParameters, MegatronModule):
    """Core attention with an optional indexer.

    Args:
        layer_number: from 1.
        softmax_scale: factor on ``q . k``; with ``None`` no kernel is compiled in advance.
        is_mtp: True in multi-token prediction, which never shares indices.

    Attributes:
        selecting_layers: numbers of all decoder layers that select keys.
        selection_source: its ``given(core, layout, keys, ranks)`` replaces selections.
        selection_sink: its ``put(core, indices, keys)`` receives selections.
        keeps_loss: keep the loss for :meth:`take_loss` instead of attaching it.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        softmax_scale: float | None = None,
        pg_collection=None,
        is_mtp: bool = False,
        choice: AttentionChoice | None = None,
        **_megatron,
    ):
        super().__init__(config=config)
        validate(config)
        if attn_mask_type != AttnMaskType.causal:
            raise ConfigError(
                f"attn_mask_type must be causal, got {attn_mask_type}: a query sees the past only"
            )
        self.layer_number, self.is_mtp = layer_number, is_mtp
        self.pg_collection = pg_collection
        self.options = options_of(config)
        self.policy = self.options.policy
        self.choice = attention_of(config) if choice is None else choice
        self.softmax_scale: Any = softmax_scale
        self.selecting_layers = tuple(self.selecting_numbers())
        self.selects = not is_mtp and layer_number in self.selecting_layers
        self.selection_source: Any = None
        self.selection_sink: Any = None
        self.indexer: Any = None
        self.attn_sink: Any = None
        self.indexer_is_trained = indexer_is_trained(config)
        self.loss_is_sparse = loss_is_sparse(config)
        self.loss_scale = install_loss_scale(config)
        self.keeps_loss = False
        self._kept_loss: torch.Tensor | None = None
        # The log lists prediction layers after decoder layers.
        self.layer_index = layer_number - 1 + (config.num_layers if is_mtp else 0)
        # A CUDA graph would sample the selection in every microbatch.
        self.measures_selection = bool(self.options.health_tokens) and not graphs_attention(config)
        if resolving():
            say_how_trained(config)

    def selecting_numbers(self) -> list[int]:
        raise NotImplementedError

    def build_indexer(self, spec: ModuleSpec | type) -> None:
        self.indexer = build_module(spec, config=self.config, tp_mode=self.choice.tp_mode)
        if not self.indexer_is_trained:
            # Trainable parameters without gradient stall the overlapped gradient reduction.
            self.indexer.requires_grad_(False)

    def build_sink(self) -> None:
        """Build ``attn_sink``, one extra softmax logit per local head."""
        heads = self.config.num_attention_heads // self.config.tensor_model_parallel_size
        self.attn_sink = self.new_head_parameter(heads)
        self.fp32_parameters = ("attn_sink",)

    def sinks(self, ranks: Ranks) -> torch.Tensor | None:
        if self.attn_sink is None or not ranks.by_sequence:
            return self.attn_sink
        return gather_from_sequence_parallel_region(self.attn_sink, group=ranks.tp)

    def required_ops(self) -> list[RequiredOp]:
        return required_ops(self.config, self.layer_number, self.is_mtp)

    def resolve_kernels(self) -> None:
        resolve_kernels(self.required_ops(), self.policy, self.softmax_scale)

    def trains_indexer_now(self) -> bool:
        return (
            self.indexer is not None
            and torch.is_grad_enabled()
            and (self.training and self.indexer_is_trained)
        )

    def measures_selection_now(self) -> bool:
        return self.training and torch.is_grad_enabled() and self.measures_selection

    def evaluates_indexer_now(self) -> bool:
        return self.options.evaluate_indexer and not self.training and self.indexer is not None

    def checked(self, inputs: IndexerInputs, layout: Layout) -> IndexerInputs:
        return require_finite_scores(inputs, layout, f"layer {self.layer_index + 1}")

    def given_selection(
        self, layout: Layout, keys: Layout, ranks: Ranks
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return indices and lengths from ``selection_source``, if set; call once per forward."""
        source = self.selection_source
        return None if source is None else source.given(self, layout, keys, ranks)

    def topk(
        self,
        inputs: IndexerInputs,
        layout: Layout,
        ranks: Ranks,
        compressed: CompressedKeys | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = selected_keys(self.config)
        if ranks.query_sharding.ranks == 1:
            keys = layout if compressed is None else compressed.layout
            return indexer_topk(inputs, keys, count, policy=self.policy)
        return balanced_topk(
            inputs, layout, count, ranks, compressed=compressed, policy=self.policy
        )

    def note_selection(self, indices: torch.Tensor, keys: Layout) -> None:
        if self.selection_sink is not None and not in_backward():
            self.selection_sink.put(self, indices, keys)

    def heads_group(self) -> Any:
        """Return the process group that sums the teacher over heads, or ``None``."""
        if self.choice.tp_mode != "heads":
            return None
        group = self.pg_collection.tp if self.pg_collection is not None else None
        return group if group is not None and group.size() > 1 else None

    def sparse_training(
        self,
        inputs: TrainedIndexer,
        keys: Layout,
        tokens: Layout,
        selected_only: bool = False,
        pools: KeyPools | None = None,
    ) -> IndexerTraining:
        """Describe the sparse indexer loss, which attention's backward computes.

        ``keys`` is the layout of the indexer's keys, ``tokens`` the layout of the queries.
        """
        coeff = self.config.dsa_indexer_loss_coeff

        def weight() -> Factor:
            # Megatron sets the loss scale after the forward.
            factor = self._loss_factor(tokens)
            return replace(factor, times=self.loss_scale.on(tokens.start.device))

        def record(kl_sum: torch.Tensor) -> None:
            self._record("indexer loss", kl_sum, coeff, tokens)

        return IndexerTraining(
            inputs, keys, weight, record, self.heads_group(), selected_only,
            self.options.indexer_loss_queries, self.options.head_parts, pools,
        )  # fmt: skip

    def draw_sample(self, tokens: Layout) -> QuerySample | None:
        """Draw query tokens for a dense indexer loss, once per forward or recompute."""
        if not (self.training and self.indexer_is_trained and not self.loss_is_sparse):
            return None
        share, device = self.options.indexer_loss_queries, tokens.start.device
        parts = self.options.head_parts
        return draw_sample(tokens.num_queries, share, device, self.heads_group(), parts)

    def _loss_factor(self, layout: Layout) -> Factor:
        # Megatron itself divides per-token losses by the number of tokens.
        coeff = self.config.dsa_indexer_loss_coeff
        if self.config.calculate_per_token_loss:
            return Factor(coeff)
        return _mean_over_tokens(layout, coeff)

    def attach(self, out: torch.Tensor, loss_sum: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Record the indexer loss and attach its backward to ``out``."""
        loss = self._loss_factor(layout).apply(loss_sum)
        coeff = self.config.dsa_indexer_loss_coeff
        self._record("indexer loss", loss_sum.detach(), coeff, layout)
        if self.keeps_loss:
            self._kept_loss = attach_loss(loss.new_zeros(()), loss, self.loss_scale)
            return out
        return attach_loss(out, loss, self.loss_scale)

    def take_loss(self) -> torch.Tensor | None:
        loss, self._kept_loss = self._kept_loss, None
        return loss

    def record_health(self, attended: Attended) -> None:
        if IndexerLog.samples_selection(self.layer_index):
            count, workspace = self.options.health_tokens, self.policy.workspace_bytes
            health = selection_health(attended, count, workspace)
            IndexerLog.record(self.layer_index, health)

    def record_evaluation(self, loss_sum: torch.Tensor, layout: Layout) -> None:
        coeff = self.config.dsa_indexer_loss_coeff or 1.0
        self._record(EVALUATION, loss_sum.detach(), coeff, layout)

    def _record(self, name: str, loss_sum: torch.Tensor, coeff: float, layout: Layout) -> None:
        # The log averages over ranks: scale by the number of ranks.
        factor = _mean_over_tokens(layout, layout.num_shards * coeff)
        IndexerLog.record(self.layer_index, {name: Scaled(loss_sum, factor)})

    def backward_dw(self) -> None:
        if self.indexer is not None and self.training and self.indexer_is_trained:
            self.indexer.backward_dw()


def _mean_over_tokens(layout: Layout, coeff: float) -> Factor:
    tokens = layout.real_tokens()
    if isinstance(tokens, int):
        return Factor(coeff / max(tokens, 1))
    # An fp64 token count keeps fp64 models exact.
    count = layout.derive("tokens of a mean", lambda: tokens.clamp_min(1).double())
    return Factor(coeff, over=count)
