"""Whole layers of hybrid attention: time and memory of a training step, and where the time goes.

The layers are built through the spec, with random weights, as a model would build them. A step is
the forward in training mode and the backward of a random gradient, in which the indexer's loss is
formed as well. Shares come from one profiled step: every kernel is put down to the dispatched
operation in whose range it was launched.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.hybrid import SHAPES, UNFUSED_BUDGET, UNFUSED_ROWS, Case
from benchmarks.measure import outcome
from benchmarks.timing import Clock, summary, what_ran
from megatron_dsa.dispatch import reset_report
from megatron_dsa.errors import ImplementationError

REPEATS = 5
#: A seed per layer would only make the cases differ.
SEED = 0

MODELS = {"v4-flash": "deepseek-v4-flash", "v4-pro": "deepseek-v4-pro"}
#: What all presets have in common here. The rope bases are not the models' own, which public
#: sources disagree on; they make no difference to the time.
SETTINGS = {
    "num_layers": 4,
    "mtp_num_layers": None,
    "csa_compress_ratios": [0, 4, 128, 4],
    "rotary_base": 10000.0,
    "csa_compress_rotary_base": 160000.0,
    "rope_type": "yarn",
    "rotary_scaling_factor": 16.0,
    "original_max_position_embeddings": 65536,
    "hidden_dropout": 0.0,
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "dsa_indexer_loss_coeff": 1.0,
    "dsa_indexer_use_sparse_loss": True,
}
_TINY = {
    "hidden_size": 32,
    "num_attention_heads": SHAPES["tiny"].heads,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_head_dim": SHAPES["tiny"].dim - SHAPES["tiny"].rope,
    "qk_pos_emb_head_dim": SHAPES["tiny"].rope,
    "v_head_dim": SHAPES["tiny"].dim,
    "o_groups": 2,
    "o_lora_rank": 6,
    "csa_window_size": SHAPES["tiny"].window,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": SHAPES["tiny"].index_dim,
    "dsa_indexer_topk": SHAPES["tiny"].topk,
    "dsa_indexer_rope_interleaved": True,
}


def layer_config(preset: str, fused: bool, workspace_mib: int):
    """Return the configuration of a preset's layers; Megatron has to be running."""
    from megatron_dsa.config import CSATransformerConfig, DSAOptions
    from megatron_dsa.patches import cpu_host
    from megatron_dsa.presets import preset

    options = DSAOptions(fused=fused, workspace_bytes=workspace_mib * 2**20)
    changes = SETTINGS | {"use_cpu_initialization": cpu_host.needed(), "dsa": options}
    if preset in MODELS:
        config = preset(MODELS[preset], **changes)
    else:
        config = CSATransformerConfig(**_TINY | changes)
    config.finalize_model_grads_func = None
    return config


class Layer:
    """One attention layer in training mode, its input and the gradient of its output."""

    def __init__(self, case: Case, device: torch.device, settings: dict):
        from tests.host import start

        if start().type != device.type:
            raise ImplementationError(
                f"layers run on {start()} here, where Megatron puts them, not on {device}"
            )
        from megatron.core.transformer.spec_utils import build_module

        from megatron_dsa.specs import dsa_layer_spec

        config = layer_config(
            case.preset, case.implementation == "fused", settings["workspace_mib"]
        )
        torch.manual_seed(SEED)
        spec = dsa_layer_spec(config).submodules.self_attention
        number = config.csa_compress_ratios.index(case.ratio) + 1
        module = build_module(spec, config=config, layer_number=number)
        # Some parameters stay in fp32, as in a model that Megatron casts.
        self.module = module.to(device).bfloat16().train()
        generator = torch.Generator(device).manual_seed(SEED)
        shape = (case.rows, 1, config.hidden_size)
        self.x, self.gradient = (
            torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)
            for _ in range(2)
        )
        self.x.requires_grad_()

    def forward(self) -> torch.Tensor:
        """Run the forward of a training step; the result holds all that the backward needs."""
        return self.module(self.x, None)[0]

    def step(self) -> None:
        """Forward and backward; gradients are added to those that there are."""
        self.forward().backward(self.gradient)


def layer_rows(case: Case, device: torch.device, clock: Clock, settings: dict) -> Iterator[dict]:
    """Yield rows: forward, forward and backward, then one per operation of the profiled step."""
    if case.implementation == "unfused" and (
        case.rows > UNFUSED_ROWS and settings["budget"] < UNFUSED_BUDGET
    ):
        reason = f"more than {UNFUSED_ROWS} rows unfused: needs --budget {UNFUSED_BUDGET:g}"
        yield {"status": "skipped", "reason": reason}
        return
    built = []

    def forward() -> dict:
        built.append(Layer(case, device, settings))
        return measure_calls(built[0].forward, clock, settings["budget"])

    yield (row := {"operation": "forward", **outcome(forward)})
    if row["status"] != "ok":
        return
    (layer,) = built
    row = outcome(measure_calls, layer.step, clock, settings["budget"])
    yield (row := {"operation": "step", **row})
    if row["status"] != "ok":
        return
    rows = outcome(operation_rows, layer, device)
    if isinstance(rows, dict):
        yield {"operation": "step/profile", **rows}
    else:
        yield from rows


def measure_calls(call, clock: Clock, budget: float) -> dict:
    """Time a call that may take long: once if one call and its warm-up use up the budget.

    The times are those of calls in a row, the host's part included where the GPU waits for it.
    """
    warm_up = clock.seconds(call)  # compiles; the first step also makes the gradients' memory
    gc.collect()
    reset_report()
    begin, peak = time.perf_counter(), None
    if clock.on_gpu:
        peak = clock.peak_mib(call)  # waits for the end
    else:
        call()
    once = time.perf_counter() - begin
    ran = what_ran()
    count = min(REPEATS, int((budget - once) / once))
    times = clock.milliseconds(call, count) if count > 0 else [once * 1e3]
    return {
        "status": "ok",
        **summary(times),
        "peak_mib": peak,
        "warm_up_s": warm_up,
        "ran": ran,
    }


# Where the time of a step goes

_PREFIX = "megatron_dsa."
#: Backward of operations that autograd calls, outside of any range: name of the function.
_BACKWARDS = {
    "_CompressBackward": "compressor_backward",
    "_NormRopeBackward": "norm_rope_backward",
    "_RotateBackward": "rotate_backward",
}
#: Counted where they run outside of all operations: projections, mostly, and the Hadamard rotation.
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
PRODUCTS, OTHER = "matrix products", "other"


def operation_rows(layer: Layer, device: torch.device) -> list[dict]:
    """Profile one step; return a row per operation, those that take longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        layer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    found = time_per_operation(events, device.type == "cuda")
    if not found:
        raise RuntimeError("the profiler recorded no kernels")
    total = sum(microseconds for microseconds, _, _ in found.values())
    return [
        {
            "operation": f"step/{operation}",
            "status": "ok",
            "median_ms": microseconds / 1e3,
            "share_of_time": microseconds / total if total else None,
            "kernels": kernels,
            "ran": "+".join(sorted(names)),
            "repeats": 1,
        }
        for operation, (microseconds, kernels, names) in sorted(
            found.items(), key=lambda item: -item[1][0]
        )
    ]


def time_per_operation(
    events: Iterable[dict], on_gpu: bool
) -> dict[str, tuple[float, int, set[str]]]:
    """Sum up the events of a trace: operation -> microseconds, kernels, implementations.

    A kernel belongs to the innermost range in which the host launched it: kernels that no torch
    operator launches are not part of the profiler's own sums. Threads are not told apart, because
    the forward's waits while the backward's runs. On the CPU, operators stand for kernels.
    """
    events = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(filter(None, map(_range, events)))
    work = sorted(_kernels(events) if on_gpu else _own_times(events))
    sums: dict[str, list] = defaultdict(lambda: [0.0, 0, set()])
    implementations: dict[str, set] = defaultdict(set)
    for _, _, operation, name in ranges:
        if name:
            implementations[operation].add(name)
    around, place = [], 0
    for launched, duration in work:
        while place < len(ranges) and ranges[place][0] <= launched:
            around.append(ranges[place])
            place += 1
        around = [r for r in around if r[1] >= launched]
        ours = [r[2] for r in around if r[2] != PRODUCTS]
        operation = ours[-1] if ours else PRODUCTS if around else OTHER
        entry = sums[operation]
        entry[0] += duration
        entry[1] += 1
        # A backward has no range of its own: it runs with the forward's implementation.
        forward = operation in _BACKWARDS.values() and operation.removesuffix("_backward")
        entry[2] = implementations[forward or operation]
    return {operation: tuple(entry) for operation, entry in sums.items()}


def _range(event: dict) -> tuple[float, float, str, str] | None:
    """Return begin, end, operation and implementation of a range that counts."""
    name, kind = event["name"], event.get("cat")
    span = (event["ts"], event["ts"] + event["dur"])
    if kind == "user_annotation" and name.startswith(_PREFIX):
        return *span, *name.removeprefix(_PREFIX).split(".", 1)
    if kind == "cpu_op" and name in _BACKWARDS:
        return *span, _BACKWARDS[name], ""
    if kind == "cpu_op" and name in _PRODUCTS:
        return *span, PRODUCTS, ""
    return None


def _kernels(events: list[dict]) -> Iterator[tuple[float, float]]:
    """Yield when each kernel, copy and fill was launched, and how long it took."""
    launches, operators = {}, {}
    for event in events:
        given = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launches[given.get("correlation")] = event["ts"]
        elif event.get("cat") == "cpu_op":
            operators[given.get("External id")] = event["ts"]
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            given = event.get("args", {})
            launched = launches.get(given.get("correlation"))
            if launched is None:  # a launch that was not recorded: the operator around it was
                launched = operators.get(given.get("External id"), float("-inf"))
            yield launched, event["dur"]


def _own_times(events: list[dict]) -> Iterator[tuple[float, float]]:
    """Yield begin and time of operators, without that of the operators they call."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("tid")].append((event["ts"], event["dur"]))
    for operators in threads.values():
        operators.sort(key=lambda operator: (operator[0], -operator[1]))
        own, open_ones = [duration for _, duration in operators], []
        for place, (begin, duration) in enumerate(operators):
            while open_ones and sum(operators[open_ones[-1]]) <= begin:
                open_ones.pop()
            if open_ones:
                own[open_ones[-1]] -= duration
            open_ones.append(place)
        yield from zip((begin for begin, _ in operators), own, strict=True)
