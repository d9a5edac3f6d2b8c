"""What a training stage means for parameters: which ones are trained."""

from __future__ import annotations

from megatron_dsa.config import options_of


def is_indexer_parameter(name: str) -> bool:
    """Whether a parameter (or checkpoint key) belongs to an indexer."""
    return ".indexer." in name


def trains_main(config) -> bool:
    """Whether anything but the indexers is trained."""
    options = options_of(config)
    return options.stage != "warmup" or not options.freeze_main
