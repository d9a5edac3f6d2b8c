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
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_dsa import __version__
from megatron_dsa.training.files.system_errors import naming
from megatron_dsa.training.files.whole import whole_file
from megatron_dsa.versions import module_exists

COLUMNS = {
    "date": "when the run began, UTC",
    "gpu": "name of the GPU, or of the CPU",
    "driver": "version of the GPU's driver",
    "versions": "of the packages, JSON",
    "family": "of cases",
    "case": "the case's dataclass, JSON; fields that are None are left out",
    "way": "implementation or peer",
    "part": "what of the case: an operation, `OPERATION/kernel` of a profiled call, a step, "
    "`step/OPERATION` of a profiled step, or the number of a training step",
    "metric": "one of METRICS",
    "value": "empty if the measurement failed; of repeated calls the median",
    "p10": "10 % of the calls were at or below this",
    "p90": "90 % of the calls were at or below this",
    "repeats": "number of timed calls",
    "ran": "implementations that ran, and what is special about the way",
    "status": "ok, skipped or failed",
    "reason": "why it was skipped or failed; what a ceiling is",
}
METRICS = {
    "ms": "time of a call",
    "kernel_ms": "time of all kernels, copies and fills of a CUDA graph's replay",
    "tflops": "TFLOP/s; of the operations that the mathematics asks for",
    "tb_per_s": "bytes that cannot be avoided, per time",
    "tokens_per_s": "tokens per time",
    "share_of_gemm": "tflops over those of a large bf16 matrix product in the same process",
    "share_of_copy": "tb_per_s over that of a large copy in the same process",
    "share_of_time": "share of a profiled step's kernel time",
    "peak_mib": "peak memory above what was there before the call; of a training run, of all",
    "results_mib": "memory of results and gradients",
    "rel_error": "largest norm(x - reference) / norm(reference), references in float64",
    "out_error": "the same of outputs, against the first way of the case",
    "end_error": "the same of the last tokens' outputs and input gradients",
    "graph_error": "the same of output and gradients of a CUDA graph's replay, against the step "
    "uncaptured",
    "neighbour_share": "share of keys that the next query selects as well; in former rows",
    "efficiency": "time of one rank over ranks times their time, in the same process",
    "time_over_te": "median over rounds of the time over that of transformer-engine's bf16 layers",
    "communication_share": "share of a step in which NCCL runs",
    "exposed_share": "share of a step in which nothing but NCCL runs",
    "bytes_per_token": "sent by a rank in a step, per token that it holds, counted",
    "formula_bytes_per_token": "the same by the design",
    "hidden_bytes_per_token": "the same if hidden states were gathered",
    "sent_bytes": "sent by a rank in the collectives of a step",
    "planned_mib": "planned peak memory of a training step",
    "weights_mib": "planned part of it",
    "gradients_mib": "planned part of it",
    "optimizer_mib": "planned part of it",
    "activations_mib": "planned part of it",
    "step_mib": "planned part of it: temporaries of the optimizer's step",
    "planned_gflop": "planned floating-point operations of a training step",
    "executed_gflop": "the same, counted by the tensor cores",
    "lm_loss": "language model's loss of a training step",
    "indexer_loss": "indexer's loss of a training step",
    "grad_norm": "norm of a training step's gradient",
    "mass_captured": "share of the attention that selected keys hold",
    "recall": "share of the keys that the first way selects, mean over queries",
    "rule_recall": "share of the keys that a written rule selects, of a few queries",
    "least_recall": "the same of the query that has least",
    "score_error": "norm(x - reference) / norm(reference) of index scores, of the first way",
    "validation_loss": "language model's loss on held-out text, nats per token",
    "training_s": "time of all training steps up to this one",
    "parameters": "of the model",
}  # fmt: skip
#: Other keys of a result. ``p10``, ``p90`` and ``repeats`` are of ``ms``.
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
    "flash_mla": ("flash-mla", "flash_mla"),
    "megatron_core": ("megatron-core", "megatron"),
    "tilelang": ("tilelang", "tilelang"),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "triton": ("triton", "triton"),
}


def environment(device: torch.device) -> dict:
    """Return the columns ``gpu``, ``driver`` and ``versions`` (a dictionary) of this process."""
    on_gpu = device.type == "cuda"
    versions = {
        "cuda": torch.version.cuda if on_gpu else None,
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


def read_csv(path: Path) -> list[dict]:
    """Return all records of a file, in order: JSON columns as dictionaries, numbers as numbers.

    Raises:
        ValueError: the file has other columns.
    """
    csv.field_size_limit(sys.maxsize)
    rows = []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(COLUMNS):
            raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}")
        for row in reader:
            row |= {name: json.loads(row[name]) for name in ("versions", "case")}
            row |= {name: float(row[name]) if row[name] else None for name in ("value", "p10",
                    "p90")}  # fmt: skip
            row["repeats"] = int(row["repeats"]) if row["repeats"] else None
            rows.append(row)
    return rows


def latest(rows: Iterable[dict]) -> list[dict]:
    """Return the records of the last run of every measurement, in order of these runs.

    A measurement is a way of a case on one kind of GPU, and one of its parts; ``step`` includes
    ``step/OPERATION``, so a step that failed in the last run has no shares of an earlier one.
    """
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        key = _measurement(row)
        if key in runs and runs[key][0]["date"] != row["date"]:
            del runs[key]  # a later run also moves to the end
        runs.setdefault(key, []).append(row)
    return [row for run in runs.values() for row in run]


def _measurement(row: dict) -> tuple:
    case = json.dumps(row["case"], sort_keys=True)
    return row["gpu"], row["family"], case, row["way"], row["part"].split("/")[0]
