"""Layouts of some query tokens, and which keys they see."""

import dataclasses
from collections.abc import Iterator

import torch

from megatron_dsa.ops.layout.layout import Layout, QueryRange

#: Temporary memory that float64 references may take.
BUDGET_BYTES = 2**30


def chunks(tokens: int, bytes_per_token: int) -> Iterator[slice]:
    """Yield slices of ``tokens`` that take at most :data:`BUDGET_BYTES` each."""
    step = max(1, BUDGET_BYTES // bytes_per_token)
    for first in range(0, tokens, step):
        yield slice(first, min(tokens, first + step))


def sampled_tokens(tokens: int, count: int, device: torch.device) -> torch.Tensor:
    """Return ascending query tokens spread over all, the first and the last included."""
    return torch.linspace(0, tokens - 1, count, device=device).long().unique()


def layout_of_tokens(layout: Layout, tokens: torch.Tensor) -> Layout:
    """Return the layout of some (ascending) query tokens over all keys."""
    # The i-th sampled token must lie at or before slot first + i.
    first = int((tokens - torch.arange(len(tokens), device=tokens.device)).max())
    return dataclasses.replace(
        layout,
        num_queries=len(tokens),
        start=layout.start[tokens],
        end=layout.end[tokens],
        position=layout.position[tokens],
        real=None if layout.real is None else layout.real[tokens],
        query_ranges=(
            QueryRange(
                slice(0, len(tokens), 1), 0, first, layout.num_keys + len(tokens), layout.num_keys
            ),
        ),
    )


def visible_keys(layout: Layout, tokens: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Return bool ``[tokens, Skv]`` over key rows: what some query tokens see."""
    slots = torch.arange(layout.num_keys, device=layout.start.device)
    by_slot = (slots >= layout.start[tokens, None]) & (slots < layout.end[tokens, None])
    if layout.key_rows is None:
        return by_slot
    return torch.zeros_like(by_slot).index_copy_(1, layout.key_rows, by_slot)
