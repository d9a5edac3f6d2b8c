"""Descriptions of the calls of a layer, from its configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.ops.dispatch import Operation, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.masked_attention import spec as masked
from megatron_dsa.ops.masked_attention.api import describe_visible_call


@dataclass(frozen=True)
class LayerCalls:
    """Describes the calls of a configuration's layers on a device."""

    config: Any
    device: str

    def of(self, heads: int, qk_dim: int, v_dim: int = 0, **more) -> OpCall:
        """Return a call with ``heads`` heads on a rank, in the dtype of the parameters."""
        dtype = more.pop("dtype", self.config.params_dtype)
        return describe_call(
            self.device, dtype=dtype, heads=heads, qk_dim=qk_dim, v_dim=v_dim, **more
        )

    def indexer(self, topk: int | None = None) -> OpCall:
        """Return a call with the indexer's dims; ``topk``: keys that it selects."""
        config = self.config
        return self.of(
            config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, topk=topk,
            relu=config.dsa_indexer_scoring_relu,
        )  # fmt: skip

    def masked_attention(self, topk: int | None = None) -> OpCall:
        """Return masked dense attention's call; ``topk``: keys that are selected, if they are."""
        config = self.config
        key = config.qk_head_dim + config.qk_pos_emb_head_dim
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        return self.of(
            heads, key, config.v_head_dim, rope_dim=config.qk_pos_emb_head_dim, topk=topk
        )

    def visible_attention(self) -> Iterator[tuple[Operation, OpCall]]:
        """Yield what masked dense attention to all visible keys calls."""
        yield masked.VISIBLE_BITS, describe_visible_call(self.device)
        for operation in (masked.FORWARD, masked.BACKWARD):
            yield operation, self.masked_attention()


def calls_of(config: Any, device: str | None = None) -> LayerCalls:
    """Return the calls of a configuration's layers.

    Args:
        config, device: see :func:`.layers.required_ops.required_ops`.
    """
    return LayerCalls(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))
