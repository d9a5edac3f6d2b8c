"""Parameter freezing per training stage, and skipped backward of a frozen main model.

The indexers' losses need no backward through a frozen model: layers, logits and LM loss run
without grad, and identity functions connect the losses.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import log_single_rank, make_viewless_tensor

from megatron_dsa.config.model import (
    has_adapters,
    is_adapter_parameter,
    is_indexer_parameter,
    trains_main,
)
from megatron_dsa.layers.core import CoreAttention
from megatron_dsa.layers.cuda_graphs import GraphedLayer
from megatron_dsa.ops.common.autograd import once_differentiable

logger = logging.getLogger(__name__)


def freeze_for_stage(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Freeze all parameters that neither stage nor LoRA trains; return the model.

    Call before data-parallel wrapping (Megatron's ``pre_wrap_hooks``).
    """
    for chunk in model:
        if not trains_main(chunk.config):
            _freeze_parameters(chunk)
            _skip_backward(chunk)
        elif has_adapters(chunk.config):
            _freeze_parameters(chunk)
    return model


def _freeze_parameters(chunk: Any) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_trained(chunk.config, name))
    for module in chunk.modules():
        if hasattr(module, "frozen_expert_bias"):
            # Routers update their expert bias even without gradients.
            module.frozen_expert_bias = True
    chunk.decoder.register_forward_pre_hook(_let_gradients_pass, with_kwargs=True)


def _skip_backward(chunk: Any) -> None:
    drop_head_gradient(chunk)
    if chunk.config.recompute_granularity == "selective":
        # Activation recompute needs the layer's backward.
        log_single_rank(
            logger,
            logging.WARNING,
            "--recompute-granularity selective makes a warmup run the backward of a frozen "
            "model: drop it, without it frozen layers keep no activations",
        )
        return
    for module in chunk.modules():
        if isinstance(module, TransformerLayer):
            drop_backward(module)


def is_trained(config: Any, name: str) -> bool:
    if has_adapters(config) and not is_adapter_parameter(name):
        return False
    return trains_main(config) or is_indexer_parameter(name)


def _let_gradients_pass(_decoder, args, kwargs):
    """Make the decoder's input require a gradient.

    Otherwise recomputed layers skip their backward: indexers and adapters silently learn nothing.
    """
    hidden_states = kwargs.get("hidden_states", args[0] if args else None)
    if torch.is_grad_enabled() and hidden_states is not None and hidden_states.is_leaf:
        hidden_states.requires_grad_()
    return args, kwargs


class _Follow(torch.autograd.Function):
    """Identity on a frozen layer's output that also starts the indexer loss's backward.

    The input gets the output's gradient, truncated where hyper-connections widen the output. This
    gradient is wrong, but reaches no parameter.
    """

    @staticmethod
    def forward(ctx, out, source, loss):
        ctx.has_loss, ctx.width = loss is not None, source.shape[-1]
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, grad[..., : ctx.width], grad.new_zeros(()) if ctx.has_loss else None


class _Start(torch.autograd.Function):
    """Identity on ``result`` that gives ``source`` a zero gradient."""

    @staticmethod
    def forward(ctx, result, source):
        ctx.like = source.shape, source.dtype
        return result.data  # the loss overwrites logits, so return no view

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        shape, dtype = ctx.like
        return None, grad.new_zeros((), dtype=dtype).expand(shape)


def drop_head_gradient(model: Any) -> None:
    """Compute logits and LM loss of a frozen ``model`` without grad."""
    if hasattr(model, "output_layer"):
        logits = model.output_layer.forward

        @functools.wraps(logits)
        def logits_alone(hidden_states, *args, **kwargs):
            with torch.no_grad():
                out, bias = logits(hidden_states.detach(), *args, **kwargs)
            return _started(out, hidden_states), bias

        model.output_layer.forward = logits_alone
    if hasattr(model, "compute_language_model_loss"):
        loss = model.compute_language_model_loss

        @functools.wraps(loss)
        def loss_alone(labels, logits):
            with torch.no_grad():
                out = loss(labels, logits.detach())
            return _started(out, logits)

        model.compute_language_model_loss = loss_alone


def _started(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    wants = torch.is_grad_enabled() and source.requires_grad
    return _Start.apply(result, source) if wants else result


def drop_backward(layer: TransformerLayer) -> None:
    """Run a frozen ``layer`` without grad, except its indexers' losses."""
    cores = [module for module in layer.modules() if isinstance(module, CoreAttention)]
    for core in cores:
        core.keeps_loss = True
    graphs = layer.attention_graphs if isinstance(layer, GraphedLayer) else None
    if graphs is None:
        layer.forward = _without_backward(layer.forward, cores)
        return
    # The MLP outside of the CUDA graph also runs without grad.
    graphs.func = _without_backward(graphs.func, cores)
    mlp = layer._forward_mlp
    alone = _without_backward(lambda *args, **kwargs: (mlp(*args, **kwargs), None), [])
    layer._forward_mlp = lambda *args, **kwargs: alone(*args, **kwargs)[0]


def _without_backward(forward: Callable, cores: list[CoreAttention]) -> Callable:
    """Run ``forward(hidden_states, ...) -> (hidden_states, context)`` without grad."""

    @functools.wraps(forward)
    def without_backward(hidden_states, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(hidden_states, *args, **kwargs)
        out, context = forward(hidden_states.detach(), *args, **kwargs)
        losses = [loss for core in cores if (loss := core.take_loss()) is not None]
        out = _Follow.apply(out, hidden_states, sum(losses) if losses else None)
        # Megatron frees sent tensors, which fails for views.
        return make_viewless_tensor(out, requires_grad=out.requires_grad, keep_graph=True), context

    return without_backward
