"""Small modules that Megatron's local (transformer-engine-free) layer set lacks, and fp32
parameters.

With transformer-engine its own classes are used instead, see ``specs.py``.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def parameter_device(config: TransformerConfig) -> str | int:
    """Return where Megatron puts parameters."""
    if config.init_model_with_meta_device:
        return "meta"
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


class LocalNorm:
    """Builds torch's RMSNorm or LayerNorm, usable under sequence parallelism.

    Megatron's own wrapper refuses sequence parallelism. All it takes is the mark on the parameters
    that makes Megatron sum their gradients over tensor-parallel ranks.
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
    """Draw for ``device`` from Megatron's random state for what all tensor-parallel ranks hold.

    Transformer-engine's replicated linears draw from it: with one seed, layers of either kind
    start from the same weights. A CPU has one random state for everything.
    """
    tracker = get_cuda_rng_tracker()
    if device.type != "cuda" or not tracker.is_initialized():
        return nullcontext()
    return tracker.fork(get_data_parallel_rng_tracker_name())


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer without bias that every tensor-parallel rank holds in full.

    Takes the arguments of Megatron's linears and returns ``(output, None)`` like them. Its weight
    is drawn in :func:`replicated_draws`.
    """

    def __init__(self, input_size: int, output_size: int, *, config, init_method, **_ignored):
        super().__init__(
            input_size,
            output_size,
            bias=False,
            device=parameter_device(config),
            dtype=config.params_dtype,
        )
        if config.perform_initialization:
            with replicated_draws(self.weight.device):
                init_method(self.weight)

    def reset_parameters(self) -> None:
        """Draw nothing on a GPU: torch's own start would take numbers that other modules draw."""
        if self.weight.device.type != "cuda":
            super().reset_parameters()

    def forward(self, x: torch.Tensor) -> Any:  # Megatron's linears return a bias as well
        """Return ``(x @ weight.T, None)``."""
        return super().forward(x), None

    def backward_dw(self) -> None:
        """Weight gradients are never delayed here, so there is nothing left to do."""


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
    checkpoints handle a mix of dtypes; only the cast has to leave these parameters alone.
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
