"""Multi-token prediction on residual streams (DeepSeek-V4).

V4 predicts from the previous layer's streams, Megatron from the final norm's output, to which the
main head therefore appends the streams.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.typed_torch import apply_module
from megatron.core.utils import make_viewless_tensor

from megatron_dsa.layers.linears import local_linear
from megatron_dsa.layers.v4.hyper_connections import StreamsHead


class HeadBeforePrediction(StreamsHead):
    """Output head that appends residual streams to the tensor for the next pipeline stage."""

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return ``[(1 + n) * s, b, C]`` for streams ``[s, b, n * C]``."""
        behind = streams.reshape(-1, *streams.shape[1:-1], self.config.hidden_size)
        return torch.cat((super().forward(streams), behind))


@dataclasses.dataclass
class StreamPredictionLayerSubmodules(MultiTokenPredictionLayerSubmodules):
    e_proj: Any = None
    h_proj: Any = None


class StreamPredictionLayer(MultiTokenPredictionLayer):
    """Multi-token-prediction layer on streams.

    Its projections are replicated: sharded ones would gather all streams.
    """

    submodules: StreamPredictionLayerSubmodules

    def __init__(self, config, submodules: StreamPredictionLayerSubmodules, *args, **kwargs):
        super().__init__(config, submodules, *args, **kwargs)
        del self.eh_proj
        size = config.hidden_size
        self.e_proj = local_linear(submodules.e_proj, config, size, size)
        self.h_proj = local_linear(submodules.h_proj, config, size, size)

    def _concat_embeddings(self, hidden_states: torch.Tensor, decoder_input: torch.Tensor):
        """Add the next token's embedding ``[s, b, C]`` to every stream of ``[s, b, n * C]``."""
        embedding, _ = self.e_proj(apply_module(self.enorm)(decoder_input))
        streams = hidden_states.unflatten(-1, (self.config.hc_mult, self.config.hidden_size))
        streams, _ = self.h_proj(apply_module(self.hnorm)(streams))
        return (streams + embedding.unsqueeze(-2)).flatten(-2)

    def _postprocess(self, hidden_states: torch.Tensor) -> Any:
        """Return the output layer's input ``[s, b, C]``, then the next layer's streams."""
        out = apply_module(self.final_layernorm)(hidden_states)
        # Megatron frees sent tensors, which fails for views.
        out = make_viewless_tensor(inp=out, requires_grad=True, keep_graph=True)
        return (out, hidden_states) if self.config.mtp_num_layers > 1 else (out,)


class StreamPredictionBlock(MultiTokenPredictionBlock):
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        padding_mask: torch.Tensor | None = None,
        extra_block_kwargs: dict | None = None,
        **layer_arguments,
    ) -> torch.Tensor:
        """Return the outputs of head and layers, ``[(1 + layers) * s, b, C]``.

        ``hidden_states [(1 + n) * s, b, C]`` come from a :class:`HeadBeforePrediction`.
        """
        count = hidden_states.shape[0] // (1 + self.config.hc_mult)
        main, streams = hidden_states.split((count, count * self.config.hc_mult))
        streams = streams.view(count, *streams.shape[1:-1], -1)
        if self.config.mtp_detach_heads:
            streams = streams.detach()
        outputs = [main]
        for depth in range(self.config.mtp_num_layers):
            layer = self.layers[0 if self.mtp_use_repeated_layer else depth]
            (out, *streams_after), input_ids, position_ids, padding_mask = layer(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=streams,
                padding_mask=padding_mask,
                **layer_arguments,
                **(extra_block_kwargs or {}),
            )
            outputs.append(out)
            if streams_after:
                (streams,) = streams_after
        return torch.cat(outputs)


def on_streams(block: MultiTokenPredictionBlockSubmodules, linear: type) -> ModuleSpec:
    def converted(layer: ModuleSpec) -> ModuleSpec:
        parts = layer.submodules
        submodules = StreamPredictionLayerSubmodules(
            enorm=parts.enorm,
            hnorm=parts.hnorm,
            layer_norm=StreamsHead,
            eh_proj=IdentityOp,
            mtp_model_layer=parts.mtp_model_layer,
            e_proj=linear,
            h_proj=linear,
        )
        return ModuleSpec(module=StreamPredictionLayer, submodules=submodules)

    assert block.layer_specs is not None
    layers = [converted(layer) for layer in block.layer_specs]
    return ModuleSpec(
        module=StreamPredictionBlock, submodules=dataclasses.replace(block, layer_specs=layers)
    )
