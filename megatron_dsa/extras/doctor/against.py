"""``doctor --against bundled``: our DSA layer compared with megatron-core's."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import megatron.core
import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module

from megatron_dsa.config.options import DSAOptions
from megatron_dsa.config.presets import preset
from megatron_dsa.errors import require
from megatron_dsa.extras.doctor import device_named
from megatron_dsa.extras.doctor.bundled import (
    FUSED,
    bundled_layer,
    bundled_loss,
    csa_modules,
    declined_hooks,
)
from megatron_dsa.extras.doctor.report import OK, WRONG, print_table
from megatron_dsa.extras.doctor.session import median_ms
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.ops.dispatch import choices_unlogged
from megatron_dsa.patches import cpu_host
from megatron_dsa.specs import dsa_layer_spec
from megatron_dsa.testing.comparison import MODEL_SHAPES, Comparison
from megatron_dsa.training.one_process import one_process

#: Megatron-core's version without a checkout's commit suffix.
MEGATRON = megatron.core.__version__.split("+")[0]
_UNUSED = ("dims", "index_heads", "index_dim", "dtype", "sink", "packed", "rows", "allow_unfused")
#: Settings that let Megatron's DSA spec run without transformer-engine.
_LOCAL: dict[str, Any] = {
    "num_layers": 1, "hidden_dropout": 0.0, "transformer_impl": "local",
    "normalization": "RMSNorm", "persist_layer_norm": False, "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
}  # fmt: skip
#: With fewer index heads more scores tie at 0, and the layers break ties differently.
_SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 32,
    "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32, "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 32, "dsa_indexer_topk": 32,
}  # fmt: skip
_TOKENS, _SEED = 256, 3
_LOSSES = {"selected keys": True, "all keys": False}
_BATCHES = {"one sequence": None, "4 packed sequences": (70, 1, 100, 85)}
_ROPES: dict[str, dict[str, Any]] = {"rope": {"rope_type": "rope"}, "yarn, interleaved": {
    "rope_type": "yarn", "rotary_scaling_factor": 40.0, "dsa_indexer_rope_interleaved": True,
}}  # fmt: skip


@dataclass
class Against:
    """Result of a comparison: largest passing difference, cases, and notes for the report."""

    bound: float
    cases: dict[str, Comparison] = field(default_factory=dict)
    times: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        wrong = sum(bool(case.wrong()) for case in self.cases.values())
        title = f"our DSA layer and that of megatron-core {MEGATRON}"
        if wrong:
            return f"DIFFERENT: {title}, in {wrong} of {len(self.cases)} cases"
        return f"ok: {title} agree within {self.bound:.0e} in float32, {len(self.cases)} cases"

    def exit_code(self) -> int:
        return WRONG if any(case.wrong() for case in self.cases.values()) else OK


def run(arguments: argparse.Namespace) -> int:
    """Compare the layers; return 1 if a difference exceeds the bound, else 0.

    Raises:
        ConfigError: an argument has no effect here, or Megatron cannot run on the device.
    """
    for name in _UNUSED:
        require(
            getattr(arguments, name) == arguments.defaults[name],
            f"--{name.replace('_', '-')} has no effect with --against: only --device, --tolerance "
            "and --json do, and on a GPU --heads, --topk and --seq for times: leave it out",
        )
    device = device_named(arguments.device)
    found = Against(arguments.tolerance or MODEL_SHAPES[torch.float32])
    require(
        device.type == "cuda" or cpu_host.needed(),
        "--against bundled runs where Megatron does, on the GPU of this machine: leave --device "
        "out, or hide the GPU (CUDA_VISIBLE_DEVICES=)",
    )
    with contextlib.redirect_stdout(sys.stderr), choices_unlogged(), one_process():
        tensor_parallel.model_parallel_cuda_manual_seed(_SEED)
        for loss, batch, rope in _cases():
            label = f"{loss}, {batch}, {rope}"
            found.cases[label] = _compare(loss, batch, rope, device, found.bound)
        _note_csa(found)
        if device.type == "cuda":
            for heads in arguments.heads:
                for topk in arguments.topk:
                    _time(found, heads, topk, arguments.seq, device)
        else:
            found.remarks.append("times are measured on a GPU only")
    if arguments.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _print(found)
    return found.exit_code()


def _cases() -> Iterator[tuple[str, str, str]]:
    return ((loss, batch, rope) for loss in _LOSSES for batch in _BATCHES for rope in _ROPES)


def _note_csa(found: Against) -> None:
    csa = csa_modules()
    found.remarks.append(
        f"DeepSeek-V4's layer: not compared, megatron-core {MEGATRON} has "
        + (f"{', '.join(csa)}, which is unknown here" if csa else "none")
    )


def _compare(loss: str, batch: str, rope: str, device: torch.device, bound: float) -> Comparison:
    options = DSAOptions(indexer_loss_queries=1.0)
    config = preset("v3.2", dsa=options, **_LOCAL | _SMALL | _ROPES[rope] | {
        "dsa_indexer_use_sparse_loss": _LOSSES[loss], "dsa_indexer_loss_coeff": 0.7,
        # Megatron's Hadamard rotation needs bf16, and cancels in dot products.
        "dsa_indexer_rotate_activation": False,
        "use_cpu_initialization": cpu_host.needed(), "params_dtype": torch.float32,
    })  # fmt: skip
    ours, theirs, _ = _layers(config, "none", device)
    lengths = _BATCHES[batch]
    step = partial(_step, packed=None if lengths is None else _packed(lengths, device))
    x, gradient = _random(config.hidden_size, _TOKENS, device)
    with mock.patch.object(IndexerLog._state, "sums", None):
        IndexerLog.create(1, device)
        mine = step(ours, x, gradient)
        mine["indexer loss"] = IndexerLog.reduce()["indexer loss"].total.sum()
    bundled = step(theirs, x, gradient)
    bundled["indexer loss"] = bundled_loss()
    result = Comparison(bound)
    for name, expected in bundled.items():
        result.compare(name, mine.get(name), expected)
        result.require(expected.abs().sum() > 0, f"{name} is 0: nothing was compared")
    result.require(mine.keys() == bundled.keys(), "the layers have other parameters")
    return result


def _layers(config, kernels: str, device: torch.device):
    """Return our layer, megatron-core's layer with equal weights, and a remark."""
    spec = dsa_layer_spec(config).submodules.self_attention
    ours = build_module(spec, config=config, layer_number=1).to(device, config.params_dtype)
    generator = torch.Generator(device).manual_seed(_SEED)
    with torch.no_grad():
        for _, weight in sorted(ours.named_parameters()):
            drawn = torch.randn(weight.shape, generator=generator, device=device)
            # The factor 1.5 keeps attention far from uniform.
            weight.copy_(drawn * 1.5 * weight.shape[1] ** -0.5 if weight.dim() > 1 else
                         1 + 0.2 * drawn)  # fmt: skip
    theirs, remark = bundled_layer(config, kernels)
    theirs = theirs.to(device, config.params_dtype)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, remark


def _random(hidden: int, tokens: int, device, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(_SEED)
    shape = (tokens, 1, hidden)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2)]


def _packed(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )  # fmt: skip


def _step(module, x, gradient, packed=None) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    output, _ = module(x, None, packed_seq_params=packed)
    output.backward(gradient)
    gradients = {name: weight.grad for name, weight in module.named_parameters()}
    return {"output": output.detach(), "input gradient": x.grad} | gradients


def _time(found: Against, heads: int, topk: int, tokens: int, device: torch.device) -> None:
    label = f"H{heads} K{topk} S{tokens} bf16"

    def config(**options: Any):
        return preset(
            "v3.2", num_attention_heads=heads, dsa_indexer_topk=topk, dsa_indexer_loss_coeff=1.0,
            dsa_indexer_use_sparse_loss=True, bf16=True, params_dtype=torch.bfloat16,
            rope_type="rope", dsa=DSAOptions(sequence_length=tokens, **options), **_LOCAL,
        )  # fmt: skip

    try:
        ours = _layers(config(), "none", device)[0]
        every = _layers(config(indexer_loss_queries=1.0), "none", device)[0]
        ms = _milliseconds(ours, tokens), _milliseconds(every, tokens)
        del ours, every
    except torch.OutOfMemoryError:
        found.remarks.append(f"{label}: not timed, out of memory; try fewer --heads or --seq")
        return
    for kernels in (*FUSED, "none"):
        try:
            theirs, remark = _layers(config(), kernels, device)[1:]
            with declined_hooks() as declined:
                other = _milliseconds(theirs, tokens)
        except Exception as error:
            torch.cuda.empty_cache()
            found.remarks.append(f"{label}, kernels={kernels}: {str(error).splitlines()[0]}")
            continue
        remark += f"; declined: {', '.join(declined)}" if declined else ""
        found.times.append(
            f"{ms[0] / other:.2f} ours / bundled ({ms[1] / other:.2f} with the indexer's loss of "
            f"every query, as there): {ms[0]:.2f} ({ms[1]:.2f}) and {other:.2f} ms, {label}, "
            f"{remark}"
        )


def _milliseconds(module: Any, tokens: int) -> float:
    weight = next(module.parameters())
    x, gradient = _random(module.config.hidden_size, tokens, weight.device, weight.dtype)
    step: Callable[[], Any] = partial(_step, module.train(), x, gradient)
    for _ in range(3):
        step()
    ms = median_ms(step)
    module.zero_grad()
    return ms


def _groups(case: Comparison) -> dict[str, tuple[str, float]]:
    names = ("output", "indexer loss", "input gradient")
    groups = {name: (name, case.errors[name]) for name in names if name in case.errors}
    weights = {name: error for name, error in case.errors.items() if name not in names}
    if weights:
        worst = max(weights, key=lambda name: (weights[name] != weights[name], weights[name]))
        groups[f"{len(weights)} parameter gradients"] = (worst, weights[worst])
    return groups


def _print(found: Against) -> None:
    print(found.verdict())
    print("\nrelative differences, float32 (parameters: the worst)")
    rows = []
    for label, case in found.cases.items():
        row = {"case": label}
        for group, (name, error) in _groups(case).items():
            row[group] = f"{error:.1e}" + (f" {name}" if name != group else "")
        rows.append(row | {"bound": f"{found.bound:.0e}", "verdict": _verdict(case)})
    print_table(rows)
    for line in found.times:
        print(line)
    for remark in found.remarks:
        print(f"note: {remark}")


def _verdict(case: Comparison) -> str:
    return "; ".join(case.wrong()) or "ok"


def _as_json(found: Against) -> dict:
    cases = {
        label: {"differences": case.errors, "verdict": _verdict(case)}
        for label, case in found.cases.items()
    }
    return {
        "exit_code": found.exit_code(), "verdict": found.verdict(), "bound": found.bound,
        "megatron_core": MEGATRON, "cases": cases, "times": found.times,
        "remarks": found.remarks,
    }  # fmt: skip
