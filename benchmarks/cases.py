"""What the attention benchmark measures: model shapes, index lists, operations, FLOP counts.

Nothing here needs a GPU, and only the functions that make index lists need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

from megatron_dsa.metrics.flops import Keys

#: Every query selects this many keys right before it in a clustered list (fewer for a small K).
RECENT = 64
#: Share of the other keys of a clustered list that the next query keeps, unless said otherwise.
CLUSTERED_SHARE = 0.8


@dataclass(frozen=True)
class Preset:
    """One sparse layer: attention and indexer.

    Attributes:
        heads: query heads of one rank.
        qk_dim, v_dim: dims of a query (and key) and of a value.
        topk: keys selected per query.
        index_heads, index_dim: the indexer's.
        softmax_scale: factor on ``q . k``.
        sink: the softmax has a learned sink per head.
    """

    name: str
    heads: int
    qk_dim: int
    v_dim: int
    topk: int
    index_heads: int
    index_dim: int
    softmax_scale: float
    sink: bool = False


_V32 = Preset("v3.2", 128, 576, 512, 2048, 64, 128, 192**-0.5)
_PRESETS = (
    _V32,
    # What a rank holds of V3.2 with 2, 4 and 8 tensor-parallel ranks.
    replace(_V32, name="v3.2-h64", heads=64),
    replace(_V32, name="v3.2-h32", heads=32),
    replace(_V32, name="v3.2-h16", heads=16),
    replace(_V32, name="glm-5", heads=64, index_heads=32, softmax_scale=256**-0.5),
    # V4's lists hold the window of 128 keys and the selected compressed keys (512 or 1024).
    Preset("v4-flash", 64, 512, 512, 640, 64, 128, 512**-0.5, sink=True),
    Preset("v4-pro", 128, 512, 512, 1152, 64, 128, 512**-0.5, sink=True),
    # For trying the benchmark itself on any machine.
    Preset("tiny", 4, 48, 32, 16, 4, 16, 48**-0.5, sink=True),
)
PRESETS = {preset.name: preset for preset in _PRESETS}
DEFAULT_PRESETS = ("v3.2", "v3.2-h64", "v3.2-h32", "v3.2-h16", "v4-flash", "v4-pro")

#: Measured operation -> the dispatched operations that it runs.
PARTS = {
    "topk": ("indexer_scores", "indexer_topk"),
    "forward": ("sparse_attention_forward",),
    "teacher": ("sparse_attention_probabilities",),
    "loss": ("sparse_indexer_loss",),
    "backward": ("sparse_attention_backward",),
}
#: Measured once per group, as ceilings for everything else.
CEILINGS = ("gemm", "copy")


@dataclass(frozen=True)
class Group:
    """Measurements that share their inputs, and a process for as long as none of them kills it."""

    preset: str
    queries: int
    skv: int
    distribution: str

    def reason(self) -> str | None:
        """Return why there is no such group, with the fix, or ``None``."""
        topk = PRESETS[self.preset].topk
        if self.skv < max(topk, self.queries):
            return (
                f"--skv must be at least the number of queries ({self.queries}) and of selected "
                f"keys ({topk} for {self.preset}), got {self.skv}: raise it or lower --queries"
            )
        try:
            parse_distribution(self.distribution)
        except ValueError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Measurement:
    """One operation with one implementation for each of its parts (:data:`PARTS`)."""

    operation: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """``"cudnn"`` where all parts have the same implementation, else ``"cudnn+torch"``."""
        return "+".join(dict.fromkeys(self.names))

    def as_dict(self) -> dict:
        return asdict(self)


def groups(presets, lengths, distributions, queries: int) -> list[Group]:
    """All combinations, presets outermost; ``clustered`` gets its share, so that rows compare."""
    named = [f"clustered:{CLUSTERED_SHARE}" if d == "clustered" else d for d in distributions]
    return [Group(p, queries, s, d) for p, s, d in product(presets, lengths, named)]


def measurements(
    operations, known: Callable[[str], list[str]], wanted: list[str] | None = None
) -> list[Measurement]:
    """The ceilings, then every operation with every combination of implementations.

    Args:
        operations: keys of :data:`PARTS`.
        known: dispatched operation -> names of its implementations.
        wanted: only combinations whose fused parts all have one of these names; parts without one
            of them stay with torch. Torch throughout must be in the list itself.
    """
    found = [Measurement(name, ("torch",)) for name in CEILINGS]
    for operation in operations:
        for names in product(*(known(part) for part in PARTS[operation])):
            fused = set(names) - {"torch"} or {"torch"}
            if wanted is None or fused <= set(wanted):
                found.append(Measurement(operation, names))
    return found


def flops(operation: str, preset: Preset, queries: int, skv: int) -> int:
    """Floating-point operations of one call, counting selected (for top-k: visible) keys only."""
    p = preset
    selected, index = 2 * queries * p.topk, p.index_heads * p.index_dim
    counts = {
        "forward": selected * p.heads * (p.qk_dim + p.v_dim),
        "backward": selected * p.heads * (3 * p.qk_dim + 2 * p.v_dim),
        "teacher": selected * p.heads * p.qk_dim,
        # Query t stands at skv - queries + t and sees itself and everything before it.
        "topk": 2 * index * (Keys().pairs(skv) - Keys().pairs(skv - queries)),
        "loss": 3 * selected * index,
    }
    return counts[operation]


def parse_distribution(text: str) -> tuple[str, float]:
    """Split ``"clustered:0.95"`` into kind and share; the share of the others means nothing."""
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
    """Return int32 ``[queries, topk]``: distinct, valid key rows for every query.

    * ``random``: drawn uniformly from all keys, in random order, independent between queries.
    * ``sorted``: the same sets, each in ascending order.
    * ``clustered:SHARE``: see :func:`clustered_indices`; ascending, as an indexer returns them.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    kind, share = parse_distribution(distribution)
    if kind == "clustered":
        return clustered_indices(queries, skv, topk, share, generator)
    indices = random_indices(queries, skv, topk, generator)
    return indices.sort(dim=1).values if kind == "sorted" else indices


def random_indices(queries: int, skv: int, topk: int, generator):
    """``topk`` of ``skv`` keys for every query: the places of the largest of ``skv`` numbers."""
    import torch

    device = generator.device
    indices = torch.empty(queries, topk, dtype=torch.int32, device=device)
    for rows in _chunks(queries, 2**26 // skv):
        noise = torch.rand(rows.stop - rows.start, skv, generator=generator, device=device)
        chosen = noise.topk(topk, dim=1, sorted=False).indices
        # topk returns its places in an order that depends on the device; shuffle them.
        order = torch.rand(chosen.shape, generator=generator, device=device).argsort(dim=1)
        indices[rows] = chosen.gather(1, order).int()
    return indices


def clustered_indices(queries: int, skv: int, topk: int, share: float, generator):
    """The most recent 64 keys of every query, and older keys of which the next query keeps some.

    Query ``t`` stands at position ``skv - queries + t`` (at ``topk - 1`` if that is later: with
    fewer keys before it, a list could not be full) and selects only keys up to its position. The
    list's other ``W = topk - 64`` entries are slots: slot ``w`` holds a key that is ``w`` modulo
    ``W``, so that no two slots ever meet, starts at a random one of those and moves on to the next
    one (cyclically) after every ``1 / (1 - share)`` queries on average. The slots move at
    different queries, ``1 - share`` of them at each. Rows come in ascending order.
    """
    import torch

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
        # Keys are chosen among what was old when the slot moved last, so it moves only then.
        moved = torch.ceil((moves - phase) / (1 - share)).long().clamp_min(0)
        old = _position(moved, queries, skv, topk) + 1 - recent
        choices = (old - slot + width - 1) // width
        indices[rows, :width] = (slot + width * ((start + moves) % choices)).int()
        newest = _position(t, queries, skv, topk)
        indices[rows, width:] = (newest - torch.arange(recent, device=device)).int()
    return indices.sort(dim=1).values


def _position(t, queries: int, skv: int, topk: int):
    return (skv - queries + t).clamp_min(topk - 1)


def neighbour_share(indices) -> float:
    """Mean share of a query's keys that the next query selects as well."""
    import torch

    queries, topk = indices.shape
    shared = 0
    for rows in _chunks(queries - 1, 2**25 // topk):
        after = slice(rows.start + 1, rows.stop + 1)
        both = torch.cat([indices[rows], indices[after]], dim=1).sort(dim=1).values
        # No key is listed twice in a row, so equal neighbours come from the two rows.
        shared += int((both[:, 1:] == both[:, :-1]).sum())
    return shared / max(1, (queries - 1) * topk)


def _chunks(total: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for first in range(0, total, size):
        yield slice(first, min(total, first + size))
