"""Top-k selection with equal work per rank.

Late tokens see more keys: if ranks have contiguous parts of a sequence, the last rank scores up to
twice the mean while the others wait.

Each of ``n`` ranks has two of ``2 n`` halves. Half ``k`` costs ``k + 1/2``, so halves ``k`` and
``2 n - 1 - k`` together cost the mean. A rank scores a local half while it receives another.

Packed batches stay unbalanced: ranks must agree without reading lengths from the device.
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from megatron_dsa.layers.parallel.groups import Ranks
from megatron_dsa.ops.dispatch import Policy, count
from megatron_dsa.ops.indexer_topk.api import indexer_topk
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.compressed import CompressedKeys, visible_groups
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.sharding import Sharding, run_layout

#: Minimum ratio of longest to mean work that justifies an exchange (zigzag has 1.0, two
#: ranks with contiguous parts 1.5).
LONGEST_TO_MEAN = 1.1
#: Minimum ratio of visible to selected keys that justifies an exchange. The 25 KB of a token (64
#: heads of 128, 2048 keys) take 0.1 to 0.2 us over NVLink, like scoring a few thousand keys.
VISIBLE_TO_TOPK = 4


@dataclass(frozen=True)
class Swap:
    """Sequence halves that ranks score for each other; half ``k`` starts at position ``k * size``.

    Attributes:
        kept: local half that this rank scores.
        given: local half that rank ``to`` scores.
        taken: half of rank ``source`` that this rank scores.
        kept_second: ``kept`` comes after ``given``.
        longest_to_mean: ratio of longest to mean work without exchange.
    """

    size: int
    kept: int
    given: int
    taken: int
    kept_second: bool
    to: int
    source: int
    longest_to_mean: float


@lru_cache(maxsize=64)
def swap_of(sharding: Sharding, total: int) -> Swap | None:
    """Plan the exchange of halves of ``total`` positions, ``None`` if halves are unequal."""
    size, rest = divmod(total, 2 * sharding.ranks)
    if rest:
        return None
    held = [_held_halves(sharding, rank, total, size) for rank in range(sharding.ranks)]
    holder = {half: rank for rank, halves in enumerate(held) for half in halves}
    last = len(holder) - 1

    # Halves ``k`` and ``last - k`` are partners. The walk from a half to its partner, then to the
    # other half on that rank, is a cycle, so each rank gives away at most one half.
    kept: dict[int, int] = {}
    for start in range(sharding.ranks):
        # Score the longer half locally, to hide more of the exchange.
        rank, half = start, max(held[start])
        while rank not in kept:
            kept[rank] = half
            rank = holder[last - half]
            half = sum(held[rank]) - (last - half)

    halves, local = held[sharding.rank], kept[sharding.rank]
    given, taken = sum(halves) - local, last - local
    return Swap(
        size=size,
        kept=local,
        given=given,
        taken=taken,
        kept_second=halves[1] == local,
        to=holder[last - given],
        source=holder[taken],
        longest_to_mean=max(sum(pair) + 1 for pair in held) / (last + 1),
    )


def _held_halves(sharding: Sharding, rank: int, total: int, size: int) -> list[int]:
    one = dataclasses.replace(sharding, cp_rank=rank // sharding.sp, sp_rank=rank % sharding.sp)
    return [
        position // size
        for first, length in one.chunks(total)
        for position in range(first, first + length, size)
    ]


def balanced_topk(
    inputs: IndexerInputs,
    layout: Layout,
    topk: int,
    ranks: Ranks,
    *,
    compressed: CompressedKeys | None = None,
    policy: Policy = Policy(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the same keys as ``indexer_topk``, with balanced work over ``ranks.query_group``.

    ``inputs`` have local queries and all ranks' keys.
    """
    ratio, visible = 1, layout
    if compressed is not None:
        ratio, visible = compressed.ratio, compressed.layout
    swap = worthwhile_swap(layout, topk, ratio, ranks.query_sharding)
    if swap is None:
        return indexer_topk(inputs, visible, topk, policy=policy)
    count("indexer_balance", "exchanged")
    kept, taken = layout.derive(("balanced selection", ratio), lambda: halves(layout, swap, ratio))
    inputs = inputs.detach()

    of_queries = [inputs.q, inputs.weights]
    if inputs.fp32_weights is not None:
        of_queries.append(inputs.fp32_weights)

    def select(
        tokens: Layout, q: torch.Tensor, weights: torch.Tensor, *fp32_weights
    ) -> torch.Tensor:
        part = dataclasses.replace(inputs, q=q, weights=weights)
        if fp32_weights:
            part = dataclasses.replace(part, fp32_weights=fp32_weights[0])
        return indexer_topk(part, tokens, topk, policy=policy)[0]

    half = layout.num_queries // 2
    first, second = slice(0, half), slice(half, 2 * half)
    local, given = (second, first) if swap.kept_second else (first, second)
    group = ranks.query_group
    there = [
        _Message(x[given], x.new_empty(half, *x.shape[1:]), swap.to, swap.source, group)
        for x in of_queries
    ]
    selected = select(kept, *(x[local] for x in of_queries))
    for_other = select(taken, *(message.wait() for message in there))
    indices = for_other.new_empty(2 * half, topk)
    back = _Message(for_other, indices[given], swap.source, swap.to, group)
    indices[local] = selected
    back.wait()
    return indices, (visible.end - visible.start).clamp_max(topk)


def worthwhile_swap(layout: Layout, topk: int, ratio: int, sharding: Sharding) -> Swap | None:
    """Return the exchange of halves, equal on all ranks, or ``None`` if it saves no time."""
    if sharding.ranks == 1 or layout.packed:
        return None
    assert layout.key_ownership is not None
    total = layout.all_tokens.num_queries // layout.key_ownership.batch
    mean_visible = total / 2 / ratio
    if mean_visible < VISIBLE_TO_TOPK * topk:
        return None
    swap = swap_of(sharding, total)
    return swap if swap is not None and swap.longest_to_mean > LONGEST_TO_MEAN else None


def halves(layout: Layout, swap: Swap, ratio: int) -> tuple[Layout, Layout]:
    kept, taken = (run_layout(layout, k * swap.size, swap.size) for k in (swap.kept, swap.taken))
    if ratio == 1:
        return kept, taken
    return visible_groups(kept, ratio), visible_groups(taken, ratio)


class _Message:
    def __init__(self, tokens: torch.Tensor, received: torch.Tensor, to: int, source: int, group):
        # Keep the tensor alive, since NCCL reads it on another stream.
        sent = tokens.contiguous()
        self._sent: torch.Tensor | None = sent
        self._received = received
        splits = [[0] * group.size() for _ in range(2)]
        for split, rank in zip(splits, (source, to), strict=True):
            split[rank] = tokens.shape[0]
        self._work: Any = torch.distributed.all_to_all_single(
            received, sent, splits[0], splits[1], group=group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self._work = self._sent = None
        return self._received
