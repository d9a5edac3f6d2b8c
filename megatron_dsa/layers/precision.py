"""Linears of transformer-engine that FP8 leaves in bf16: all of one, or its weight alone.

Megatron lets a file (``--te-precision-config-file``) choose the precision of single linears. These
classes make the same choice in code, for weights at initialisation and for products.
"""

import functools
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor

from megatron_dsa.ops.common.autograd import once_differentiable


@functools.cache
def bf16_linear(linear: Any) -> Any:
    """Return a subclass of a linear of Megatron's whose weight and products stay in bf16.

    Args:
        linear: a class of ``megatron.core.extensions.transformer_engine``.
    """
    return _without_recipe(linear, override_quantized_autocast=True)


@functools.cache
def bf16_weight_linear(linear: Any) -> Any:
    """Return a subclass whose weight stays in bf16 under ``--fp8-param-gather``.

    Its products are quantised like others: only what reads the weight gets bf16.

    Args:
        linear: as of :func:`bf16_linear`.
    """
    return _without_recipe(linear, override_quantized_autocast=False)


def _without_recipe(linear: Any, **settings: bool) -> Any:
    from megatron.core.extensions.transformer_engine import (
        TEQuantizationParams,
        TEQuantizationRecipe,
    )

    class LinearWithoutRecipe(linear):
        """Linear whose own recipe is none."""

        te_quant_params: Any

        def finish_init(self, quantization_config) -> None:
            """Called before the weight is made; a file that names this layer goes first."""
            super().finish_init(quantization_config)
            if self.te_quant_params is None:
                recipe = TEQuantizationRecipe(**settings)
                self.te_quant_params = TEQuantizationParams(recipe, evaluation_recipe=None)

    return LinearWithoutRecipe


def multiplies_plainly(linear: Any, config: Any) -> bool:
    """Whether a linear of Megatron's multiplies by its weight as it is, in every step.

    Args:
        linear: of a class of ``megatron.core.extensions.transformer_engine``, or made of one here.
        config: the transformer configuration.
    """
    quantised, params = bool(config.fp8 or config.fp4), linear.te_quant_params
    if params is None:
        return not quantised
    recipe = params.training_recipe
    overrides = (
        recipe.override_quantized_autocast if quantised else recipe.override_nonquantized_autocast
    )
    if not overrides:
        return not quantised
    return recipe.fp8_quantization_recipe is None and recipe.fp4_quantization_recipe is None


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as a plain tensor; the gradient of a quantised one goes to it unchanged."""
    return _Dequantise.apply(weight) if is_float8tensor(weight) else weight


class _Dequantise(torch.autograd.Function):
    """Some releases of transformer-engine dequantise weights in blocks without a gradient."""

    @staticmethod
    def forward(ctx, weight):
        return weight.dequantize()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad
