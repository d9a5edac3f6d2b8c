"""Text of a plan."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch

from megatron_dsa.config.model import has_indexers, indexer_is_trained, options_of
from megatron_dsa.extras.planner.chunks import Layer
from megatron_dsa.extras.planner.plan import Plan
from megatron_dsa.metrics.throughput import peak_tflops, shares
from megatron_dsa.ops.dispatch import Choice
from megatron_dsa.versions import OPTIONAL_PACKAGES, optional_version

_GIB, _MIB = 2**30, 2**20
_EXCHANGED = {"dense": "keys", "dense_latents": "latents"}
_TP_MODES = {
    "heads": "attention by heads",
    "sequence": "attention by sequence",
    "select": "selection by sequence, attention by heads",
}


def shortage(plan: Plan) -> str | None:
    """Explain why the plan exceeds GPU memory, if it does."""
    worst, rank = _worst(plan)
    if worst <= plan.gpu.memory_gib * _GIB:
        return None
    return (
        f"out of memory: pipeline rank {rank} needs {worst / _GIB:.1f} GiB of the "
        f"{plan.gpu.memory_gib} that {plan.gpu.name} has. Shard the model over more ranks, divide "
        "the optimizer (--use-distributed-optimizer), recompute (--recompute-granularity), or "
        "shorten --seq-length or --micro-batch-size"
    )


def _worst(plan: Plan) -> tuple[int, int]:
    """Return the highest peak and its first pipeline rank."""
    worst, rank = max((stage.memory.peak, -rank) for rank, stage in enumerate(plan.stages))
    return worst, -rank


def describe(plan: Plan) -> str:
    parts = (
        _verdict,
        _job,
        _packages,
        _stages,
        _memory,
        _layers,
        _choices,
        _work,
        _traffic,
        _remarks,
    )
    return "\n".join(line for part in parts for line in part(plan))


def _verdict(plan: Plan) -> Iterator[str]:
    fits = "fits" if shortage(plan) is None else "does not fit"
    yield f"{fits}, {_worst(plan)[0] / _GIB:.1f} of {plan.gpu.memory_gib} GiB"


def _job(plan: Plan) -> Iterator[str]:
    args, config = plan.args, plan.config
    sizes = [f"TP {args.tensor_model_parallel_size}"]
    if args.tensor_model_parallel_size > 1:
        sizes[0] += f" ({_TP_MODES[plan.attention.tp_mode]})"
    if args.context_parallel_size > 1:
        layout: str = options_of(config).cp_layout
        if plan.attention.way in _EXCHANGED:
            layout += f", exchanging {_EXCHANGED[plan.attention.way]}"
        sizes.append(f"CP {args.context_parallel_size} ({layout})")
    if args.pipeline_model_parallel_size > 1:
        virtual = args.virtual_pipeline_model_parallel_size
        sizes.append(f"PP {args.pipeline_model_parallel_size}")
        sizes[-1] += f" ({virtual} virtual stages)" if virtual else ""
    if config.num_moe_experts is not None:
        sizes.append(f"EP {args.expert_model_parallel_size}")
    sizes.append(f"DP {args.data_parallel_size}")
    yield (
        f"plan for {args.world_size} x {plan.gpu.name}: {', '.join(sizes)}; stage "
        f"{options_of(config).stage}; {plan.microbatches} microbatches of "
        f"{args.micro_batch_size} x {args.seq_length} tokens per rank and iteration"
    )


def _packages(plan: Plan) -> Iterator[str]:
    found = {name: optional_version(name) for name in OPTIONAL_PACKAGES}
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = ", ".join(name for name, version in found.items() if not version)
    yield (
        f"with the packages installed here: {have or 'no optional ones'}"
        + (f" (not installed: {missing})" if missing else "")
    )
    if found["transformer-engine"] and not torch.cuda.is_available():
        yield (
            "with Megatron's own layers (--transformer-impl local): transformer-engine's cannot be "
            "built without a GPU"
        )


def _stages(plan: Plan) -> Iterator[str]:
    yield "pipeline ranks"
    for rank, stage in enumerate(plan.stages):
        for index, chunk in enumerate(stage.chunks):
            name = f"{rank}" if len(stage.chunks) == 1 else f"{rank}.{index}"
            parts = [part for part in chunk.outside if part == "embedding"]
            parts += [f"{_numbers(some)}: {kind}" for kind, some in _by_kind(chunk.layers)]
            parts += [part for part in chunk.outside if part != "embedding"]
            yield f"  {name}: {' | '.join(parts) or 'nothing'}"


def _memory(plan: Plan) -> Iterator[str]:
    names = ("weights", "gradients", "optimizer", "activations", "step", "peak")
    yield f"GiB per GPU (of {plan.gpu.memory_gib}; docs/guide/planning.md)"
    yield "  rank" + "".join(f"{name:>13}" for name in names)
    rows = [
        (rank, [f"{getattr(stage.memory, name) / _GIB:.4g}" for name in names])
        for rank, stage in enumerate(plan.stages)
    ]
    for values, same in groupby(rows, key=lambda row: row[1]):
        ranks = [rank for rank, _ in same]
        label = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        yield f"  {label:>4}" + "".join(f"{value:>13}" for value in values)


def _layers(plan: Plan) -> Iterator[str]:
    yield "kept for the backward pass, MiB per layer and microbatch"
    found: dict[str, list[Layer]] = {}
    for layer in _all_layers(plan):
        found.setdefault(layer.kind, []).append(layer)
    for kind, some in found.items():
        kept = sorted({round(layer.kept / _MIB, 1) for layer in some})
        spread = f"{kept[0]}" if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
        yield f"  {kind}: {spread}"


def _choices(plan: Plan) -> Iterator[str]:
    layers = _all_layers(plan)
    found: dict[tuple[str, Choice], list[Layer]] = {}
    for layer in layers:
        for choice in dict.fromkeys(layer.choices):
            found.setdefault((choice.operation, choice), []).append(layer)
    yield f"what runs ({plan.args.dsa_attention_backend or 'dsa_fused'})"
    for (operation, choice), some in found.items():
        where = "" if len(some) == len(layers) else f" in {_numbers(some)}"
        kind = "fallback" if choice.is_fallback else "fused" if choice.candidate.fused else "named"
        kind += "; compiled for this GPU, not run on one" if choice.never_run else ""
        yield f"  {operation}: {choice.candidate.name} ({kind}){where}"
        for name, reason in choice.rejected:
            yield f"    not {name}: {reason}"
    if plan.attention.masked_up_to is not None:
        yield f"  {plan.attention.describe()}"
    if has_indexers(plan.config) and indexer_is_trained(plan.config):
        yield f"  {options_of(plan.config).describe_loss()}"


def _work(plan: Plan) -> Iterator[str]:
    args, total = plan.args, sum(plan.operations.values())
    per_token = f"{total / args.seq_length / 1e9:.4g} GFLOP per token"
    yield f"{per_token} (docs/guide/throughput.md): {shares(plan.operations)}"
    peak = peak_tflops(plan.config, plan.gpu.name)
    if peak is None:
        yield "  no MFU: the peak of this GPU and precision is not known"
        return
    seconds = total * args.global_batch_size / args.world_size / peak / 1e12
    yield (
        f"  MFU refers to {peak:g} TFLOP/s: an iteration of {args.global_batch_size} sequences "
        f"takes {seconds:.3g} s at 100 %, {seconds / 0.4:.3g} s at 40 %"
    )


def _traffic(plan: Plan) -> Iterator[str]:
    most: dict[str, int] = {}
    for stage in plan.stages:
        for name, size in stage.received.items():
            most[name] = max(most.get(name, 0), size)
    if most:
        parts = ", ".join(f"{name} {size / _GIB:.3g}" for name, size in most.items())
        yield f"GiB received per GPU and iteration, by kind of group (the most of all): {parts}"


def _remarks(plan: Plan) -> Iterator[str]:
    for remark in plan.remarks:
        yield f"note: {remark}"


def _all_layers(plan: Plan) -> list[Layer]:
    return [layer for stage in plan.stages for chunk in stage.chunks for layer in chunk.layers]


def _by_kind(layers: Iterable[Layer]) -> Iterator[tuple[str, list[Layer]]]:
    found: dict[tuple[str, bool], list[Layer]] = {}
    for layer in layers:
        found.setdefault((layer.kind, layer.is_mtp), []).append(layer)
    for (kind, _), some in found.items():
        yield kind, some


def _numbers(layers: Iterable[Layer]) -> str:
    """Format layer numbers as ``layers 1-3, 5; MTP 1``."""
    texts = []
    layers = list(layers)
    for name, is_mtp in (("layer", False), ("MTP layer", True)):
        numbers = sorted({layer.number for layer in layers if layer.is_mtp == is_mtp})
        if not numbers:
            continue
        runs = []
        for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            run = [number for _, number in group]
            runs.append(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}")
        texts.append(f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(runs)}")
    return "; ".join(texts)
