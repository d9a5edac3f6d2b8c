"""Emulation of a job's ranks on one machine, without a GPU or real process groups."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from megatron_dsa.config.gpus import planned_processors
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.ops.dispatch import meta_dispatch
from megatron_dsa.ops.meta import differentiable, empty_sums
from megatron_dsa.patches.cpu_host import CudaTo, NoStream

META = torch.device("meta")


@contextlib.contextmanager
def host(capability: tuple[int, int] | None, device: torch.device = META) -> Iterator[None]:
    """Emulate a GPU of ``capability``, or a CPU if ``None``."""
    cuda = mock.patch.multiple(torch.cuda, **_cuda(capability, device))
    patches = [cuda, *_state_of_the_process()]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if device == META:
            stack.enter_context(meta_dispatch(capability))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context((CudaTo if capability is None else _AsOnGPU)(device))
        yield


def _cuda(capability: tuple[int, int] | None, device: torch.device) -> dict[str, Any]:
    properties = SimpleNamespace(
        major=(capability or (10,))[0],
        multi_processor_count=0 if capability is None else planned_processors(capability),
        L2_cache_size=50 * 2**20,  # memory does not depend on the cache size
    )
    streams = dict.fromkeys(("Stream", "Event"), NoStream)
    ignored = dict.fromkeys(("synchronize", "set_device", "manual_seed", "set_rng_state"), _nothing)
    return streams | ignored | {
        "current_device": lambda: device,
        "get_device_capability": lambda *_args: capability or (0, 0),
        "get_device_properties": lambda *_args: properties,
        "current_stream": lambda *_args, **_kwargs: NoStream(),
        "stream": lambda _stream: contextlib.nullcontext(),
        "get_rng_state": _random_state,
    }  # fmt: skip


def _nothing(*_args, **_kwargs) -> None:
    return None


def _random_state(*_args, **_kwargs) -> torch.Tensor:
    return torch.get_rng_state()  # meta tensors draw no random numbers


def _state_of_the_process() -> Iterator[Any]:
    """Yield patches that isolate the planned model's state."""
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_logging, moe_utils
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    yield mock.patch.multiple(
        megatron_random,
        _get_cuda_rng_state=_random_state,
        _set_cuda_rng_state=_nothing,
        _CUDA_RNG_STATE_TRACKER=megatron_random._CUDA_RNG_STATE_TRACKER,
        _CUDA_RNG_STATE_TRACKER_INITIALIZED=False,
    )
    scale = "main_loss_backward_scale"
    for owner, name, value in (
        (moe_utils, "te_general_gemm", None),  # transformer-engine's router needs a GPU
        (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None),
        (IndexerLog._state, "sums", None),
        (moe_logging, "_MOE_METRICS_TRACKER", None),
        (MTPLossLoggingHelper, "tracker", {}),
        # Schedules store device tensors in these classes.
        (MoEAuxLossAutoScaler, scale, None),
        (MTPLossAutoScaler, scale, torch.tensor(1.0)),
    ):
        yield mock.patch.object(owner, name, value)


class _AsOnGPU(CudaTo):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (functional.rms_norm, torch.rms_norm):
            return _fused_rms_norm(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _fused_rms_norm(x, _shape, weight=None, eps=None) -> torch.Tensor:
    """Fused RMSNorm on the meta device: keeps its input and one number per token."""

    def forward(x, weight):
        return (torch.empty_like(x),), (x, weight, empty_sums(x, *x.shape[:-1], 1))

    def backward(x, weight, _rstd):
        return torch.empty_like(x), torch.empty_like(weight)

    return differentiable((x, weight), forward, backward)


@contextlib.contextmanager
def ranks(args, rank: int) -> Iterator:
    """Emulate one rank, with pipeline ranks outermost; yield Megatron's groups."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = torch.distributed.new_group

    def local_group(ranks=None, *_args, **_kwargs):
        if ranks is not None and rank not in ranks:
            return torch.distributed.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, backend="fake")

    def one_by_one(operations) -> list:
        return [each.op(each.tensor, each.peer, each.group) for each in operations]

    torch.distributed.init_process_group(
        "fake", rank=rank, world_size=args.world_size, store=FakeStore()
    )
    try:
        with mock.patch.object(torch.distributed, "new_group", local_group):
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        # Batched transfers need the device's backend.
        with mock.patch.object(torch.distributed, "batch_isend_irecv", one_by_one):
            yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
