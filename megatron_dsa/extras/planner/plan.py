"""Plan of a job, for which every pipeline rank is built, checked and measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from megatron_dsa import specs
from megatron_dsa.config.attention_choice import AttentionChoice, attention_of
from megatron_dsa.config.gpus import GPU
from megatron_dsa.config.model import options_of
from megatron_dsa.extras.planner.chunks import Chunk, measure_rank
from megatron_dsa.extras.planner.host import ranks
from megatron_dsa.extras.planner.memory import (
    RankMemory,
    gradient_bytes,
    rank_memory,
    refuse_uncounted,
)
from megatron_dsa.metrics.flops import flops_by_part, model_work
from megatron_dsa.patches.unfused_linears import require_kernel_of_deferred_gradients
from megatron_dsa.training.model import padded_vocabulary


@dataclass(frozen=True)
class Stage:
    """One pipeline rank; ``received`` in bytes per iteration and group."""

    chunks: tuple[Chunk, ...]
    memory: RankMemory
    received: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """The plan of a job.

    Attributes:
        microbatches: per iteration and data-parallel rank.
        operations: FLOPs of a sequence (docs/guide/throughput.md).
        remarks: differences from the run or from ``--dsa-model``.
    """

    args: Any
    config: Any
    gpu: GPU
    stages: tuple[Stage, ...]
    microbatches: int
    operations: dict[str, int]
    attention: AttentionChoice
    remarks: tuple[str, ...]


def make_plan(args, model, gpu: GPU) -> Plan:
    """Build and measure every pipeline rank; raise the errors of start-up."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    refuse_uncounted(args)
    specs.get_backend(model.transformer.transformer_impl)
    if model.transformer.transformer_impl != "local":
        require_kernel_of_deferred_gradients(model.transformer)
    vocabulary = padded_vocabulary(model)
    work = model_work(model.transformer, vocabulary)
    operations = flops_by_part(work, lambda keys: keys.pairs(args.seq_length))
    stages = []
    with _for_planning(model.transformer) as remarks:
        for pp_rank in range(args.pipeline_model_parallel_size):
            first = pp_rank * (args.world_size // args.pipeline_model_parallel_size)
            with ranks(args, first) as groups, _naming_rank(args, pp_rank):
                chunks = measure_rank(args, model, groups)
                memory = rank_memory(args, chunks)
                stages.append(Stage(tuple(chunks), memory, _received(args, chunks)))
    return Plan(
        args, model.transformer, gpu, tuple(stages), get_num_microbatches(), operations,
        attention_of(model.transformer), (*args.dsa_model_changes, *remarks),
    )  # fmt: skip


@contextmanager
def _naming_rank(args, pp_rank: int):
    try:
        yield
    except Exception as error:
        if args.pipeline_model_parallel_size > 1:
            error.add_note(f"(pipeline rank {pp_rank})")
        raise


@contextmanager
def _for_planning(config) -> Iterator[list[str]]:
    """Change ``config`` to run without values or a GPU; yield remarks on the changes."""
    from megatron.core.transformer.moe import moe_utils

    changes: dict[str, Any] = {"perform_initialization": False}
    remarks = []
    if config.cuda_graph_impl != "none":
        changes["cuda_graph_impl"] = "none"
        remarks.append(
            "memory is that of an uncaptured step; CUDA graphs keep the memory of their parts"
        )
    if config.transformer_impl != "local":
        changes |= _as_local_layers(config)
        remarks.append(
            "memory is that of Megatron's local layers; transformer-engine's keep other copies"
        )
        if changes.get("recompute_modules", config.recompute_modules) != config.recompute_modules:
            remarks.append("--recompute-modules layernorm is not counted: norms are kept")
    if config.fp8 or config.fp4:
        in_bf16 = replace(options_of(config), fp8_indexer=False)
        changes |= {"fp8": None, "fp4": None, "fp8_param": False, "dsa": in_bf16}
        changes["moe_router_padding_for_quantization"] = False
        remarks.append("FP8 and FP4 are planned as bf16")
    if config.num_moe_experts is not None:
        changes |= {"moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": False}
        if moe_utils.fused_topk_with_score_function is not None:
            changes["moe_router_fusion"] = False  # transformer-engine needs a GPU
        if config.moe_token_dispatcher_type != "alltoall":
            remarks.append(
                f"token dispatcher {config.moe_token_dispatcher_type} planned as alltoall"
            )
        if not config.moe_pad_expert_input_to_capacity:
            # Assume equal tokens per expert for static shapes.
            changes |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
            remarks.append("experts are taken to get equally many tokens")
    with (
        mock.patch.multiple(config, **changes),
        # Skip the training loop's log and FLOP count.
        mock.patch.object(specs, "install"),
    ):
        yield remarks


def _as_local_layers(config) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "defer_embedding_wgrad_compute": False,
        "layernorm_zero_centered_gamma": False,
        "quant_recipe": None,
    }
    if "layernorm" in (config.recompute_modules or ()):
        kept = [name for name in config.recompute_modules if name != "layernorm"]
        changes["recompute_modules"] = kept
    return changes


def _received(args, chunks) -> dict[str, int]:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    count = get_num_microbatches()
    total: dict[str, int] = {}
    for chunk in chunks:
        for name, size in chunk.received.items():
            total[name] = total.get(name, 0) + count * size
    reduced = _data_parallel(args, chunks)
    if reduced:
        total["data"] = total.get("data", 0) + reduced
    return total


def _data_parallel(args, chunks) -> int:
    from megatron.core import parallel_state

    total = 0.0
    for weights in (each for chunk in chunks for each in chunk.weights):
        if not weights.trained:
            continue
        if weights.expert:
            size = parallel_state.get_expert_data_parallel_world_size()
        else:
            size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        gradient = gradient_bytes(args, weights)
        gathered = weights.itemsize if args.use_distributed_optimizer else gradient
        total += (size - 1) / size * weights.count * (gradient + gathered)
    return round(total)
