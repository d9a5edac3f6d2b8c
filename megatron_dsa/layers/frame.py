"""Base class of self-attention layers."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup

from megatron_dsa.errors import require
from megatron_dsa.layers.from_megatron import layout_from_megatron, require_causal_mask
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.ops.layout.layout import Layout


class SelfAttentionFrame:
    """Self-attention whose ``forward`` calls :meth:`attend`, with Megatron's MLA attributes."""

    ranks: Ranks
    config: Any
    training: bool
    linear_proj: Any
    core_attention: Any
    recompute_up_proj: bool
    checkpoint_core_attention: bool

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        inference_context=None,
        packed_seq_params=None,
        **megatron,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``(output, bias)`` for ``hidden_states [s, b, hidden]``, causal per sequence.

        ``attention_mask`` must be ``None`` or causal; ``packed_seq_params`` describe packed
        sequences.

        Raises:
            ConfigError: another mask, or an unsupported argument.
        """
        refused = {"inference_context": inference_context, "key_value_states": key_value_states}
        for name, value in (refused | megatron).items():
            require(
                value is None,
                f"{name} must be None: this attention trains causal self-attention with its own "
                "rope; it does not run inference, cross attention or biased attention. Documents "
                "and padding are described by packed_seq_params",
            )
        self._refuse_shifts_across_ranks(packed_seq_params)
        ranks, sharding, packed = self.ranks, self.ranks.sharding, packed_seq_params is not None
        if ranks.group is not None:
            ranks.count()
        tokens, batch = hidden_states.shape[:2]
        # During CUDA graph capture Megatron passes empty buffers or wrong attention masks.
        if not (is_graph_warmup() or is_graph_capturing()):
            require_causal_mask(attention_mask, tokens * sharding.ranks, sharding, packed)
        layout = layout_from_megatron(
            tokens, batch, hidden_states.device, packed_seq_params, sharding, ranks.query_sharding
        )
        self._recomputed: list[Any] = []
        out = self.attend(hidden_states, layout).reshape(tokens * sharding.sp, batch, -1)
        for checkpoint in self._recomputed:
            checkpoint.discard_output_and_register_recompute(out)
        self._recomputed = []
        return self.linear_proj(out)

    def _refuse_shifts_across_ranks(self, packed_seq_params) -> None:
        sharding = self.ranks.sharding
        require(
            packed_seq_params is None
            or not self.config.mtp_num_layers
            or sharding.cp == 1
            or sharding.cp_layout == "zigzag",
            "--dsa-cp-layout must be zigzag with packed_seq_params, --mtp-num-layers and context "
            f"parallelism, got {sharding.cp_layout}: Megatron shifts tokens from rank to rank as "
            "if every sequence lay in zigzag order. Use zigzag, each sequence padded to a multiple "
            f"of {2 * sharding.cp} tokens",
        )

    def attend(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return attention outputs ``[tokens, ...]`` of local heads."""
        raise NotImplementedError

    def maybe_recomputed(self, up, *tensors) -> Any:
        if not (self.recompute_up_proj and self.training):
            return up(*tensors)
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8 or self.config.fp4)
        self._recomputed.append(checkpoint)
        return checkpoint.checkpoint(up, *tensors)

    def run_core(self, core, *tensors) -> Any:
        if self.checkpoint_core_attention and self.training:
            return tensor_parallel.checkpoint(core, False, *tensors)
        return core(*tensors)

    def delayed_linears(self) -> list[Any]:
        """Return the linears that ``forward`` calls, except the core attention's."""
        raise NotImplementedError

    def backward_dw(self) -> None:
        for linear in self.delayed_linears():
            if linear.weight.requires_grad:
                linear.backward_dw()
        if self.core_attention is not None:
            self.core_attention.backward_dw()
