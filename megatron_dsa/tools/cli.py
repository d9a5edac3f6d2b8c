"""Command line tools: ``info`` tells what would run here, ``doctor`` proves it, ``prepare-data``
makes a data set, ``import-hf`` and ``export-hf`` convert checkpoints, ``report`` shows runs."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import replace
from pathlib import Path

from megatron_dsa import __version__
from megatron_dsa.errors import TRACEBACK_FLAG
from megatron_dsa.versions import (
    OPTIONAL_PACKAGES,
    check_host,
    optional_version,
    untested_versions,
    why_not_transformer_engine,
)


def collect_info() -> dict:
    """Return versions, GPU, and for every operation what would run and why the rest would not."""
    import torch

    host = check_host()
    info = {
        "megatron_dsa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "megatron-core": {"version": host.found, "problem": host.problem},
        "untested": untested_versions(),
        "transformer_engine_unused": why_not_transformer_engine(torch.cuda.is_available()),
        "packages": {name: optional_version(name) for name in OPTIONAL_PACKAGES},
        "gpus": [
            {
                "name": torch.cuda.get_device_name(i),
                "capability": list(torch.cuda.get_device_capability(i)),
            }
            for i in range(torch.cuda.device_count())
        ],
        "operations": {
            model: _operations(torch, shapes) for model, shapes in _model_shapes().items()
        },
    }
    return info


def _model_shapes() -> dict[str, dict[str, dict]]:
    """Model -> operation -> the properties of its call in a training step."""
    latent = {"heads": 128, "qk_dim": 576, "v_dim": 512, "topk": 2048}
    index = {"heads": 64, "qk_dim": 128, "v_dim": 0}
    selects = index | {"topk": 2048}
    v32 = {
        "indexer_scores": selects,
        "indexer_listed_scores": selects,
        "indexer_topk": selects,
        "sparse_attention_forward": latent,
        "sparse_attention_backward": latent | {"teacher": True},
        "sparse_attention_probabilities": latent,
        "dense_attention": {"heads": 128, "qk_dim": 192, "v_dim": 128},
        "sparse_indexer_loss": selects,
        "dense_indexer_loss": index,
    }
    hybrid = {"heads": 128, "qk_dim": 512, "v_dim": 512, "topk": 1152, "sink": True}
    selects = index | {"topk": 1024}
    head = {"heads": 128, "qk_dim": 512, "v_dim": 0}
    v4 = {
        "compressor": head | {"heads": 1},
        "norm_rope": head,
        "rotate": head,
        "key_lists": {"heads": 1, "qk_dim": 0, "v_dim": 0},
        "indexer_scores": selects,
        "indexer_listed_scores": selects,
        "indexer_topk": selects,
        "sparse_attention_forward": hybrid,
        "sparse_attention_backward": hybrid | {"teacher": True},
        "sparse_attention_probabilities": hybrid,
        "sparse_indexer_loss": selects,
        "dense_indexer_loss": index,
    }
    return {"DeepSeek-V3.2": v32, "DeepSeek-V4-Pro": v4}


def _operations(torch, shapes: dict[str, dict]) -> dict:
    """What dispatch would pick for these shapes in bf16, per operation."""
    from megatron_dsa.dispatch import Policy, device_problem
    from megatron_dsa.ops import OPERATIONS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    operations = {}
    for name in (name for name in OPERATIONS if name in shapes):
        dtype = torch.int32 if name == "key_lists" else torch.bfloat16
        problem = device_problem(device, dtype=dtype, **shapes[name])
        choice = OPERATIONS[name].choose(problem, Policy(fused=True))
        operations[name] = {
            "runs": choice.candidate.name,
            "fused": choice.candidate.fused,
            "not_run_on_this_gpu": choice.untried,
            "rejected": dict(choice.rejected),
            "by_heads": _by_heads(name, problem),
            "remark": _REMARKS.get(name, ""),
        }
    return operations


#: When an operation is not called, or only if asked for.
_REMARKS = {
    "indexer_listed_scores": "with --dsa-fp8-selection",
    "sparse_attention_backward": "where it trains the indexer",
    "sparse_attention_probabilities": "where the backward does not give them",
}


def _by_heads(operation: str, problem) -> dict[str, str]:
    """What would run for how many heads, ``{"1-32": name, ...}``, where that makes a difference."""
    from megatron_dsa.dispatch import Policy
    from megatron_dsa.ops import OPERATIONS

    edges = {1}
    for candidate in OPERATIONS[operation].candidates:
        low, high = candidate.support.fastest or (1, 0)
        edges |= {low, high + 1}
    starts = sorted(edge for edge in edges if edge <= problem.heads)
    ends = [start - 1 for start in starts[1:]] + [problem.heads]
    chosen = {
        f"{low}-{high}": OPERATIONS[operation]
        .choose(replace(problem, heads=high), Policy(fused=True))
        .candidate.name
        for low, high in zip(starts, ends, strict=True)
    }
    return chosen if len(set(chosen.values())) > 1 else {}


def print_info(info: dict) -> None:
    """Print :func:`collect_info` for people."""
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
        unused = info["transformer_engine_unused"] if name == "transformer-engine" else None
        state = f"{version}, not used: {unused}" if version and unused else version
        print(f"  {name}: {state or 'not installed'} - {OPTIONAL_PACKAGES[name][1]}")
    for model, operations in info["operations"].items():
        print(f"operations ({model} shapes, bf16, --attention-backend dsa_fused)")
        _print_operations(operations)


def _print_operations(operations: dict) -> None:
    for name, entry in operations.items():
        if entry["remark"].startswith("not called"):
            print(f"  {name}: {entry['remark']}")
            continue
        kind = "fused" if entry["fused"] else "fallback"
        if entry["not_run_on_this_gpu"]:
            kind += "; compiled for this GPU, not run on one"
        remark = entry["remark"] and f", {entry['remark']}"
        print(f"  {name}: {entry['runs']} ({kind}){remark}")
        for heads, candidate in entry["by_heads"].items():
            print(f"    {heads} heads: {candidate}")
        for candidate, reason in entry["rejected"].items():
            print(f"    not {candidate}: {reason}")


def _info(arguments: argparse.Namespace) -> int:
    import logging

    logging.getLogger("megatron_dsa").setLevel(logging.ERROR)  # the table says it all
    if arguments.support_table:
        from megatron_dsa.tools.support_table import support_table

        print(support_table())
        return 0
    info = collect_info()
    if arguments.json:
        print(json.dumps(info, indent=2))
    else:
        print_info(info)
    return 0 if info["megatron-core"]["problem"] is None else 1


def _prepare_data(arguments: argparse.Namespace) -> int:
    from megatron_dsa.training.data import BYTE_VOCAB, python_documentation, write_byte_dataset

    if arguments.input:
        documents = [Path(path).read_text(encoding="utf-8") for path in arguments.input]
        source = f"{len(documents)} file(s)"
    else:
        documents = python_documentation()
        source = "Python's language reference"
    tokens = write_byte_dataset(documents, arguments.output)
    print(f"{tokens} byte tokens from {source} in {arguments.output}.bin and .idx; train with")
    print(
        f"  --data-path {arguments.output} --tokenizer-type NullTokenizer --vocab-size {BYTE_VOCAB}"
    )
    return 0


def run_command(arguments: argparse.Namespace) -> int:
    """Run a parsed command; returns the exit code."""
    from megatron_dsa.patches import cpu_host

    if cpu_host.needed():
        cpu_host.hide_transformer_engine()
    return arguments.run(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run``, a function of the arguments."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dsa", description=__doc__)
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="versions, GPU, and what every operation would run")
    info.add_argument("--json", action="store_true", help="machine-readable")
    info.set_defaults(run=_info)
    info.add_argument("--support-table", action="store_true", help="what everything can run")
    from megatron_dsa.tools import doctor

    check = commands.add_parser(
        "doctor", help="check every implementation against float64 on this machine and your shape"
    )
    doctor.add_arguments(check)
    check.set_defaults(run=doctor.run)
    data = commands.add_parser("prepare-data", help="byte-level Megatron data set from text files")
    data.add_argument("--output", required=True, help="path prefix of the .bin and .idx files")
    data.add_argument("--input", nargs="*", help="text files (default: Python's documentation)")
    data.set_defaults(run=_prepare_data)
    from megatron_dsa.tools.huggingface_commands import add_commands

    add_commands(commands)
    from megatron_dsa.tools.report import command

    command.add_command(commands)
    for each in commands.choices.values():
        each.add_argument(
            TRACEBACK_FLAG, action="store_true", help="show where an error comes from"
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Raises:
        ConfigError: what the user can mend; ``python -m megatron_dsa`` says it in a sentence.
    """
    return run_command(build_parser().parse_args(argv))
