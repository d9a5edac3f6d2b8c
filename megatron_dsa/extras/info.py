"""Command ``info``: versions, GPU, and implementations that each operation runs."""

import argparse
import json
import platform
from dataclasses import replace
from typing import Any

import torch

from megatron_dsa import __version__, patches
from megatron_dsa.config.attention_choice import MASKED_OPERATIONS, attention_of
from megatron_dsa.config.extras import load_extra, optional_extra
from megatron_dsa.config.model import CSAFields, DSAOptions
from megatron_dsa.config.presets import AROUND, PRESETS
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.errors import did_you_mean, require
from megatron_dsa.layers.required_ops import (
    RequiredOp,
    kda_ops,
    required_ops,
    stream_ops,
    visible_ops,
)
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dense_attention import flash4
from megatron_dsa.ops.dispatch import OpCall, Operation, Policy, choices_unlogged
from megatron_dsa.ops.dispatch.packages import (
    CUDNN,
    FLA,
    FLASH_ATTENTION_4,
    FLASH_MLA,
    TILELANG,
    TRITON,
)
from megatron_dsa.ops.dispatch.support import Support, short_dtype
from megatron_dsa.versions import (
    OPTIONAL_PACKAGES,
    host_described,
    host_problem,
    optional_version,
    untested_versions,
    why_not_transformer_engine,
)


def collect_info() -> dict:
    optional_extra("muon")
    info = {
        "megatron_dsa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "megatron-core": {
            "version": host_described(),
            "problem": host_problem(),
        },
        "untested": untested_versions(),
        "transformer_engine_unused": why_not_transformer_engine(torch.cuda.is_available()),
        "flash_attention_4_unused": (
            flash4.problem() if optional_version("flash-attn-4") else None
        ),
        "packages": {name: optional_version(name) for name in OPTIONAL_PACKAGES},
        "patches": patches.described(),
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": list(torch.cuda.get_device_capability(i)),
            }
            for i in range(torch.cuda.device_count())
        ],
        "operations": {name: _operations(model_ops(name)) for name in MODELS},
        "selected_attention": {
            name: _attention(name, "sparse") for name in MODELS if not _is_v4(name)
        },
        "visible_attention": {
            name: _attention(name, "dense") for name in MODELS if not _is_v4(name)
        },
    }
    return {"verdict": _verdict(info)} | info


def _verdict(info: dict) -> str:
    device = info["gpus"][0]["name"] if info["gpus"] else "CPU"
    if (problem := info["megatron-core"]["problem"]) is not None:
        return f"{device}: no training, {problem}"
    fused: dict[str, bool] = {}
    for operations in info["operations"].values():
        for name, entry in operations.items():
            fused[name] = fused.get(name, True) and entry["fused"]
    others = [name for name, is_fused in fused.items() if not is_fused]
    if len(others) == len(fused):
        return f"{device}: torch runs everything"
    if not others:
        return f"{device}: fused kernels run all {len(fused)} operations"
    return (
        f"{device}: fused kernels run {len(fused) - len(others)} of {len(fused)} operations, torch "
        f"runs {', '.join(others)}"
    )


MODELS = ("v3.2", "v4-pro")
SETTINGS = (
    DSAOptions(stage="sparse", evaluate_indexer=True),
    DSAOptions(stage="sparse", selected_attention="masked"),
    DSAOptions(stage="sparse", indexer_numerics="deepgemm-fp8"),
    DSAOptions(stage="warmup"),
)


def model_ops(name: str) -> dict[str, RequiredOp]:
    ops: dict[str, RequiredOp] = {}
    for options in SETTINGS:
        if options.selected_attention == "masked" and _is_v4(name):
            continue
        config = model_config(name, options)
        # V4 layers with an indexer call every operation.
        ratios = getattr(config, "csa_compress_ratios", None) or [CSA_RATIO]
        for op in required_ops(config, ratios.index(CSA_RATIO) + 1):
            ops.setdefault(op.operation, op)
    if _is_v4(name):
        ops |= {op.operation: op for head in (False, True) for op in stream_ops(config, head=head)}
    else:
        for op in (*visible_ops(config), *kda_ops(config)):
            ops.setdefault(op.operation, op)
    return {operation: ops[operation] for operation in OPERATIONS if operation in ops}


def _is_v4(name: str) -> bool:
    return "csa_compress_ratios" in PRESETS[name]


#: Megatron defaults that determine the operations' calls.
_MEGATRON = {
    "tensor_model_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False,
    "dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_scoring_relu": True, "dsa_indexer_rotate_activation": True,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip


def model_config(name: str, options: DSAOptions) -> CSAFields:
    config = CSAFields()
    vars(config).update(
        _MEGATRON | PRESETS[name] | {"hc_mult": AROUND[name].get("hc_mult", 1)}, dsa=options,
        dsa_indexer_loss_coeff=0.01, dsa_indexer_use_sparse_loss=options.stage == "sparse",
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    return config


def _attention(name: str, stage: Any) -> dict:
    choice = attention_of(model_config(name, DSAOptions(stage=stage)))
    return {"masked_up_to_tokens": choice.masked_up_to, "says": choice.describe()}


def _operations(ops: dict[str, RequiredOp]) -> dict:
    operations = {}
    for name, op in ops.items():
        choice = OPERATIONS[name].choose(op.call, Policy(fused=True))
        operations[name] = {
            "runs": choice.candidate.name,
            "fused": choice.candidate.fused,
            "not_run_on_this_gpu": choice.never_run,
            "rejected": dict(choice.rejected),
            "by_heads": _by_heads(name, op.call),
            "remark": _REMARKS.get(name, ""),
        }
    return operations


_REMARKS = {
    **dict.fromkeys(
        (name for name in OPERATIONS if name.startswith("hyper_connection")), "with --hc-mult 4"
    ),
    **dict.fromkeys(
        (name for name in OPERATIONS if name.startswith("kda_")), "with --linear-attention-freq"
    ),
    "indexer_engine_scores": "with --dsa-indexer-numerics deepgemm-fp8",
    **dict.fromkeys((op.name for op in MASKED_OPERATIONS), "with masked dense attention"),
    "visible_bits": "with masked dense attention in stages dense and warmup",
    "sparse_attention_probabilities": "the teacher of the indexer's loss",
}


def _by_heads(operation: str, call: OpCall) -> dict[str, str]:
    edges = {1}
    for rule in OPERATIONS[operation].first:
        edges |= {rule.heads[0], rule.heads[1] + 1}
    starts = sorted(edge for edge in edges if edge <= call.heads)
    ends = [start - 1 for start in starts[1:]] + [call.heads]
    chosen = {
        f"{low}-{high}": OPERATIONS[operation]
        .choose(replace(call, heads=high), Policy(fused=True))
        .candidate.name
        for low, high in zip(starts, ends, strict=True)
    }
    return chosen if len(set(chosen.values())) > 1 else {}


#: Package -> key of the reason against its use.
_UNUSED = {
    "transformer-engine": "transformer_engine_unused",
    "flash-attn-4": "flash_attention_4_unused",
}


def print_info(arguments: argparse.Namespace) -> int:
    _check_flags(arguments)
    if arguments.support_table:
        print(support_table())
        return 0
    if arguments.muon is not None:
        released = load_extra("muon.released", "info --muon")
        print(released.describe(arguments.muon, arguments.muon_per_head))
        return 0
    with choices_unlogged():
        info = collect_info()
    if arguments.json:
        print(json.dumps(info, indent=2))
    else:
        _print_info(info)
    return 0 if info["megatron-core"]["problem"] is None else 1


def _check_flags(arguments: argparse.Namespace) -> None:
    kinds = {
        "--json": arguments.json,
        "--support-table": arguments.support_table,
        "--muon": arguments.muon is not None,
    }
    given = [name for name, value in kinds.items() if value]
    require(
        len(given) <= 1,
        f"{' and '.join(given)} must not be given together: each prints something else; drop "
        "all but one",
    )
    require(
        arguments.muon in {None, *PRESETS},
        f"--muon {arguments.muon} must be a released model"
        f"{did_you_mean(str(arguments.muon), PRESETS)}",
    )
    require(
        arguments.muon_per_head == "none" or arguments.muon is not None,
        f"--muon-per-head {arguments.muon_per_head} needs --muon: name a model, or drop it",
    )


def _print_info(info: dict) -> None:
    print(info["verdict"])
    print(f"megatron_dsa {info['megatron_dsa']}")
    print(f"  Python {info['python']}, torch {info['torch']} (CUDA {info['cuda']})")
    megatron = info["megatron-core"]
    print(f"  megatron-core {megatron['version']}: {megatron['problem'] or 'supported'}")
    for warning in info["untested"]:
        print(f"  warning: {warning}")
    for gpu in info["gpus"]:
        print(f"  GPU: {gpu['name']}, compute capability {'.'.join(map(str, gpu['capability']))}")
    if not info["gpus"]:
        print("  GPU: none (training runs on the CPU, for tests and first steps)")
    print("optional packages")
    for name, version in info["packages"].items():
        unused = info[_UNUSED[name]] if name in _UNUSED else None
        state = f"{version}, not used: {unused}" if version and unused else version
        print(f"  {name}: {state or 'not installed'} - {OPTIONAL_PACKAGES[name][1]}")
    print("patches of megatron-core: what it does without them")
    for patch in info["patches"]:
        print(f"  {patch}")
    for model, operations in info["operations"].items():
        print(f"operations ({model} shapes, bf16, --attention-backend dsa_fused)")
        _print_operations(operations)
        for keys in ("selected_attention", "visible_attention"):
            if (attention := info[keys].get(model)) is not None:
                print(f"  {attention['says']}")


def _print_operations(operations: dict) -> None:
    for name, entry in operations.items():
        kind = "fused" if entry["fused"] else "fallback"
        if entry["not_run_on_this_gpu"]:
            kind += "; compiled for this GPU, not run on one"
        remark = entry["remark"] and f", {entry['remark']}"
        print(f"  {name}: {entry['runs']} ({kind}){remark}")
        for heads, candidate in entry["by_heads"].items():
            print(f"    {heads} heads: {candidate}")
        for candidate, reason in entry["rejected"].items():
            print(f"    not {candidate}: {reason}")


_HEAD = """# What every implementation can run

Printed by `python -m megatron_dsa info --support-table` from `megatron_dsa/ops/*/spec.py`.

Dispatch tries the implementations of an operation in the order of this table, torch last, but for
the numbers of heads for which the committed benchmark shows another one to be the fastest. "With
the teacher": the backward also returns the indexer's teacher, the head sum of the probabilities,
which other implementations compute as an operation of its own.
`--dsa-impl OPERATION=IMPLEMENTATION ...`, or `MEGATRON_DSA_IMPL=OPERATION=IMPLEMENTATION,...` in
the environment, names implementations: they run, or start-up stops with the reason. "-" means any,
except where the column "covers" names a condition. Masked attention adds sinks outside its kernels.
"""

_COLUMNS = (
    "implementation", "package", "GPUs", "dtypes", "dims (qk, v[, rope])", "heads", "K", "packed",
    "sink", "deterministic", "tried first for heads", "covers", "bridged by the adapter",
)  # fmt: skip


def support_table() -> str:
    parts = [_HEAD]
    for operation in OPERATIONS.values():
        title = operation.title[0].upper() + operation.title[1:]
        parts.append(f"## {operation.name}\n\n{title}.\n")
        rows = [_COLUMNS, ("---",) * len(_COLUMNS)]
        for c in operation.candidates:
            rows.append((c.name, *_cells(c.support, _first(operation, c.name))))
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
    parts.append(_versions())
    return "\n".join(parts)


def _span(limits: tuple[int, int] | None) -> str:
    return "-" if limits is None else f"{limits[0]}-{limits[1]}"


def _first(operation: Operation, name: str) -> str:
    rules = [rule for rule in operation.first if rule.name == name]
    with_teacher = ("", "with the teacher ")
    return "; ".join(with_teacher[rule.teacher] + _span(rule.heads) for rule in rules) or "-"


def _cells(support: Support, first: str) -> tuple[str, ...]:
    determinism = "yes" if support.deterministic else "no"
    if support.deterministic_mode:
        determinism = "on request"
    return (
        _package(support),
        _gpus(support),
        ", ".join(map(short_dtype, support.dtypes)) if support.dtypes else "-",
        ", ".join(map(str, support.dims)) if support.dims else "-",
        _span(support.heads),
        _span(support.topk),
        "yes" if support.packed else "no",
        "yes" if support.sink else "no",
        determinism,
        first,
        support.covers,
        support.bridged or "-",
    )


def _gpus(support: Support) -> str:
    if support.capabilities is None:
        return "-"
    run = [c for c in support.capabilities if c not in support.not_run]
    parts = [", ".join(f"sm{a}{b}" for a, b in part) for part in (run, support.not_run)]
    not_run = [f"compiled, not run: {parts[1]}"] if support.not_run else []
    return "; ".join([*filter(None, parts[:1]), *not_run])


def _package(support: Support) -> str:
    package = support.package
    if package is None:
        return "-"
    floor = support.minimum or package.minimum
    return f"{package.distribution or package.module}{f' >= {floor}' if floor else ''}"


def _versions() -> str:
    lines = ["## Versions of the packages\n"]
    for package in (FLASH_MLA, CUDNN, TILELANG, FLASH_ATTENTION_4, FLA, TRITON):
        install = package.install.format(floor=package.minimum)
        lines.append(f"**{package.module}**: {install}.\n")
        lines += [f"* before {fix}: {defect}" for fix, defect in package.fixes]
        lines += [
            f"* from {since} it needs {name} >= {least}" for since, name, least in package.needs
        ]
        if package.tested:
            lines.append(f"* newest version that was run: {package.tested}")
        lines.append("")
    return "\n".join(lines).rstrip()
