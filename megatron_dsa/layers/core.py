"""The base of both core attentions: what they are, their indexer, and the operations they call."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.model import validate
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.rl.replay import TakesSelections
from megatron_dsa.layers.indexer_training import TrainsIndexer
from megatron_dsa.layers.required_ops import RequiredOp, required_ops
from megatron_dsa.layers.warm_up import resolve_kernels


class CoreAttention(TrainsIndexer, TakesSelections, MegatronModule):
    """A core attention that may have an indexer, as ``self_attention.core_attention``.

    Args:
        config: the transformer configuration.
        layer_number: of the layer, from 1.
        attn_mask_type: must be causal.
        softmax_scale: factor on ``q . k``.
        pg_collection: process groups of the model.
        is_mtp: whether it is the attention of a multi-token-prediction layer, which logs behind the
            decoder layers and never shares indices.

    Raises:
        ConfigError: for what the package does not support.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None,
        pg_collection,
        is_mtp: bool,
    ):
        super().__init__(config=config)
        validate(config)
        if attn_mask_type != AttnMaskType.causal:
            raise ConfigError(
                f"attn_mask_type must be causal, got {attn_mask_type}: a query sees the past only"
            )
        self.layer_number, self.is_mtp = layer_number, is_mtp
        # None where nothing is compiled beforehand; attention itself has one.
        self.softmax_scale: Any = softmax_scale
        self.set_up_selecting(layer_number, is_mtp, self.selecting_numbers())
        self.set_up_loss(layer_number, is_mtp, pg_collection)
        self.indexer = None

    def selecting_numbers(self) -> list[int]:
        """Return the numbers of the decoder layers that select keys; asked after validation."""
        raise NotImplementedError

    def build_indexer(self, spec: ModuleSpec | type) -> None:
        """Build the indexer; one that is not trained has no gradients."""
        self.indexer = build_module(spec, config=self.config)
        if not self.indexer_is_trained:
            # A parameter without a gradient would stall the overlapped gradient reduction.
            self.indexer.requires_grad_(False)

    def required_ops(self) -> list[RequiredOp]:
        """Return the operations that this layer calls."""
        return required_ops(self.config, self.layer_number, self.is_mtp)

    def resolve_kernels(self) -> None:
        """Choose and compile the kernels of the first step, or refuse what cannot run."""
        resolve_kernels(self.required_ops(), self.policy, self.softmax_scale)
