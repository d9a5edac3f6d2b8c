"""When and how an attention module trains its indexer: conditions, scale, and the log."""

from dataclasses import replace
from typing import Any

import torch

from megatron_dsa.config.model import indexer_is_trained, loss_is_sparse, options_of
from megatron_dsa.config.rules import graphs_attention
from megatron_dsa.dsa_kernels import IndexerInputs, IndexerTraining
from megatron_dsa.layers.required_ops import tensor_parallel_mode
from megatron_dsa.layers.warm_up import resolving
from megatron_dsa.metrics.health import Attended, selection_health
from megatron_dsa.metrics.log import (
    EVALUATION,
    IndexerLog,
    attach_loss,
    install_loss_scale,
    say_if_frozen,
)
from megatron_dsa.ops.common.scaling import Factor, Scaled
from megatron_dsa.ops.indexer_loss.queries import TrainedIndexer
from megatron_dsa.ops.indexer_topk.finite import require_finite_scores
from megatron_dsa.ops.layout.layout import Layout


class TrainsIndexer:
    """Mixin of :class:`~megatron_dsa.layers.core.CoreAttention`; ``indexer`` may be ``None``."""

    config: Any
    indexer: Any
    training: bool
    selects: bool
    _kept_loss: torch.Tensor | None

    def set_up_loss(self, layer_number: int, is_mtp: bool, pg_collection) -> None:
        """Settle what the loss and the metrics need to know about the layer."""
        self.options = options_of(self.config)
        self.policy = self.options.policy
        self.loss_is_sparse = loss_is_sparse(self.config)
        self.tp_mode = tensor_parallel_mode(self.config)
        self.indexer_is_trained = indexer_is_trained(self.config)
        self.pg_collection = pg_collection
        # Layers of multi-token prediction log behind the decoder's.
        self.layer_index = layer_number - 1 + (self.config.num_layers if is_mtp else 0)
        self.loss_scale = install_loss_scale(self.config)
        if resolving():
            say_if_frozen(self.config)
        # In layers without a backward of their own, see ``freezing.py``.
        self.keeps_loss, self._kept_loss = False, None
        # Once per iteration, which a replayed graph of a layer cannot know.
        self.measures_selection = bool(self.options.health_tokens) and not graphs_attention(
            self.config
        )

    def trains_indexer_now(self) -> bool:
        """Whether this forward pass trains the indexer.

        Without gradients (evaluation, first pass of a recomputed layer) there is nothing to do.
        """
        return (
            self.indexer is not None
            and torch.is_grad_enabled()
            and (self.training and self.indexer_is_trained)
        )

    def measures_selection_now(self) -> bool:
        """Whether this is a training pass whose selection may be measured for the log.

        A frozen indexer's is, too. In a recomputed layer it is the pass with gradients.
        """
        return self.training and torch.is_grad_enabled() and self.measures_selection

    def evaluates_indexer_now(self) -> bool:
        """Whether this is an evaluation pass whose indexer loss is asked for."""
        return self.options.evaluate_indexer and not self.training and self.indexer is not None

    def heads_group(self) -> Any:
        """The group over which a teacher is still to be summed, or ``None``.

        By sequence a rank has all heads of its queries. Where ranks select for their own tokens,
        attention returns sums over all heads.
        """
        if self.tp_mode != "heads":
            return None
        group = self.pg_collection.tp if self.pg_collection is not None else None
        return group if group is not None and group.size() > 1 else None

    def checked(self, inputs: IndexerInputs, layout: Layout) -> IndexerInputs:
        """Return the indexer's inputs if their scores are finite.

        Raises:
            ConfigError: they are not; names the layer. On a GPU a device assert.
        """
        return require_finite_scores(inputs, layout, f"layer {self.layer_index + 1}")

    def sparse_training(
        self, inputs: TrainedIndexer, keys: Layout, rows: Layout, selected_only: bool = False
    ) -> IndexerTraining:
        """Return the sparse loss, whose value and gradients are formed in the attention's backward.

        ``keys`` is the layout of the indexer's keys, ``rows`` the one that counts the query tokens.
        """
        coeff = self.config.dsa_indexer_loss_coeff

        def weight() -> Factor:
            # Read in the backward: Megatron sets the scale after the forward pass.
            # Per-token loss: Megatron divides the gradients by the number of tokens itself.
            alone = self.config.calculate_per_token_loss
            factor = Factor(coeff) if alone else _mean_over_tokens(rows, coeff)
            return replace(factor, times=self.loss_scale.on(rows.start.device))

        def record(kl_sum: torch.Tensor) -> None:
            self._record("indexer loss", kl_sum, coeff, rows)

        return IndexerTraining(inputs, keys, weight, record, self.heads_group(), selected_only)

    def attach(self, out: torch.Tensor, loss_sum: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Scale a loss, record it, and hang it onto ``out`` or keep it for the layer."""
        coeff = self.config.dsa_indexer_loss_coeff
        # Per-token loss: Megatron divides the gradients by the number of tokens itself.
        alone = self.config.calculate_per_token_loss
        factor = Factor(coeff) if alone else _mean_over_tokens(layout, coeff)
        loss = factor.apply(loss_sum)
        self._record("indexer loss", loss_sum.detach(), coeff, layout)
        if self.keeps_loss:
            self._kept_loss = attach_loss(loss.new_zeros(()), loss, self.loss_scale)
            return out
        return attach_loss(out, loss, self.loss_scale)

    def take_loss(self) -> torch.Tensor | None:
        """Return what the last forward pass kept, a 0 whose backward is that of the loss."""
        loss, self._kept_loss = self._kept_loss, None
        return loss

    def record_health(self, attended: Attended) -> None:
        """Record how good the selection of a few queries is, in an iteration's first microbatch."""
        if IndexerLog.samples_selection(self.layer_index):
            count, workspace = self.options.health_tokens, self.policy.workspace_bytes
            health = selection_health(attended, count, workspace)
            IndexerLog.record(self.layer_index, health)

    def record_evaluation(self, loss_sum: torch.Tensor, layout: Layout) -> None:
        """Record the loss of an evaluation pass; that of a frozen indexer has no factor."""
        coeff = self.config.dsa_indexer_loss_coeff or 1.0
        self._record(EVALUATION, loss_sum.detach(), coeff, layout)

    def _record(self, name: str, loss_sum: torch.Tensor, coeff: float, layout: Layout) -> None:
        """Record the mean of a loss over tokens, times ``coeff``.

        The log averages over ranks, so it is given the mean over a rank's share of the tokens.
        """
        factor = _mean_over_tokens(layout, layout.num_shards * coeff)
        IndexerLog.record(self.layer_index, {name: Scaled(loss_sum, factor)})


def _mean_over_tokens(layout: Layout, coeff: float) -> Factor:
    """Return ``coeff`` over the number of real tokens on all ranks, at least 1."""
    tokens = layout.real_tokens()
    if isinstance(tokens, int):
        return Factor(coeff / max(tokens, 1))
    # One number in fp64 keeps fp64 models exact.
    count = layout.derive("tokens of a mean", lambda: tokens.clamp_min(1).double())
    return Factor(coeff, over=count)
