"""Linears, norms and fp32 parameters that Megatron lacks."""

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
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

from megatron_dsa.ops.common.autograd import once_differentiable

#: Parameter attribute with which Megatron's data parallelism waits for ``backward_dw``.
_DELAYED = "skip_backward_post_hook"
_ENGINE = ("megatron.core.extensions.transformer_engine", __name__)


def parameter_device(config: TransformerConfig) -> str | int:
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class LocalNorm:
    """Constructor of torch norms that, unlike Megatron's wrapper, allows sequence parallelism."""

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
    """Draw initial weights from the random state that transformer-engine uses."""
    tracker = get_cuda_rng_tracker()
    if device.type != "cuda" or not tracker.is_initialized():
        return nullcontext()
    return tracker.fork(get_data_parallel_rng_tracker_name())


class ReplicatedLinear(torch.nn.Linear):
    """Replicated linear without bias, with the interface of Megatron's linears."""

    def __init__(self, input_size: int, output_size: int, *, config, init_method, **_ignored):
        device, dtype = parameter_device(config), config.params_dtype
        super().__init__(input_size, output_size, bias=False, device=device, dtype=dtype)
        if config.perform_initialization:
            with replicated_draws(self.weight.device):
                init_method(self.weight)

    def reset_parameters(self) -> None:
        """Draw no weights on a GPU, to keep its random state."""
        if self.weight.device.type != "cuda":
            super().reset_parameters()

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), None

    def backward_dw(self) -> None:
        """Do nothing, since this linear delays no weight gradients."""


def replicated_linear(spec: Any, config: TransformerConfig, inputs: int, outputs: int) -> Any:
    return build_module(
        spec, inputs, outputs, config=config, init_method=config.init_method, bias=False,
        skip_bias_add=False, skip_weight_param_allocation=False, parallel_mode="duplicated",
    )  # fmt: skip


def local_linear(spec: Any, config: TransformerConfig, inputs: int, outputs: int) -> Any:
    """Build a replicated linear for local tokens; tensor-parallel ranks sum its gradient."""
    layer = replicated_linear(spec, config, inputs, outputs)
    layer.weight.sequence_parallel = config.sequence_parallel
    return layer


def new_norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.ones(size, dtype=config.params_dtype, device=parameter_device(config))
    parameter: Any = torch.nn.Parameter(weight)
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def new_parameter(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return a parameter of zeros in fp32 (fp64 for fp64 models)."""
    dtype = torch.promote_types(config.params_dtype, torch.float32)
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype, device=parameter_device(config)))


class Fp32Parameters:
    """Mixin whose ``fp32_parameters`` stay fp32 when Megatron casts the model."""

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

        return super()._apply(cast, recurse)  # type: ignore[misc]


class HeadParameters(Fp32Parameters):
    """Mixin whose ``fp32_parameters`` are divided by heads among tensor-parallel ranks."""

    config: TransformerConfig
    pg_collection: Any

    def new_head_parameter(self, *shape: int) -> torch.nn.Parameter:
        """Return this rank's part, fp32 zeros of the local ``shape``."""
        parameter: Any = new_parameter(self.config, *shape)
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0
        parameter.partition_stride = 1
        return parameter

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None) -> dict[str, Any]:
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        return state | make_sharded_tensors_for_checkpoint(
            {name: getattr(self, name) for name in self.fp32_parameters}, prefix,
            dict.fromkeys(self.fp32_parameters, 0), sharded_offsets,
            tp_group=self.pg_collection.tp, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


@functools.cache
def bf16_linear(linear: Any) -> Any:
    return _without_recipe(linear, override_quantized_autocast=True)


@functools.cache
def bf16_weight_linear(linear: Any) -> Any:
    """Return a linear whose weight stays in bf16 under ``--fp8-param-gather``."""
    return _without_recipe(linear, override_quantized_autocast=False)


def _without_recipe(linear: Any, **settings: bool) -> Any:
    from megatron.core.extensions.transformer_engine import (
        TEQuantizationParams,
        TEQuantizationRecipe,
    )

    class LinearWithoutRecipe(linear):
        te_quant_params: Any

        def finish_init(self, quantization_config) -> None:
            """Set the quantisation recipe before weight creation, unless a file sets one."""
            super().finish_init(quantization_config)
            if self.te_quant_params is None:
                recipe = TEQuantizationRecipe(**settings)
                self.te_quant_params = TEQuantizationParams(recipe, evaluation_recipe=None)

    return LinearWithoutRecipe


def can_read_weight(linear: Any, config: Any) -> bool:
    """Return True if a matrix product with the weight equals calling the linear."""
    if any(getattr(parameter, _DELAYED, False) for parameter in linear.parameters()):
        return False
    if linear._forward_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        return False
    if type(linear) is ReplicatedLinear:
        return True
    return type(linear).__module__ in _ENGINE and uses_plain_weight(linear, config)


def uses_plain_weight(linear: Any, config: Any) -> bool:
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
    """Return the dequantised weight, including adapters, of a linear that is not called.

    Forward pre-hooks run, since one waits for the weight under ``--overlap-param-gather``.
    """
    for hook in linear._forward_pre_hooks.values():
        hook(linear, ())
    module: Any = linear
    weight = dequantised(module.weight)
    with_adapters = getattr(linear, "with_adapters", None)
    return weight if with_adapters is None else with_adapters(weight)


def weight_gradient_by_autograd(linear: torch.nn.Module) -> None:
    """Leave an uncalled linear's weight gradient to autograd.

    With ``--delay-wgrad-compute`` data parallelism would wait for ``backward_dw``.
    """
    for parameter in linear.parameters():
        if getattr(parameter, _DELAYED, False):
            setattr(parameter, _DELAYED, False)


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    return _Dequantise.apply(weight) if is_float8tensor(weight) else weight


class _Dequantise(torch.autograd.Function):
    """Dequantisation with an identity backward, which some transformer-engine releases lack."""

    @staticmethod
    def forward(ctx, weight):
        return weight.dequantize()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad
