"""The base of both core attentions: what they are, their indexer, and the operations they call."""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.model import validate
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.indexer_training import TrainsIndexer
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.layers.required_ops import RequiredOp, required_ops
from megatron_dsa.layers.warm_up import resolve_kernels
from megatron_dsa.ops.common.autograd import in_backward
from megatron_dsa.ops.layout.layout import Layout


class CoreAttention(TrainsIndexer, MegatronModule):
    """A core attention that may have an indexer, as ``self_attention.core_attention``.

    Args:
        config: the transformer configuration.
        layer_number: of the layer, from 1.
        attn_mask_type: must be causal.
        softmax_scale: factor on ``q . k``.
        pg_collection: process groups of the model.
        is_mtp: whether it is the attention of a multi-token-prediction layer, which logs behind the
            decoder layers and never shares indices.

    Attributes:
        selecting_layers: numbers of all decoder layers of the model that select.
        selects: this one is among them (layers of multi-token prediction are not).
        selection_source: gives selections in place of the indexer's, while one is attached:
            ``given(core, layout, keys, ranks)`` (:mod:`megatron_dsa.extras.rl.replay`).
        selection_sink: gets the selections, while one is attached: ``put(core, indices, keys)``.

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
        self.selecting_layers = tuple(self.selecting_numbers())
        self.selects = not is_mtp and layer_number in self.selecting_layers
        self.selection_source: Any = None
        self.selection_sink: Any = None
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

    def given_selection(
        self, layout: Layout, keys: Layout, ranks: Ranks
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``indices`` and ``length`` to use in place of the indexer's, if there are any.

        To be called once per forward pass.

        Args:
            layout: of the query tokens.
            keys: the layout that a selection is made with.
            ranks: who shares the microbatch.
        """
        source = self.selection_source
        return None if source is None else source.given(self, layout, keys, ranks)

    def capture_selection(self, indices: torch.Tensor, keys: Layout) -> None:
        """Hand the selection of this forward pass to the sink, if there is one."""
        if self.selection_sink is not None and not in_backward():
            self.selection_sink.put(self, indices, keys)

    def required_ops(self) -> list[RequiredOp]:
        """Return the operations that this layer calls."""
        return required_ops(self.config, self.layer_number, self.is_mtp)

    def resolve_kernels(self) -> None:
        """Choose and compile the kernels of the first step, or refuse what cannot run."""
        resolve_kernels(self.required_ops(), self.policy, self.softmax_scale)
