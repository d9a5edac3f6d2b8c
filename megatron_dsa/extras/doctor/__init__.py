"""Command ``doctor``: every implementation compared with float64 on this machine."""

import argparse
import contextlib
import itertools
import json
import platform
import sys

import torch

from megatron_dsa import __version__
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.doctor.report import Report, as_json, print_report
from megatron_dsa.extras.doctor.session import Session
from megatron_dsa.ops.dispatch import choices_unlogged, uncounted
from megatron_dsa.testing.cases import Shape
from megatron_dsa.versions import OPTIONAL_PACKAGES, optional_version

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SWITCH = {"off": (False,), "on": (True,), "both": (False, True)}
#: Minimum sizes that leave enough valid tokens and keys.
_LEAST = {"seq": 64, "rows": 16}


def run(arguments: argparse.Namespace) -> int:
    """Run ``doctor``; see ``--help`` for exit codes.

    Raises:
        ConfigError: an argument is out of range, or the device does not exist.
    """
    # Kernel compilers log to stdout.
    with contextlib.redirect_stdout(sys.stderr), choices_unlogged(), uncounted():
        report = _examine(arguments)
    code = report.exit_code(arguments.allow_unfused)
    if arguments.json:
        print(json.dumps(as_json(report, code), indent=2))
    else:
        print_report(report, code)
    return code


def _examine(arguments: argparse.Namespace) -> Report:
    device = device_named(arguments.device)
    asked = shapes_from(arguments)
    shapes = asked if device.type == "cuda" else list(dict.fromkeys(s.on_cpu() for s in asked))
    report = Report(_environment(device), asked, shapes)
    if device.type == "cuda":
        report.remarks.append(
            f"ms are medians with {shapes[0].timed_tokens} query tokens; the selection's with all "
            f"{shapes[0].seq}. First calls (imports, compilation, loading) are not in them"
        )
    else:
        labels = (f"{x.attention_label()}, HI{x.index_heads} DI{x.index_dim}" for x in shapes)
        report.remarks.append(
            f"on the CPU only the torch implementations run. Checked at {'; '.join(labels)}. NOT "
            "checked: fused kernels, the shape that was asked for, times"
        )
    Session(device, shapes[0].dtype, arguments.tolerance, report).run(shapes)
    return report


def shapes_from(arguments: argparse.Namespace) -> list[Shape]:
    for name, least in _LEAST.items():
        require(
            getattr(arguments, name) >= least,
            f"--{name} must be at least {least}, got {getattr(arguments, name)}: some tokens and "
            "keys are made invalid on purpose, and the others must carry the check",
        )
    qk_dim, v_dim = arguments.dims
    return [
        Shape(
            heads=heads, qk_dim=qk_dim, v_dim=v_dim, topk=topk, packed=packed, sink=sink,
            index_heads=arguments.index_heads, index_dim=arguments.index_dim, seq=arguments.seq,
            rows=min(arguments.rows, arguments.seq), dtype=_DTYPES[arguments.dtype],
        )
        for heads, topk, packed, sink in itertools.product(
            arguments.heads, arguments.topk, _SWITCH[arguments.packed], _SWITCH[arguments.sink]
        )
    ]  # fmt: skip


def device_named(name: str | None) -> torch.device:
    """Return the device of ``--device``.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = f"--device must be cuda, cuda:<number> or cpu, got {name!r}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(wrong) from error
    require(device.type in ("cuda", "cpu"), wrong)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        require(
            (device.index or 0) < count,
            f"--device {name}: this machine has {count} GPU(s); try --device cpu",
        )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
    return device


def _environment(device: torch.device) -> dict:
    gpu = None
    if device.type == "cuda":
        gpu = {
            "name": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
        }
    return {
        "megatron_dsa": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": gpu,
        "packages": {name: optional_version(name) for name in OPTIONAL_PACKAGES},
    }
