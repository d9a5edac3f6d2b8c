"""Transformer layers that share one selection of keys."""

from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup

from megatron_dsa.config.hybrid import has_pattern
from megatron_dsa.config.model import ends_group
from megatron_dsa.layers.cuda_graphs import GraphedLayer
from megatron_dsa.layers.dsa_core import TopKIndices
from megatron_dsa.layers.v4.hyper_connections import HyperConnections


class IndexSharingLayer(GraphedLayer):
    """Transformer layer that passes its selection to the next layer as ``context``.

    Recompute saves ``context``, Megatron's argument for cross attention. Megatron drops it with
    ``--overlap-moe-expert-parallel-comm``, in captures by ``--cuda-graph-impl transformer_engine``
    and in hybrid stacks without full recompute; there a class attribute holds the selection.
    """

    _waiting: torch.Tensor | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.self_attention.hands_on_selection = True

    def _forward_attention(self, hidden_states, *args, context=None, **kwargs):
        attention, dropped = self.self_attention, self._context_is_dropped()
        selects = attention.core_attention.computes_topk
        if dropped and not selects:
            context = IndexSharingLayer._waiting
        if context is not None and is_graph_warmup():
            context = torch.zeros_like(context)  # the selection's CUDA graph has not run
        attention.shared_selection = None if context is None else TopKIndices.unpack(context)
        try:
            hidden_states, _ = super()._forward_attention(hidden_states, *args, **kwargs)
            selection = attention.used_selection
        finally:
            attention.shared_selection = attention.used_selection = None
        if selects:
            context = None if selection is None else selection.pack()
        elif context is not None:
            # CUDA graphs need an output object other than the input.
            connected = context.requires_grad and torch.is_grad_enabled()
            context = context.view_as(context) if connected else context.detach()
        if dropped:
            ends = ends_group(self.config, self.layer_number)
            IndexSharingLayer._waiting = None if ends else context
            context = None
        return hidden_states, context

    def _context_is_dropped(self) -> bool:
        config: Any = self.config
        if config.overlap_moe_expert_parallel_comm:
            return True
        if has_pattern(config):
            return not (config.recompute_granularity == "full" and self.training)
        return config.cuda_graph_impl == "transformer_engine" and is_graph_capturing()


class IndexSharingHyperConnectionLayer(HyperConnections, IndexSharingLayer):
    """Index-sharing transformer layer with hyper-connections."""
