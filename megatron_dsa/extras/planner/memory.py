"""Peak memory of a rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.planner.chunks import Chunk, Weights
from megatron_dsa.versions import installed_version, why_not_transformer_engine

#: cuBLAS workspaces on Hopper: 32 MiB for each of the forward and backward threads.
LIBRARIES = 2 * 32 * 2**20


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one GPU, without CUDA context, NCCL buffers and fragmentation."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    step: int

    @property
    def peak(self) -> int:
        passing = max(self.activations, self.step)
        return self.weights + self.gradients + self.optimizer + passing + LIBRARIES


def rank_memory(args, chunks: Sequence[Chunk]) -> RankMemory:
    weights = [each for chunk in chunks for each in chunk.weights]
    trained = [each for each in weights if each.trained]
    kept = [chunk.kept for chunk in chunks]
    extra = [max(chunk.forward_peak, chunk.backward_peak) - chunk.kept for chunk in chunks]
    return RankMemory(
        weights=sum(each.count * each.itemsize for each in weights),
        gradients=sum(each.count * gradient_bytes(args, each) for each in trained),
        optimizer=sum(
            each.count * _state_bytes(args, each) // shards(args, each) for each in trained
        ),
        activations=_most_kept(args, kept, extra),
        step=sum(each.count * _step_bytes(args, each) // shards(args, each) for each in trained),
    )


def _most_kept(args, kept: Sequence[int], extra: Sequence[int]) -> int:
    """Return the peak activation bytes; ``extra``: peak above ``kept`` in forward or backward."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    count, chunks = get_num_microbatches(), len(kept)
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    warmup = get_pp_rank_microbatches(count, chunks, group)[2]
    order = [chunk for _, chunk in get_schedule_table(count, chunks, group)]
    forward, backward = iter(order), iter([chunks - 1 - chunk for chunk in order])
    steps = [("forward", next(forward)) for _ in range(warmup)]
    for chunk in forward:
        steps += [("forward", chunk), ("backward", next(backward))]
    steps += [("backward", chunk) for chunk in backward]
    alive = most = 0
    for step, chunk in steps:
        most = max(most, alive + extra[chunk] + (kept[chunk] if step == "forward" else 0))
        alive += kept[chunk] if step == "forward" else -kept[chunk]
    return most


def gradient_bytes(args, weights: Weights) -> int:
    return 4 if args.accumulate_allreduce_grads_in_fp32 else weights.itemsize


def shards(args, weights: Weights) -> int:
    """Return the number of ranks that share these optimizer states."""
    from megatron.core import parallel_state

    if not args.use_distributed_optimizer:
        return 1
    if weights.expert:
        return parallel_state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
    return parallel_state.get_data_parallel_world_size(
        with_context_parallel=True, partial_data_parallel=True
    )


def _state_bytes(args, weights: Weights) -> int:
    if args.use_precision_aware_optimizer:
        main = args.main_params_dtype.itemsize
        if _keeps_main_parameters(args) and main == 4 and args.bf16 and weights.itemsize == 2:
            main = 2  # bf16 weights hold the upper 16 bits
        return main + args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
    moments = 8 if args.optimizer == "adam" else 4 if args.sgd_momentum else 0
    return moments + (4 if weights.itemsize < 4 else 0)


def _keeps_main_parameters(args) -> bool:
    # Either Megatron or transformer-engine's precision-aware Adam holds main parameters.
    if args.main_params_dtype != torch.float32:
        return True
    return args.fp8_recipe in (None, "delayed")


def _step_bytes(args, weights: Weights) -> int:
    # Gradients are cast to fp32; torch's Adam computes all square roots at once.
    copies = 4 if gradient_bytes(args, weights) < 4 else 0
    if args.optimizer != "adam" or _uses_transformer_engine():
        return copies
    return copies + 4


def _uses_transformer_engine() -> bool:
    # Assume that the training machine has the same packages.
    if torch.cuda.is_available():
        return why_not_transformer_engine(has_gpu=True) is None
    return installed_version("transformer-engine") is not None


def refuse_uncounted(args) -> None:
    """Reject optimizers, wrappers and layers whose memory is not counted."""
    for name in (
        "use_megatron_fsdp", "use_torch_fsdp2", "optimizer_cpu_offload", "cpu_offloading",
        "fine_grained_activation_offloading",
    ):  # fmt: skip
        if getattr(args, name, False):
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be planned: --dsa-dry-run counts the memory of "
                "Megatron's DDP and its (distributed) optimizer on the GPU. Drop one of the two"
            )
    if getattr(args, "moe_latent_size", None) is not None:
        raise ConfigError(
            "--moe-latent-size cannot be planned: its projections are transformer-engine's, which "
            "--dsa-dry-run does not build. Drop one of the two"
        )
    if args.optimizer not in ("adam", "sgd"):
        raise ConfigError(
            f"--optimizer must be adam or sgd with --dsa-dry-run, got {args.optimizer}: states of "
            "others are not counted"
        )
