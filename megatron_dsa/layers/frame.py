"""The frame of both self-attentions: refusals, layout, recompute and the output projection."""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup

from megatron_dsa.errors import require
from megatron_dsa.layers.causal_mask import require_causal_mask
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.layers.precision import dequantised
from megatron_dsa.ops.layout.layout import Layout


class SelfAttentionFrame:
    """The forward pass around :meth:`attend`, which subclasses define.

    They have ``ranks``, ``config``, ``linear_proj``, and what Megatron's MLA has for selective
    recompute: ``recompute_up_proj`` and ``checkpoint_core_attention``.
    """

    ranks: Ranks
    config: Any
    training: bool
    linear_proj: Any
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
        """Return ``(output, bias)`` for ``hidden_states [s, b, hidden]``.

        Attention is causal within each sequence, and packed sequences are described by
        ``packed_seq_params``: ``attention_mask`` may be ``None`` or say the same.

        Raises:
            ConfigError: for another mask, inference contexts, cross attention, biases and
                embeddings passed in.
        """
        refuse_unsupported(inference_context, key_value_states, megatron)
        ranks = self.ranks
        ranks.count()
        rows, batch = hidden_states.shape[:2]
        # Before and in a capture Megatron passes buffers without content, or masks of other tokens.
        if not (is_graph_warmup() or is_graph_capturing()):
            require_causal_mask(
                attention_mask,
                rows * ranks.sharding.ranks,
                ranks.sharding,
                packed_seq_params is not None,
            )
        self._refuse_shifts_across_ranks(packed_seq_params)
        layout = layout_from_megatron(
            rows, batch, hidden_states.device, packed_seq_params, ranks.sharding, ranks.queries
        )
        self._recomputed: list[Any] = []
        out = self.attend(hidden_states, layout).reshape(rows * ranks.sharding.sp, batch, -1)
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
        """Return what enters the output projection, ``[tokens, ...]`` of the local heads."""
        raise NotImplementedError

    def maybe_recomputed(self, up, *tensors) -> Any:
        """Return ``up(*tensors)``, to be computed again in the backward if that is asked for."""
        if not (self.recompute_up_proj and self.training):
            return up(*tensors)
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8 or self.config.fp4)
        self._recomputed.append(checkpoint)
        return checkpoint.checkpoint(up, *tensors)

    def run_core(self, core, *tensors) -> Any:
        """Return ``core(*tensors)``, to be computed again in the backward if that is asked for."""
        if self.checkpoint_core_attention and self.training:
            return tensor_parallel.checkpoint(core, False, *tensors)
        return core(*tensors)


def weight_of(linear: torch.nn.Module) -> torch.Tensor:
    """Return the weight of a linear that is read without calling the module, as a plain tensor.

    Its forward pre-hooks run here: with ``--overlap-param-gather`` one of them waits for the
    weight. Our specs keep such weights in bf16; those of other specs may be quantised
    (``--fp8-param-gather``), and are dequantised once per call. Adapters are added to the weight.
    """
    for hook in linear._forward_pre_hooks.values():
        hook(linear, ())
    module: Any = linear
    weight = dequantised(module.weight)
    with_adapters = getattr(linear, "with_adapters", None)
    return weight if with_adapters is None else with_adapters(weight)


def weight_gradient_by_autograd(linear: torch.nn.Module) -> None:
    """Mark that autograd alone makes the weight gradient of a linear that is never called.

    With ``--delay-wgrad-compute`` transformer-engine marks every parameter of its linears as one
    whose gradient ``backward_dw`` makes: Megatron's data parallelism would wait for that call, and
    leave the gradient out.
    """
    for parameter in linear.parameters():
        if getattr(parameter, _DELAYED, False):
            setattr(parameter, _DELAYED, False)


def delays_weight_gradient(linear: torch.nn.Module) -> bool:
    """Return whether ``backward_dw`` makes the weight gradient of a linear, and autograd none."""
    return any(getattr(parameter, _DELAYED, False) for parameter in linear.parameters())


#: Attribute of parameters that Megatron's data parallelism reads.
_DELAYED = "skip_backward_post_hook"


def refuse_unsupported(inference_context, key_value_states, megatron: dict) -> None:
    """Raise :class:`ConfigError` for arguments of Megatron's attentions that ask for anything else.

    Args:
        megatron: the other keyword arguments of a forward call.
    """
    given = {"inference_context": inference_context, "key_value_states": key_value_states}
    for name, value in (given | megatron).items():
        require(
            value is None,
            f"{name} must be None: this attention trains causal self-attention with its own "
            "rope; it does not run inference, cross attention or biased attention. Documents and "
            "padding are described by packed_seq_params",
        )
