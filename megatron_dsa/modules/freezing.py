"""A frozen main model: only the indexers are trained, and only their losses have a backward.

Autograd would carry a gradient through every frozen layer to reach the losses below it, and keep
what that takes. Here a layer is computed without gradients, and its loss hangs onto its output.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import log_single_rank, make_viewless_tensor

from megatron_dsa.config import is_indexer_parameter, trains_main
from megatron_dsa.modules.indexer_training import TrainsIndexer
from megatron_dsa.numerics.autograd import once_differentiable

logger = logging.getLogger(__name__)


def freeze_for_stage(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Freeze everything but the indexers in a ``warmup`` that asks for it; return the model.

    To be called before the model is wrapped for data parallelism and before the optimizer is
    built (``pre_wrap_hooks`` of Megatron's model configuration), so that neither sees the rest.
    """
    chunk: Any
    module: Any
    for chunk in model:
        if trains_main(chunk.config):
            continue
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_indexer_parameter(name))
        for module in chunk.modules():
            if hasattr(module, "frozen_expert_bias"):
                # Routers move this buffer by themselves, gradients or not.
                module.frozen_expert_bias = True
        chunk.decoder.register_forward_pre_hook(_let_gradients_pass, with_kwargs=True)
        if chunk.config.recompute_granularity == "selective":
            # Parts of a layer that are computed again are woven into its backward.
            log_single_rank(
                logger,
                logging.WARNING,
                "--recompute-granularity selective makes a warmup run the backward of a frozen "
                "model: drop it, without it frozen layers keep no activations",
            )
            continue
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                drop_backward(module)
    return model


def _let_gradients_pass(_decoder, args, kwargs):
    """Make the decoder's input want a gradient.

    A recomputed layer only runs its backward if one of its inputs wants a gradient. Behind a frozen
    embedding none does, and the indexers would silently learn nothing.
    """
    hidden_states = kwargs.get("hidden_states", args[0] if args else None)
    if torch.is_grad_enabled() and hidden_states is not None and hidden_states.is_leaf:
        hidden_states.requires_grad_()
    return args, kwargs


class _Follow(torch.autograd.Function):
    """Identity on a frozen layer's output, whose backward starts that of what stands below.

    The layer's input gets the gradient of its output, or as much of it as fits: the first layer
    with hyper-connections takes one stream and returns several. It is not the right one, and no
    parameter takes anything from it.
    """

    @staticmethod
    def forward(ctx, out, entered, loss):
        ctx.has_loss, ctx.width = loss is not None, entered.shape[-1]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, grad[..., : ctx.width], grad.new_zeros(()) if ctx.has_loss else None


def drop_backward(layer: TransformerLayer) -> None:
    """Compute ``layer`` without gradients from now on; the indexers in it learn as before.

    Args:
        layer: all of its parameters but its indexers' are frozen.
    """
    forward = layer.forward
    cores = [module for module in layer.modules() if isinstance(module, TrainsIndexer)]
    for core in cores:
        core.keeps_loss = True

    @functools.wraps(forward)
    def without_backward(hidden_states, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(hidden_states, *args, **kwargs)
        out, context = forward(hidden_states.detach(), *args, **kwargs)
        losses = [loss for core in cores if (loss := core.take_loss()) is not None]
        out = _Follow.apply(out, hidden_states, sum(losses) if losses else None)
        # Megatron frees what it has sent to the next pipeline stage, and no view can be freed.
        return make_viewless_tensor(out, requires_grad=out.requires_grad, keep_graph=True), context

    layer.forward = without_backward
