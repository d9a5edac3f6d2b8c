"""What a training stage means for parameters: which ones are trained."""

from __future__ import annotations

import torch

from megatron_dsa.config import options_of


def is_indexer_parameter(name: str) -> bool:
    """Whether a parameter (or checkpoint key) belongs to an indexer."""
    return ".indexer." in name


def trains_main(config) -> bool:
    """Whether anything but the indexers is trained."""
    options = options_of(config)
    return options.stage != "warmup" or not options.freeze_main


def freeze_for_stage(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Freeze everything but the indexers in a ``warmup`` that asks for it; return the model.

    To be called before the model is wrapped for data parallelism and before the optimizer is
    built (``pre_wrap_hooks`` of Megatron's model configuration), so that neither sees the rest.
    """
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
