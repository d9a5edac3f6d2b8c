"""Columns, metrics and readers of the CSVs, in the standard library alone: the site reads them."""

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path

#: Release of megatron-core where none is recorded or named.
USUAL_RELEASE = "0.19"

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


def read_csv(path: Path) -> list[dict]:
    """Return all rows of a file, in order: JSON columns as dictionaries, numbers as numbers.

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
    """Return the rows of the last run of every measurement, in order of these runs.

    A measurement is a way of a case on one kind of GPU with one release of Megatron, and one of its
    parts: ``step`` has ``step/OPERATION`` with it, so a step that failed in the last run has no
    shares of a former one.
    """
    runs: dict[tuple, list[dict]] = {}
    for row in rows:
        key = _measurement(row)
        if key in runs and runs[key][0]["date"] != row["date"]:
            del runs[key]  # a later run also moves to the end
        runs.setdefault(key, []).append(row)
    return [row for run in runs.values() for row in run]


def megatron_release(row: dict) -> str:
    """Return ``major.minor`` of megatron-core."""
    return ".".join(row["versions"].get("megatron_core", USUAL_RELEASE).split(".")[:2])


def _measurement(row: dict) -> tuple:
    case, megatron = json.dumps(row["case"], sort_keys=True), megatron_release(row)
    return row["gpu"], row["family"], case, megatron, row["way"], row["part"].split("/")[0]
