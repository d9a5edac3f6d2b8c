"""Linears, norms and fp32 parameters that Megatron's layer sets lack, and reading of weights."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dsa.ops.common.autograd import once_differentiable

#: Attribute of parameters that Megatron's data parallelism reads.
_DELAYED = "skip_backward_post_hook"
#: Modules with the linears of transformer-engine: Megatron's, and ours made of them.
_ENGINE = ("megatron.core.extensions.transformer_engine", __name__)


def parameter_device(config: TransformerConfig) -> str | int:
    """Return where Megatron puts parameters."""
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class LocalNorm:
    """Builds torch's RMSNorm or LayerNorm, usable under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism, which takes only the mark that makes
    Megatron sum gradients over tensor-parallel ranks.
    """

    def __new__(cls, *, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_ignored):
        norm_class = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[
            config.normalization
        ]
        norm = norm_class(
            hidden_size, eps=eps, dtype=config.params_dtype, device=parameter_device(config)
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def replicated_draws(device: torch.device) -> AbstractContextManager:
    """Draw for ``device`` from Megatron's random state for replicated weights.

    Transformer-engine's replicated linears draw from it: with one seed, layers of either kind
    start from the same weights. A CPU has one random state for everything.
    """
    tracker = get_cuda_rng_tracker()
    if device.type != "cuda" or not tracker.is_initialized():
        return nullcontext()
    return tracker.fork(get_data_parallel_rng_tracker_name())


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer without bias that every tensor-parallel rank holds in full.

    Takes the arguments of Megatron's linears and returns ``(output, None)`` like them.
    """

    def __init__(self, input_size: int, output_size: int, *, config, init_method, **_ignored):
        device, dtype = parameter_device(config), config.params_dtype
        super().__init__(input_size, output_size, bias=False, device=device, dtype=dtype)
        if config.perform_initialization:
            with replicated_draws(self.weight.device):
                init_method(self.weight)

    def reset_parameters(self) -> None:
        """Draw nothing on a GPU: torch's own start would take numbers that other modules draw."""
        if self.weight.device.type != "cuda":
            super().reset_parameters()

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``(x @ weight.T, None)``."""
        return super().forward(x), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""


def replicated_linear(spec: Any, config: TransformerConfig, inputs: int, outputs: int) -> Any:
    """Build a linear of ``spec`` without bias that every tensor-parallel rank holds in full."""
    return build_module(
        spec, inputs, outputs, config=config, init_method=config.init_method, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False, parallel_mode="duplicated",
    )  # fmt: skip


def local_linear(spec: Any, config: TransformerConfig, inputs: int, outputs: int) -> Any:
    """Build a replicated linear for local tokens: its gradient is summed over TP ranks."""
    layer = replicated_linear(spec, config, inputs, outputs)
    layer.weight.sequence_parallel = config.sequence_parallel
    return layer


def new_norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """Return the weight of an RMSNorm, ones, marked as :class:`LocalNorm` marks its own."""
    weight = torch.ones(size, dtype=config.params_dtype, device=parameter_device(config))
    parameter: Any = torch.nn.Parameter(weight)
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def new_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return a parameter of zeros in fp32 (fp64 if the model is), where Megatron puts its own."""
    dtype = torch.promote_types(config.params_dtype, torch.float32)
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype, device=parameter_device(config)))


class Fp32Parameters:
    """Mixin for modules whose ``fp32_parameters`` keep their precision.

    Megatron casts whole models (``Float16Module``). Its data parallelism, optimizers and
    checkpoints handle a mix of dtypes; only the cast must skip these parameters.
    """

    fp32_parameters: tuple[str, ...] = ()
    _parameters: dict[str, torch.nn.Parameter | None]

    def _apply(self, fn, recurse: bool = True):
        kept = [self._parameters[name] for name in self.fp32_parameters]

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            mine = any(tensor is p or tensor is p.grad for p in kept if p is not None)
            if mine and out.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=out.device)
            return out

        return super()._apply(cast, recurse)  # type: ignore[misc]  # of the module


@functools.cache
def bf16_linear(linear: Any) -> Any:
    """Return a subclass of a transformer-engine linear whose weight and products stay in bf16.

    ``--te-precision-config-file`` makes this choice for single linears in a file.
    """
    return _without_recipe(linear, override_quantized_autocast=True)


@functools.cache
def bf16_weight_linear(linear: Any) -> Any:
    """Return a subclass whose weight stays in bf16 under ``--fp8-param-gather``.

    Its products are quantised like others.
    """
    return _without_recipe(linear, override_quantized_autocast=False)


def _without_recipe(linear: Any, **settings: bool) -> Any:
    from megatron.core.extensions.transformer_engine import (
        TEQuantizationParams,
        TEQuantizationRecipe,
    )

    class LinearWithoutRecipe(linear):
        te_quant_params: Any

        def finish_init(self, quantization_config) -> None:
            """Called before the weight is made; a file that names this layer goes first."""
            super().finish_init(quantization_config)
            if self.te_quant_params is None:
                recipe = TEQuantizationRecipe(**settings)
                self.te_quant_params = TEQuantizationParams(recipe, evaluation_recipe=None)

    return LinearWithoutRecipe


def can_read_weight(linear: Any, config: Any) -> bool:
    """Return True if products with a replicated linear's weight equal calls of the linear.

    A linear in FP8, one with hooks, one of another class, or one that delays its weight gradient
    has to be called.
    """
    if any(getattr(parameter, _DELAYED, False) for parameter in linear.parameters()):
        return False
    if linear._forward_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return False
    if type(linear) is ReplicatedLinear:
        return True
    return type(linear).__module__ in _ENGINE and uses_plain_weight(linear, config)


def uses_plain_weight(linear: Any, config: Any) -> bool:
    """Return True if transformer-engine never quantises the products of a linear."""
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


def weight_of(linear: torch.nn.Module) -> torch.Tensor:
    """Return the weight of a linear that is not called, as a plain tensor.

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
    """Mark that autograd computes the weight gradient of a linear that is never called.

    With ``--delay-wgrad-compute`` transformer-engine marks every parameter of its linears as one
    whose gradient ``backward_dw`` makes: Megatron's data parallelism would wait for that call, and
    leave the gradient out.
    """
    for parameter in linear.parameters():
        if getattr(parameter, _DELAYED, False):
            setattr(parameter, _DELAYED, False)


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
