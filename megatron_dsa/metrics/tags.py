"""Scalars that this package adds to TensorBoard and W&B, and their tags.

Tags start with ``dsa/`` and hold no spaces; ``docs/guide/reports.md`` lists them.
"""

from typing import Any

from megatron_dsa.ops.dispatch import report

#: Measured in evaluation passes, on request.
EVALUATION = "indexer loss, evaluation"

#: Figures of a layer: name in the log line -> tag. ``indexer loss`` is Megatron's own name for it.
FIGURES = {
    "indexer loss": "dsa/indexer-loss",
    "dsa attention mass captured": "dsa/mass-captured",
    "dsa query overlap": "dsa/query-overlap",
    EVALUATION: "dsa/indexer-loss-evaluation",
}

#: Losses of the indexer.
NAMES_OF_LOSSES = ("indexer loss", EVALUATION)
#: Figures of the selection of a few queries.
SAMPLED = tuple(name for name in FIGURES if name not in NAMES_OF_LOSSES)

#: Share of the GPU's peak, from 0 to 1.
MFU = "dsa/mfu"

#: What the tags of operations begin with: how often they ran, and their time.
CALLS, TIME = "dsa/calls/", "dsa/time/"


def layer_tag(tag: str, layer: int) -> str:
    """Tag of a figure of one layer, numbered from 1."""
    return f"{tag}/layer-{layer}"


def calls_tag(operation: str, implementation: str) -> str:
    """Tag of how often an implementation ran, counted since the start of the process."""
    return f"{CALLS}{operation}/{implementation}"


def time_tag(operation: str) -> str:
    """Tag of the time of an operation, in seconds per iteration."""
    return f"{TIME}{operation}"


def write(metrics: dict[str, float], iteration: int, writer: Any, wandb_writer: Any) -> None:
    """Write scalars by tag to Megatron's writers, which are ``None`` on all ranks but the last."""
    if writer is not None:
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, iteration)
    if wandb_writer is not None and metrics:
        wandb_writer.log(metrics, iteration)


def operation_metrics(seconds: dict[str, float]) -> dict[str, float]:
    """Return the calls and times (``seconds`` per iteration) of operations by tag."""
    calls: dict[str, float] = {
        calls_tag(operation, name): count
        for operation, counts in report().items()
        for name, count in counts.items()
    }
    return calls | {time_tag(operation): value for operation, value in seconds.items()}
