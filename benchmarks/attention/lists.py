"""Index lists of selected keys: random, or as similar as an indexer's."""

from collections.abc import Iterator

import torch

from megatron_dsa.testing.cases import Lists

#: Latest keys in every clustered list.
RECENT = 64
#: Share of the other keys that the next query keeps.
CLUSTERED_SHARE = 0.8
#: Random numbers drawn at once.
MOST_ELEMENTS = 2**26


def parse_distribution(text: str) -> tuple[str, float]:
    """Split ``"clustered:0.95"`` into kind and share; other kinds ignore the share."""
    kind, colon, share = text.partition(":")
    if kind in ("random", "sorted") and not colon:
        return kind, 0.0
    try:
        value = float(share) if colon else CLUSTERED_SHARE
    except ValueError:
        value = -1.0
    if kind == "clustered" and 0 <= value < 1:
        return kind, value
    raise ValueError(
        "a distribution must be random, sorted, clustered or clustered:SHARE with 0 <= SHARE < 1, "
        f"got {text!r}"
    )


def make_indices(distribution: str, queries: int, skv: int, topk: int, device, seed: int = 0):
    """Return int32 ``[queries, topk]``: distinct, valid keys per query.

    * ``random``: drawn uniformly, in random order, independent between queries.
    * ``sorted``: the same sets in ascending order.
    * ``clustered:SHARE``: see :func:`clustered_indices`; ascending, like an indexer's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    kind, share = parse_distribution(distribution)
    if kind == "clustered":
        return clustered_indices(queries, skv, topk, share, generator)
    indices = random_indices(queries, skv, topk, generator)
    return indices.sort(dim=1).values if kind == "sorted" else indices


def random_indices(queries: int, skv: int, topk: int, generator):
    """Draw ``topk`` of ``skv`` keys per query: indices of the largest of ``skv`` numbers."""
    device = generator.device
    indices = torch.empty(queries, topk, dtype=torch.int32, device=device)
    for rows in _chunks(queries, MOST_ELEMENTS // skv):
        noise = torch.rand(rows.stop - rows.start, skv, generator=generator, device=device)
        chosen = noise.topk(topk, dim=1, sorted=False).indices
        # The order of topk's indices depends on the device.
        order = torch.rand(chosen.shape, generator=generator, device=device).argsort(dim=1)
        indices[rows] = chosen.gather(1, order).int()
    return indices


def clustered_indices(queries: int, skv: int, topk: int, share: float, generator):
    """Draw the latest 64 keys of every query, and older keys that change slowly.

    Query ``t`` is at position ``skv - queries + t`` (at least ``topk - 1``, to fill its list). The
    other ``W = topk - 64`` entries are slots: slot ``w`` holds a key equal to ``w`` modulo ``W``,
    so that slots never collide, and moves on to the next one (cyclically) every ``1 / (1 - share)``
    queries on average, at a random phase. Keys ascend.
    """
    device = generator.device
    recent = min(RECENT, topk // 2)
    width = topk - recent
    slot = torch.arange(width, device=device)
    phase = torch.rand(width, generator=generator, device=device, dtype=torch.float64)
    start = torch.randint(2**40, (width,), generator=generator, device=device)
    indices = torch.empty(queries, topk, dtype=torch.int32, device=device)
    for rows in _chunks(queries, 2**23 // topk):
        t = torch.arange(rows.start, rows.stop, device=device)[:, None]
        moves = torch.floor(t * (1 - share) + phase).long()
        # Keys are drawn from those old at the slot's last move, so a slot changes only then.
        moved = torch.ceil((moves - phase) / (1 - share)).long().clamp_min(0)
        old = _position(moved, queries, skv, topk) + 1 - recent
        choices = (old - slot + width - 1) // width
        indices[rows, :width] = (slot + width * ((start + moves) % choices)).int()
        newest = _position(t, queries, skv, topk)
        indices[rows, width:] = (newest - torch.arange(recent, device=device)).int()
    return indices.sort(dim=1).values


def causal_lists(distribution: str, tokens: int, topk: int, device, seed: int = 0) -> Lists:
    """Return ascending lists of a causal sequence: all visible keys, or ``topk`` of more.

    ``random`` draws uniformly; ``clustered:SHARE``: see :func:`clustered_indices`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    kind, share = parse_distribution(distribution)
    position = torch.arange(tokens, device=device)
    length = (position + 1).clamp_max(topk).int()
    if kind == "clustered":  # queries with few visible keys list the first ones
        indices = clustered_indices(tokens, tokens, topk, share, generator)
        return Lists(indices, length, tokens)
    parts = []
    for part in position.split(max(1, MOST_ELEMENTS // tokens)):
        noise = torch.rand(len(part), tokens, generator=generator, device=device)
        noise.masked_fill_(position > part[:, None], -1.0)
        keys = noise.topk(topk, dim=1, sorted=False).indices
        parts.append(torch.where(keys > part[:, None], tokens, keys).sort(dim=1).values.int())
    return Lists(torch.cat(parts), length, tokens)


def _position(t, queries: int, skv: int, topk: int):
    return (skv - queries + t).clamp_min(topk - 1)


def _chunks(total: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for first in range(0, total, size):
        yield slice(first, min(total, first + size))
