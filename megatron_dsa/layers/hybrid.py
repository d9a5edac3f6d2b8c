"""Stack and attention layer of hybrid models."""

import dataclasses
import re
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_dsa.config.hybrid import has_pattern, predictions_of
from megatron_dsa.config.model import shares_indices
from megatron_dsa.errors import require
from megatron_dsa.layers.index_sharing import IndexSharingLayer
from megatron_dsa.patches import install_for_model


class DSAHybridStack(HybridStack):
    """Megatron's hybrid stack whose final norm is ``norm``."""

    def __init__(
        self,
        config,
        submodules: HybridStackSubmodules,
        *,
        norm: Any,
        post_layer_norm: bool = True,
        **megatron,
    ):
        install_for_model(config)  # hybrid specs have no configuration
        super().__init__(config, submodules, post_layer_norm=False, **megatron)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


class HybridAttentionLayer(IndexSharingLayer):
    """Attention layer, letter ``D``, of hybrid stacks and multi-token prediction."""

    def __init__(
        self,
        config,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        *,
        is_mtp_layer: bool = False,
        name: str | None = None,
        **megatron,
    ):
        require(
            not shares_indices(config) or has_pattern(config),
            "layer_pattern must be given to a configuration with --dsa-indexer-topk-freq above 1: "
            "which attention selects depends on the layers between",
        )
        if is_mtp_layer:
            submodules = _of_prediction(submodules)
        megatron |= {"is_mtp_layer": is_mtp_layer, "name": name}
        super().__init__(config, submodules, layer_number, **megatron)
        if has_pattern(config) and (depth := re.match(r"mtp\.layers\.(\d+)\.", name or "")):
            # Megatron restarts layer numbers at 1 in each prediction depth.
            before = predictions_of(config.layer_pattern)[: int(depth[1]) - 1]
            self.self_attention.core_attention.layer_index += len("".join(before))
        self.self_attention.hands_on_selection = shares_indices(config) and not is_mtp_layer


def _of_prediction(submodules: Any) -> TransformerLayerSubmodules:
    attention = submodules.self_attention
    core = attention.submodules.core_attention
    core = dataclasses.replace(core, params=core.params | {"is_mtp": True})
    parts = dataclasses.replace(attention.submodules, core_attention=core)
    attention = dataclasses.replace(attention, submodules=parts)
    return dataclasses.replace(submodules, self_attention=attention)
