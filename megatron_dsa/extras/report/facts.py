"""Facts about a run for its report: model, results, calls, arguments."""

import math
import statistics
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from megatron_dsa.extras.report.events import RunLog, Series
from megatron_dsa.metrics.tags import CALLS, MFU, TIME, time_tag
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.training.provenance import MACHINE, SOFTWARE

#: Optional metric -> tag prefix, and flags that enable the metric.
ON_REQUEST = {
    "validation loss": ("lm loss validation", "--eval-interval, --eval-iters"),
    "step time": ("iteration-time", "--log-timers-to-tensorboard"),
    "throughput": ("throughput", "--log-throughput --log-timers-to-tensorboard"),
    "memory": ("mem-max-allocated-bytes", "--log-memory-to-tensorboard"),
    "time per operation": (TIME, "--dsa-time-operations"),
}

REST = "everything else"

#: Maximum characters of an argument: lists of data files are long.
SHOWN = 200


def settled(series: Series) -> float | None:
    values = [value for _, value in series[len(series) // 2 :]]
    if any(map(math.isnan, values)):
        return math.nan
    return statistics.median(values) if values else None


def last(log: RunLog, tag: str) -> float | None:
    series = log.scalars.get(tag)
    return series[-1][1] if series else None


def compiled(log: RunLog, series: Series) -> Series:
    """Drop the points whose time includes compilation, unless no point would remain.

    Megatron's first ``iteration-time`` after a start includes the first iteration.
    """
    times = [step for step, _ in log.scalars.get("iteration-time", ())]
    kept = series
    for first in [step for step, _ in log.starts] or [step for step, _ in series[:1]]:
        end = next((step for step in times if step >= first), first)
        kept = [point for point in kept if not first <= point[0] <= end]
    return kept or series


def step_shares(log: RunLog) -> dict[str, float]:
    """Return a step's seconds per operation and the remaining seconds, which may be negative.

    Values are trimmed means over the last stage's common steps, since medians would not add up.
    The result is empty without ``--dsa-time-operations``.
    """
    times = log.scalars.get("iteration-time", [])
    end = times[-1][0] if times else 0
    parts = {name: dict(log.scalars.get(time_tag(name), ())) for name in OPERATIONS}
    parts = {name: values for name, values in parts.items() if end in values}
    if not parts:
        return {}
    first = max((step for step, _ in log.stages() if step <= end), default=0)
    common = [
        (step, seconds)
        for step, seconds in times
        if step >= first and all(step in values for values in parts.values())
    ]
    common = compiled(log, common)
    later = sorted(common[len(common) // 2 :], key=lambda point: point[1])
    cut = len(later) // 4
    middle = later[cut : len(later) - cut]
    shares = {
        name: statistics.fmean(values[step] for step, _ in middle) for name, values in parts.items()
    }
    whole = statistics.fmean(seconds for _, seconds in middle)
    return shares | {REST: whole - sum(shares.values())}


def tokens_per_second(log: RunLog) -> Series:
    length = log.texts.get("seq_length", "")
    batches = dict(log.scalars.get("batch-size", ()))
    if not length.isdigit():
        return []
    return [
        (step, batches[step] * int(length) / seconds)
        for step, seconds in log.scalars.get("iteration-time", ())
        if step in batches and seconds > 0
    ]


def _argument(log: RunLog, name: str) -> str:
    value = log.texts.get(name, "")
    return "" if value in ("None", "False") else value


def model(log: RunLog) -> str:
    flag = partial(_argument, log)
    if not flag("num_layers"):
        return ""
    parts = [f"{flag('num_layers')} layers of {flag('hidden_size')}"]
    parts.append(f"{flag('num_attention_heads')} heads")
    if flag("num_experts"):
        parts.append(f"{flag('num_experts')} experts")
    parts.append(f"{flag('seq_length')} tokens")
    parts.append("bf16" if flag("bf16") else "fp16" if flag("fp16") else "fp32")
    if flag("lora_rank"):
        parts.append(f"adapters of rank {flag('lora_rank')}")
    ranks = [
        f"{short} {flag(name)}"
        for short, name in (
            ("TP", "tensor_model_parallel_size"),
            ("PP", "pipeline_model_parallel_size"),
            ("CP", "context_parallel_size"),
            ("EP", "expert_model_parallel_size"),
            ("DP", "data_parallel_size"),
        )
        if flag(name) not in ("", "1")
    ]
    return ", ".join(parts + ranks)


def attention(log: RunLog) -> str:
    stage, topk = _argument(log, "dsa_stage"), _argument(log, "dsa_indexer_topk")
    if ratios := _argument(log, "csa_compress_ratios"):
        ratios = ratios.strip("[]").replace(",", "")
        kind = f"CSA, ratios {ratios}" if len(ratios) < 40 else "CSA"
    else:
        kind = "MLA" if stage == "dense" else "DSA"
    selects = f", K = {topk}" if stage == "sparse" and topk else ""
    stages = log.stages()
    began = ", ".join(f"{name} from step {step}" for step, name in stages)
    began = f" ({began})" if len(stages) > 1 else ""
    share = _argument(log, "dsa_indexer_loss_queries")
    trained = stage in ("warmup", "sparse") and _argument(log, "dsa_indexer_loss_coeff")
    loss = f", indexer trained on {float(share):g} of the query tokens" if share and trained else ""
    return f"{kind}, stage {stage}{selects}{loss}{began}" if stage else ""


def calls(log: RunLog) -> dict[str, dict[str, int]]:
    """Return operation -> implementation -> calls, over all restarts."""
    found: dict[str, dict[str, int]] = {}
    for name in log.under(CALLS):
        operation, implementation = name.split("/", 1)
        count = round(log.counted(CALLS + name))
        found.setdefault(operation, {})[implementation] = count
    return found


def origin(log: RunLog) -> dict[str, str]:
    seconds = sum(end - start for start, end in log.sessions)
    starts = len(log.sessions)
    began = datetime.fromtimestamp(log.sessions[0][0], UTC) if log.sessions else None
    taken = f"{_duration(seconds)}, {starts} starts" if starts > 1 else _duration(seconds)
    names = ("data_path", "train_data_path", "per_split_data_args_path", "data_args_path")
    data = next((text for name in names if (text := _argument(log, name))), "")
    return {
        "began": f"{began:%Y-%m-%d %H:%M} UTC" if began else "",
        "took": taken if began else "",
        "machine": _argument(log, MACHINE),
        "data": data.strip("[]").replace("'", "").replace(",", "")[:SHOWN],
        "software": _argument(log, SOFTWARE),
    }


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def files(log: RunLog) -> dict[str, Path]:
    if log.folder is None:
        return {}
    found = {"events": log.folder}
    folders = [log.folder]
    saved = _argument(log, "save")
    if saved and (checkpoints := Path(saved).absolute()).is_dir():
        found["checkpoints"] = checkpoints
        folders.append(checkpoints)
        if checkpoints.parent == log.folder.parent:
            folders.append(checkpoints.parent)
    for folder in folders:
        for pattern in ("train*.log", "*.csv"):
            found |= {path.name: path for path in sorted(folder.glob(pattern))}
    return found


def results(log: RunLog) -> dict[str, str]:
    losses, speed = log.scalars.get("lm loss", []), settled(tokens_per_second(log))
    seconds, throughput, share = (
        settled(log.scalars.get(tag, [])) for tag in ("iteration-time", "throughput", MFU)
    )

    def written(value: float | None, form: str, factor: float = 1) -> str:
        return "" if value is None else form.format(factor * value)

    return {
        "steps": f"{losses[-1][0]}" if losses else "",
        "lm loss": written(settled(losses[-20:]), "{:.3f}"),
        "validation": written(last(log, "lm loss validation"), "{:.3f}"),
        "ms per step": written(seconds, "{:.0f}", 1e3),
        "tokens/s": written(speed, "{:,.0f}"),
        "TFLOP/s per GPU": written(throughput, "{:.3g}"),
        "MFU": written(share, "{:.1f} %", 100),
        "peak memory": written(last(log, "mem-max-allocated-bytes"), "{:.1f} GiB", 2**-30),
    }


def missing(runs: list[RunLog]) -> dict[str, str]:
    return {
        what: flags
        for what, (tag, flags) in ON_REQUEST.items()
        if not any(name.startswith(tag) for run in runs for name in run.scalars)
    }


def arguments(runs: list[RunLog]) -> tuple[dict[str, list[str]], dict[str, str]]:
    names = sorted({name for run in runs for name in run.texts})
    table = {name: [run.texts.get(name, "") for run in runs] for name in names}
    differ = {name: row for name, row in table.items() if len(set(row)) > 1}
    same = {name: row[0][:SHOWN] for name, row in table.items() if name not in differ}
    return differ, same
