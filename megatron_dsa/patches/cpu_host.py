"""Shims that run Megatron's training loop without a GPU, over gloo.

They redirect ``device="cuda"`` to the CPU. CUDA is never reported as available.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from megatron_dsa.errors import DSAError
from megatron_dsa.versions import require_supported_megatron, why_not_transformer_engine

#: Flags that turn off features unsupported or slow on the CPU.
FLAGS = [
    "--distributed-backend", "gloo", "--use-cpu-initialization", "--no-bias-dropout-fusion",
    "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--num-workers", "0",
]  # fmt: skip

_CPU = torch.device("cpu")


def needed() -> bool:
    return not torch.cuda.is_available()


def activate() -> None:
    """Install the CPU shims for this thread, which must also build and train the model.

    Raises:
        VersionError: the megatron-core version is not supported.
        DSAError: called inside of the planner's ``host()``.
    """
    require_supported_megatron()
    _install()


@functools.cache
def _install() -> None:
    # The planner's ``host()`` would pop this function mode.
    if any(isinstance(mode, CudaTo) for mode in _get_current_function_mode_stack()):
        raise DSAError(
            "activate() must not be called first inside of planning.host.host(), which sends CUDA "
            "elsewhere for a while only: call it before"
        )
    hide_transformer_engine()
    CudaTo(_CPU).__enter__()
    _patch_torch_cuda()
    _patch_rng()
    _patch_megatron()


def hide_transformer_engine() -> None:
    """Make transformer-engine look uninstalled unless it is already imported."""
    if "transformer_engine.pytorch" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    for name in list(modules):
        if name.startswith("transformer_engine."):
            del modules[name]
    modules["transformer_engine"] = None
    modules["transformer_engine_torch"] = None


def hide_unusable_transformer_engine() -> None:
    """Hide transformer-engine if it needs a missing GPU or fails to import.

    Megatron's imports handle only ``ImportError``.
    """
    if why_not_transformer_engine(has_gpu=not needed()) is not None:
        hide_transformer_engine()


_LOOKED_AT = frozenset(
    {torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.to, torch.Tensor.type}
)


class CudaTo(TorchFunctionMode):
    """torch function mode that redirects CUDA devices to the CPU."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in _LOOKED_AT:
            return func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.distributed.all_to_all_single:
            # Megatron converts split sizes only when copying from a GPU.
            for name in ("output_split_sizes", "input_split_sizes"):
                if isinstance(kwargs.get(name), torch.Tensor):
                    kwargs[name] = kwargs[name].tolist()
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers compare the type with 'torch.cuda.FloatTensor'.
            name = func(*args)
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = self.device
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to:
            args = tuple(self.device if _is_cuda(a) else a for a in args)
        return func(*args, **kwargs)


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class NoStream:
    """CUDA stream or event that does nothing, since CPU work runs in order."""

    def __init__(self, *_args, **_kwargs):
        pass

    def wait(self, _other=None) -> None:
        """Return at once, since CPU work runs in order."""

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self) -> NoStream:
        return self


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.current_stream = lambda *_args, **_kwargs: NoStream()
    cuda.Stream = NoStream
    cuda.Event = NoStream
    tensor: Any = torch.Tensor
    # torch's C++ method requires a CUDA stream.
    tensor.record_stream = lambda _tensor, _stream: None
    cuda.stream = lambda _stream: contextlib.nullcontext()


def _patch_rng() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*_args, **_kwargs):
        return torch.get_rng_state()

    def set_state(state, *_args, **_kwargs):
        torch.set_rng_state(state)

    cuda: Any = torch.cuda
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = get_state
    cuda.set_rng_state = set_state
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _patch_megatron() -> None:
    from megatron.training import arguments, initialize, training

    # Megatron prints no warnings for compute capability 10.
    arguments.get_device_arch_version = lambda: 10
    # Megatron's warm-up of fused kernels would change the random state.
    training.set_jit_fusion_options = lambda *_args, **_kwargs: None
    # torch.compile would need a compiler.
    torch.compiler.set_stance("force_eager")

    initialize_megatron = initialize.initialize_megatron

    def initialize_on_cpu(*args, **kwargs):
        # Megatron must count one device per process.
        with (
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
            mock.patch.object(torch.cuda, "set_device", lambda _device: None),
        ):
            return initialize_megatron(*args, **kwargs | {"allow_no_cuda": True})

    training.initialize_megatron = initialize_on_cpu

    build_iterators = training.build_train_valid_test_data_iterators

    def build_iterators_apart(*args, **kwargs):
        # Samplers' seeds must not change the random state of dropout.
        with torch.random.fork_rng(devices=[]):
            return build_iterators(*args, **kwargs)

    training.build_train_valid_test_data_iterators = build_iterators_apart
