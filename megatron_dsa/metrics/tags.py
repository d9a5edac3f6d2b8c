"""Tags of this package's scalars in TensorBoard and W&B (``docs/guide/reports.md``)."""

from typing import Any

from megatron_dsa.ops.dispatch import report

#: Name of the loss that ``--dsa-evaluate-indexer`` measures.
EVALUATION = "indexer loss, evaluation"

#: Metric name in Megatron's log line -> tag.
FIGURES = {
    "indexer loss": "dsa/indexer-loss",
    "dsa attention mass captured": "dsa/mass-captured",
    "dsa query overlap": "dsa/query-overlap",
    EVALUATION: "dsa/indexer-loss-evaluation",
}

NAMES_OF_LOSSES = ("indexer loss", EVALUATION)
SAMPLED = tuple(name for name in FIGURES if name not in NAMES_OF_LOSSES)

MFU = "dsa/mfu"

CALLS, TIME = "dsa/calls/", "dsa/time/"


def layer_tag(tag: str, layer: int) -> str:
    return f"{tag}/layer-{layer}"


def calls_tag(operation: str, implementation: str) -> str:
    return f"{CALLS}{operation}/{implementation}"


def time_tag(operation: str) -> str:
    return f"{TIME}{operation}"


def write(metrics: dict[str, float], iteration: int, writer: Any, wandb_writer: Any) -> None:
    """Write scalars to TensorBoard and W&B from the last rank."""
    if writer is not None:
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, iteration)
    if wandb_writer is not None and metrics:
        wandb_writer.log(metrics, iteration)


def operation_metrics(seconds: dict[str, float]) -> dict[str, float]:
    calls: dict[str, float] = {
        calls_tag(operation, name): count
        for operation, counts in report().items()
        for name, count in counts.items()
    }
    return calls | {time_tag(operation): value for operation, value in seconds.items()}
