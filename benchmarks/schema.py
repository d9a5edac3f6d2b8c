"""The schema of all results: a CSV record per metric of a measurement.

Every benchmark writes only these columns and metrics. A *result* describes one part of a case's
work: a dictionary with ``status``, any of :data:`METRICS`, and :data:`DETAILS`. :func:`long_rows`
converts it to records.
"""

import csv
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.rows import COLUMNS, METRICS
from megatron_dsa import __version__
from megatron_dsa.training.files.system_errors import naming
from megatron_dsa.training.files.whole import whole_file
from megatron_dsa.versions import host_version, module_exists

#: Besides metrics, what a result may say. ``p10``, ``p90`` and ``repeats`` are those of ``ms``.
DETAILS = frozenset({"status", "reason", "ran", "p10", "p90", "repeats"})
STATUSES = ("ok", "skipped", "failed")
#: Metrics compared to the bit between runs, and counts: all digits of fp32. Others have five.
EXACT = frozenset({"lm_loss", "validation_loss", "indexer_loss", "grad_norm", "mass_captured",
                   "planned_gflop", "executed_gflop", "peak_mib", "planned_mib"})  # fmt: skip

#: Optional packages: name in the column ``versions`` -> distribution and module.
PACKAGES = {
    "emerging_optimizers": ("emerging-optimizers", "emerging_optimizers"),
    "cudnn_frontend": ("nvidia-cudnn-frontend", "cudnn"),
    "cutlass_dsl": ("nvidia-cutlass-dsl", "cutlass"),
    "flash_attn_4": ("flash-attn-4", "flash_attn.cute"),
    "fla_core": ("fla-core", "fla"),
    "flash_mla": ("flash-mla", "flash_mla"),
    "tilelang": ("tilelang", "tilelang"),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "triton": ("triton", "triton"),
}


def environment(device: torch.device) -> dict:
    """Return the columns ``gpu``, ``driver`` and ``versions`` (a dictionary) of this process."""
    on_gpu = device.type == "cuda"
    versions = {
        "cuda": torch.version.cuda if on_gpu else None,
        "megatron_core": host_version(),
        "package": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    } | {name: _version(*names) for name, names in PACKAGES.items()}
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "driver": _driver() if on_gpu else None,
        "versions": versions,
    }


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text()) if path.exists() else None
    return found.group(1) if found else None


def _version(distribution: str, module: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # Built in place, it can be imported but has no metadata.
        return "unknown" if module_exists(module) else None


def case_fields(case) -> dict:
    """Return the fields of a case's dataclass that are not ``None``."""
    return {name: value for name, value in asdict(case).items() if value is not None}


def long_rows(part: str, result: dict) -> list[dict]:
    """Return a record per metric of a result; if it is not ``ok``, one without a value.

    Args:
        part: the part of the case.
        result: ``status``, metrics and details.

    Raises:
        ValueError: a key of the result is no metric and no detail, or the status is unknown.
    """
    if odd := sorted(set(result) - set(METRICS) - DETAILS):
        raise ValueError(f"results have no {', '.join(odd)}: add them to METRICS, or leave them")
    if result["status"] not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {result['status']!r}")
    common = {"part": part} | {name: result.get(name) for name in ("ran", "status", "reason")}
    if result["status"] != "ok":  # figures of a wrong result would be misleading
        return [{**common, "metric": "ms", "value": None}]
    rows = []
    for metric in METRICS:
        value = result.get(metric)
        if value is None:
            continue
        row = {**common, "metric": metric, "value": _number(metric, value)}
        if metric == "ms":
            for name in ("p10", "p90", "repeats"):
                row[name] = _number(metric, result.get(name))
        rows.append(row)
    return rows


def _number(metric: str, value):
    """Return a float with few digits."""
    if not isinstance(value, float):
        return value
    return f"{value:.9g}" if metric in EXACT else f"{value:.5g}"


def open_csv(path: Path) -> None:
    """Write the header of a new file.

    Raises:
        SystemExit: the file exists with other columns.
    """
    if path.exists() and path.stat().st_size > 0:
        with path.open(newline="") as file:
            found = next(csv.reader(file))
        if found != list(COLUMNS):
            odd = sorted(set(found) ^ set(COLUMNS)) or ["their order"]
            raise SystemExit(
                f"--output {path} has other columns than this version writes (differing: "
                f"{', '.join(odd)}): name a new file or move that one away."
            )
        return
    with whole_file(path) as whole, whole.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(COLUMNS)


def append_csv(path: Path, rows: Iterable[dict]) -> None:
    """Append records; missing columns stay empty.

    Args:
        path: a file of :func:`open_csv`.
        rows: with ``versions`` and ``case`` as dictionaries.

    Raises:
        ValueError: a record has other columns.
    """
    with naming(path), path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        for row in rows:
            texts = {name: _json(row[name]) for name in ("versions", "case") if name in row}
            writer.writerow(row | texts)


def _json(fields: dict) -> str:
    there = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(there, sort_keys=True, separators=(",", ":"))
