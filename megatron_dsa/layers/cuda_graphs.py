"""Transformer layers in CUDA graphs."""

from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.cuda_graphs import CudaGraphManager
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dsa.config.rules.cuda_graphs import graph_modules, graphs_attention
from megatron_dsa.metrics.tags import CALLS, FIGURES, SAMPLED
from megatron_dsa.patches import install


class GraphedLayer(TransformerLayer):
    """Transformer layer that ``--cuda-graph-impl local`` may capture without its MLP.

    Megatron captures whole layers, which fails with experts. Evaluation runs uncaptured, since a
    graph would record its loss as a training loss.
    """

    _forward_attention: Any

    @property
    def attention_graphs(self) -> Any:
        return self._modules.get("attention_graph_manager")

    def create_mcore_cudagraph_manager(self, config) -> None:
        install("graph buffers")
        if not graph_modules(config):
            super().create_mcore_cudagraph_manager(config)
            return
        self.attention_graph_manager = CudaGraphManager(config, self, "_forward_attention")
        graphed = self._forward_attention

        def attention(*args, **kwargs):
            return graphed(*args, eager=not self.training, **kwargs)

        self._forward_attention = attention

    def _should_call_local_cudagraph(self, *args, **kwargs) -> bool:
        return self.training and super()._should_call_local_cudagraph(*args, **kwargs)


def describe_graphs(config: Any) -> Iterator[str]:
    impl = config.cuda_graph_impl
    if impl == "none":
        return
    parts = "the forward and backward passes of an iteration"
    if impl != "full_iteration":
        parts = ", ".join(sorted(graph_modules(config))) or "whole layers"
    yield f"CUDA graphs ({impl}) hold {parts}; the first steps run uncaptured"
    left_out = [f"tags {CALLS}*"]
    if graphs_attention(config):
        left_out += [FIGURES[name] for name in SAMPLED]
    yield f"not measured in CUDA graphs, left out of the log: {', '.join(left_out)}"
