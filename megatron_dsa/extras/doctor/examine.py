"""One run of all checks."""

import argparse
import platform

import torch

from megatron_dsa import __version__
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.doctor.attention import check_attention
from megatron_dsa.extras.doctor.engine import check_engine_scores
from megatron_dsa.extras.doctor.indexer import check_loss, check_selection
from megatron_dsa.extras.doctor.results import Report
from megatron_dsa.extras.doctor.session import Session
from megatron_dsa.extras.doctor.shapes import shapes_from
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import choices_unlogged, uncounted
from megatron_dsa.testing.cases import Shape
from megatron_dsa.versions import OPTIONAL_PACKAGES, optional_version

#: Operations that get verdicts.
CHECKED = {
    *("sparse_attention_forward", "sparse_attention_backward", "sparse_attention_probabilities"),
    *("indexer_scores", "indexer_engine_scores", "indexer_topk", "sparse_indexer_loss"),
}


def examine(arguments: argparse.Namespace) -> Report:
    """Run all checks.

    Raises:
        ConfigError: an argument is out of range, or the device does not exist.
    """
    device = _device(arguments.device)
    asked = shapes_from(arguments)
    shapes = asked if device.type == "cuda" else list(dict.fromkeys(s.on_cpu() for s in asked))
    report = Report(_environment(device), asked, shapes)
    others = sorted(OPERATIONS.keys() - CHECKED)
    report.remarks.append(f"checked by the unit tests and not here: {', '.join(others)}")
    if device.type == "cuda":
        report.remarks.append(
            f"ms are medians with {shapes[0].timed_rows} query rows; the selection's with all "
            f"{shapes[0].seq}. First calls (imports, compilation, loading) are not in them"
        )
    else:
        report.remarks.append(
            "on the CPU only the torch implementations run. Checked at "
            + "; ".join(_cpu_label(s) for s in shapes)
            + ". NOT checked: fused kernels, the shape that was asked for, times"
        )
    session = Session(device, shapes[0].dtype, arguments.tolerance, report)
    with choices_unlogged(), uncounted():
        _check_all(session, shapes)
    return report


def _check_all(session: Session, shapes: list[Shape]) -> None:
    done = set()
    for check in (check_attention, check_selection, check_engine_scores, check_loss):
        for shape in shapes:
            attention = check is check_attention
            label = shape.attention_label() if attention else shape.indexer_label()
            if (check, label) in done:  # heads and sinks are nothing to the indexer
                continue
            done.add((check, label))
            name = check.__name__.removeprefix("check_")
            if session.lost is not None:
                session.skip(name, "(all)", label, f"the GPU was lost when {session.lost} crashed")
                continue
            try:
                check(session, shape)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                session.report.incomplete.append(
                    f"{name} of {label}: out of memory in the float64 reference; try --rows 64"
                )
            except RuntimeError:
                if session.lost is None:
                    raise
                session.skip(name, "(rest)", label, f"the GPU was lost when {session.lost} crashed")


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device must be cuda, cuda:<number> or cpu, got {name!r}") from error
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"--device must be cuda, cuda:<number> or cpu, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"--device {name}: this machine has {count} GPU(s); try --device cpu")
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


def _cpu_label(shape: Shape) -> str:
    return f"{shape.attention_label()}, HI{shape.index_heads} DI{shape.index_dim}"
