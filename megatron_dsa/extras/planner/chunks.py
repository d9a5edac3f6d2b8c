"""Model chunks of one rank, measured on the meta device."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dsa.config.model import has_learned_head
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from megatron_dsa.layers.from_megatron import forget_layouts
from megatron_dsa.layers.required_ops import RequiredOp, called_ops, stream_ops
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Choice


@dataclass(frozen=True)
class Layer:
    """A transformer layer; ``kept``: bytes saved for the backward, per microbatch."""

    number: int
    is_mtp: bool
    kind: str
    kept: int = 0
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Weights:
    """Weights of one kind; ``expert``: gradients are reduced over expert data parallelism."""

    expert: bool
    trained: bool
    itemsize: int
    count: int


@dataclass(frozen=True)
class Chunk:
    """A model chunk, i.e. a virtual pipeline stage, with bytes per microbatch.

    Attributes:
        outside: modules other than layers.
        kept: bytes alive between forward and backward.
        forward_peak, backward_peak: peak bytes without weights.
        received: bytes received per process group.
    """

    layers: tuple[Layer, ...]
    outside: tuple[str, ...]
    weights: tuple[Weights, ...]
    kept: int
    forward_peak: int
    backward_peak: int
    received: dict[str, int] = field(default_factory=dict)


def measure_rank(args, model, pg_collection) -> list[Chunk]:
    from megatron.training.models.dist_utils import build_virtual_pipeline_stages

    forget_layouts()  # cached tables differ per rank
    names = _group_names(pg_collection)
    builder = model.get_builder_cls()(model)
    size = args.virtual_pipeline_model_parallel_size
    device: Any = torch.cuda.current_device()
    with device:
        chunks = build_virtual_pipeline_stages(builder.build_model, pg_collection, size)
    for hook in model.pre_wrap_hooks:
        chunks = hook(chunks) or chunks
    return [_measure(args, chunk.train(), names) for chunk in chunks]


def _group_names(pg_collection) -> Callable:
    order = {
        "tp": "tensor",
        "cp": "context",
        "tp_cp": "tensor and context",
        "ep": "expert",
        "expt_tp": "expert tensor",
        "tp_ep": "expert and tensor",
        "dp_cp": "data",
        "dp": "data",
        "pp": "pipeline",
        "embd": "embedding",
    }
    found: dict[Any, Any] = {}
    for attribute, name in order.items():
        group = getattr(pg_collection, attribute, None)
        if isinstance(group, torch.distributed.ProcessGroup):
            found.setdefault(group.group_name, name)
    return lambda group: found.get(group.group_name, "other")


def _measure(args, chunk: Any, name_of: Callable) -> Chunk:
    tracker = MemoryTracker(name_of)
    tracker.ignore(*chunk.parameters(), *chunk.buffers())
    layers = _follow_layers(chunk, tracker)
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            # Megatron frees this gradient; its gradient buffer is counted separately.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with tracker:
        output, gradient = _forward(args, chunk)
        forward_peak, kept = tracker.peak, tracker.restart()
        if output.requires_grad:
            _backward(output, gradient(output))
    received = Counter(tracker.received)
    if not chunk.pre_process:
        received["pipeline"] += chunk.decoder.input_tensor.nbytes
    if not chunk.post_process:
        received["pipeline"] += output.nbytes
    outside = ["embedding"] if chunk.pre_process else []
    outside += ["output layer and loss"] if chunk.post_process else []
    return Chunk(
        tuple(layers), tuple(outside), _weights(chunk), kept, forward_peak, tracker.peak,
        dict(received),
    )  # fmt: skip


def _backward(output: torch.Tensor, gradient: torch.Tensor) -> None:
    # torch's backward ignores recomputation under host(); Megatron's does not.
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _drop_gradient(parameter: torch.nn.Parameter) -> None:
    parameter.grad = None


def _forward(args, chunk):
    batch_size, length = args.micro_batch_size, args.seq_length // args.context_parallel_size
    if args.dataloader_inter_document_masking:
        batch_size, length = 1, batch_size * length
    shape, device = (batch_size, length), torch.cuda.current_device()
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    mask = torch.zeros(shape, device=device)
    batch = {
        "input_ids": tokens,
        "position_ids": torch.zeros_like(tokens),
        "attention_mask": None,
        "labels": torch.zeros_like(tokens),
        "loss_mask": mask,
        "packed_seq_params": _packed(args, tokens),
    }
    if not chunk.pre_process:
        divided = args.tensor_model_parallel_size if args.sequence_parallel else 1
        hidden = _input_shape(chunk, length // divided, batch_size)
        dtype = chunk.config.pipeline_dtype or chunk.config.params_dtype
        chunk.set_input_tensor(torch.zeros(hidden, dtype=dtype, device=device, requires_grad=True))
    output = chunk(**batch)
    if not chunk.post_process:
        return output, torch.empty_like
    loss = (output.float() * mask.view_as(output)).sum()
    return loss, torch.ones_like


def _input_shape(chunk, tokens: int, batch_size: int) -> tuple[int, int, int]:
    config = chunk.config
    if not config.mtp_num_layers or len(chunk.decoder.layers):
        return tokens, batch_size, config.hc_mult * config.hidden_size
    if chunk.mtp_process:
        # MTP's inputs are the head's output and the streams.
        tensors = 1 + (config.hc_mult if has_learned_head(config) else 0)
    else:
        tensors = 1 + config.mtp_num_layers
    return tensors * tokens, batch_size, config.hidden_size


def _packed(args, tokens: torch.Tensor):
    """Pack one document per sequence, the case with the most keys."""
    if not args.dataloader_inter_document_masking:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.arange(args.micro_batch_size + 1, dtype=torch.int32, device=tokens.device)
    offsets = offsets * args.seq_length
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=args.seq_length,
        max_seqlen_kv=args.seq_length,
    )


def _follow_layers(chunk, tracker: MemoryTracker) -> list[Layer]:
    """Describe layers; hooks fill in ``kept`` on the first run."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers: list[Layer] = []
    modules = [
        (name, module)
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerLayer)
    ]
    for index, (name, module) in enumerate(modules):
        core = _calling_part(module)
        is_mtp = ".layers." in name and name.startswith("mtp")
        choices = tuple(
            OPERATIONS[operation].choose(call, core.options.policy)
            for operation, call in called_ops(
                [*core.required_ops(), *_stream_ops(module, is_mtp)], core.options.policy
            )
        )
        layers.append(Layer(module.layer_number, is_mtp, kind_of(module), choices=choices))
        before: list[int] = []

        def begin(_module, _args, before=before):
            before.append(tracker.live)

        def end(_module, _args, _output, before=before, index=index):
            # Recomputation runs a layer again.
            started = before.pop()
            if not layers[index].kept:
                layers[index] = dataclasses.replace(layers[index], kept=tracker.live - started)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)
    return layers


def _stream_ops(layer, is_mtp: bool) -> list[RequiredOp]:
    ops = stream_ops(layer.config) if has_learned_head(layer.config) or not is_mtp else []
    if is_mtp or layer.layer_number == layer.config.num_layers:
        ops += stream_ops(layer.config, head=True)
    return ops


def _calling_part(layer) -> Any:
    return layer.self_attention.core_attention or layer.self_attention


def _attention_of(layer) -> str:
    core = layer.self_attention.core_attention
    if core is None:
        return "KDA"
    ratio = getattr(core, "ratio", None)
    if ratio is not None:
        name = "window" if ratio == 0 else "CSA" if ratio == 4 else "HCA"
        attention = f"{name} (ratio {ratio})" if ratio else name
    else:
        attention = {"sparse": "DSA", "warmup": "MLA", "dense": "MLA"}[core.options.stage]
        attention += " (masked)" if layer.self_attention.choice.masked else ""
    if core.indexer is not None:
        attention += " with indexer"
    elif ratio is None and core.options.stage == "sparse":
        attention += ", selection of an earlier layer"
    return attention


def kind_of(layer) -> str:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    attention, config = _attention_of(layer), layer.config
    mlp = "dense MLP"
    if isinstance(layer.mlp, MoELayer):
        mlp = f"{config.num_moe_experts} experts"
        mlp += ", looked up by token" if getattr(layer, "takes_token_ids", False) else ""
    return f"{attention}; {mlp}"


def _weights(chunk) -> tuple[Weights, ...]:
    counts: Counter[tuple[bool, bool, int]] = Counter()
    for parameter in chunk.parameters():
        expert = not getattr(parameter, "allreduce", True)
        kind = expert, parameter.requires_grad, parameter.element_size()
        counts[kind] += parameter.numel()
    for name, buffer in chunk.named_buffers():
        if name.endswith(".tid2eid"):
            counts[False, False, buffer.element_size()] += buffer.numel()
    return tuple(Weights(*kind, count) for kind, count in sorted(counts.items()))
