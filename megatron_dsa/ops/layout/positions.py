"""Selections as positions, independent of ranks, packing and key buffers.

Rollout engines, files and other ranks exchange selections as *positions*, int32 ``[tokens, K]``:
positions of keys within the query's sequence, from 0, in any order, with ``-1`` for no key. At
ratio 4 a position is the number of a group. Padding tokens also have a list.
"""

from collections.abc import Iterator

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.common.arithmetic import items_within, slices
from megatron_dsa.ops.common.checks import require_tensor, require_values
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.sharding import Sharding

#: Value that replaces -1 to sort after every position.
_NONE = torch.iinfo(torch.int32).max
#: Temporary bytes per entry: sorted values and their order, masks, slots.
_BYTES_PER_ENTRY = 64
RULES = {
    "range": "entries must be -1 (no key) or positions from 0",
    "visible": "a query sees the keys of its own sequence up to itself only (ratio 4: the groups "
    "that end there)",
    "once": "a query must not list a key twice",
    "some": "a query that sees keys must list at least one",
    "ascending": "lists must be ascending with -1 last",
}


def check_form(indices: torch.Tensor, name: str = "indices") -> None:
    got = type(indices).__name__
    if fits := isinstance(indices, torch.Tensor):
        fits = indices.dtype == torch.int32 and indices.dim() == 2 and indices.shape[1] > 0
        got = f"{indices.dtype} {tuple(indices.shape)}"
    require(fits, f"{name} must be an int32 tensor [rows, K] with K > 0, got {got}")


def validate_indices(
    indices: torch.Tensor,
    layout: Layout,
    *,
    topk: int | None = None,
    ascending: bool = False,
    name: str = "indices",
    workspace_bytes: int = 2**28,
) -> None:
    """Check positions against a layout; synchronise with the device.

    Args:
        indices: positions, int32 ``[tokens, K]``. Lists of padding tokens are ignored.
        layout: layout of the query tokens, or ``compressed_keys(layout, 4).layout`` for compressed
            keys.
        topk: maximum ``K``.
        ascending: also require ascending lists with ``-1`` last, which replay does not need.

    Raises:
        ConfigError: a rule is broken; the message gives the first entry and the fix.
    """
    check_form(indices, name)
    require(
        len(indices) == layout.num_queries,
        f"{name} must have one row for each of the {layout.num_queries} query rows of the layout, "
        f"got {len(indices)}: padding counts, its rows are -1",
    )
    require(
        topk is None or indices.shape[1] <= topk,
        f"{name} must list at most {topk} keys per query (--dsa-indexer-topk), got "
        f"{indices.shape[1]}: select as many where the indices come from",
    )
    for tokens in _blocks(indices, workspace_bytes):
        given, seen = _real(indices[tokens], layout, tokens)
        for rule, broken, lists in _broken(given, _ordered(given), seen, ascending):
            if not broken.any():
                continue
            row, column = (int(x) for x in broken.nonzero()[0])
            raise ConfigError(
                f"{name}: {RULES[rule]}. Row {tokens.start + row}, whose query sees "
                f"{int(seen[row])} keys, breaks this with {_around(lists[row], column)}: fix what "
                "wrote the indices, or check that they belong to these tokens"
            )


def positions_to_indices(
    positions: torch.Tensor,
    keys: Layout,
    topk: int,
    *,
    name: str = "indices",
    workspace_bytes: int = 2**28,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert positions to the format of :func:`~megatron_dsa.dsa_kernels.indexer_topk`.

    Args:
        positions: int32 ``[num_queries, K]``, ``K <= topk``, on the layout's device.
        topk: width of the result.

    Raises:
        ConfigError: shape or dtype are wrong, or a rule of :func:`validate_indices` is broken. On a
            GPU a broken rule ends the process at its next synchronisation.
    """
    shape = (keys.num_queries, "K")
    require_tensor(name, positions, shape, (torch.int32,), keys.start, "give one list per token")
    require(
        positions.shape[1] <= topk,
        f"{name} must list at most {topk} keys per query, got {positions.shape[1]}: select as many "
        "where they come from",
    )
    count, width = positions.shape
    indices = positions.new_full((count, topk), -1)
    length = positions.new_empty(count)
    fine = torch.ones((), dtype=torch.bool, device=positions.device)
    for tokens in _blocks(positions, workspace_bytes):
        given, seen = _real(positions[tokens], keys, tokens)
        ordered = _ordered(given)
        for _, broken, _ in _broken(given, ordered, seen):
            fine &= ~broken.any()
        # Skip invalid positions, which the check below reports.
        valid = ordered < seen[:, None]
        slots = torch.where(valid, ordered + keys.start[tokens, None], -1)
        indices[tokens, :width] = keys.to_key_indices(slots)
        length[tokens] = valid.sum(-1, dtype=torch.int32)
    advice = "megatron_dsa.ops.layout.positions.validate_indices says which and where"
    rules = "; ".join(RULES[r] for r in list(RULES)[:4])
    require_values(
        {f"{name}: one of these rules is broken: {rules}. {advice}": fine},
        f"a rule for given indices is broken, {advice}: {name}",
    )
    return indices, length


def indices_to_positions(
    indices: torch.Tensor, keys: Layout, *, workspace_bytes: int = 2**28
) -> torch.Tensor:
    """Convert indices into the key buffer to positions, int32 ``[num_queries, K]``."""
    shape, fix = (keys.num_queries, "K"), "give one list per query token"
    require_tensor("indices", indices, shape, (torch.int32,), keys.start, fix)
    out = torch.empty_like(indices)
    slots_of = keys.slots_of_keys()
    for tokens in _blocks(indices, workspace_bytes):
        given = indices[tokens]
        slots = slots_of[given.clamp_min(0).long()].int()
        out[tokens] = torch.where(given < 0, -1, slots - keys.start[tokens, None])
    return out


def local_part(indices: torch.Tensor, layout: Layout, queries: Sharding, name: str) -> torch.Tensor:
    """Return the part of ``indices`` for this rank's queries."""
    total = layout.all_tokens.num_queries
    device = layout.start.device
    if len(indices) == layout.num_queries:
        return indices.to(device, non_blocking=True)
    require(
        len(indices) == total,
        f"{name} must have one row per query row of this rank ({layout.num_queries}) or of all "
        f"ranks ({total}), padding included, got {len(indices)}",
    )

    def tokens() -> torch.Tensor:
        keys = layout.key_ownership
        assert keys is not None
        step = keys.batch
        element = torch.arange(step, device=device)
        return (keys.of(queries)[:, None] * step + element).flatten()

    return indices.to(device, non_blocking=True)[layout.derive(("local rows", queries), tokens)]


def _blocks(indices: torch.Tensor, workspace_bytes: int) -> Iterator[slice]:
    at_once = items_within(workspace_bytes, _BYTES_PER_ENTRY * indices.shape[1])
    yield from slices(len(indices), at_once)


def _real(given: torch.Tensor, layout: Layout, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.real is not None:
        given = torch.where(layout.real[tokens, None].to(given.device), given, -1)
    return given, (layout.end[tokens] - layout.start[tokens]).to(given.device)


def _ordered(given: torch.Tensor) -> torch.Tensor:
    return torch.where(given < 0, _NONE, given).sort(dim=-1).values


def _broken(
    given: torch.Tensor, ordered: torch.Tensor, seen: torch.Tensor, ascending: bool = False
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield "range", given < -1, given
    yield "visible", given >= seen[:, None], given
    yield "once", (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != _NONE), ordered
    yield "some", (seen > 0)[:, None] & (ordered[:, :1] == _NONE), given
    if ascending:
        last = torch.where(given < 0, _NONE, given)
        yield "ascending", last[:, 1:] < last[:, :-1], given


def _around(row: torch.Tensor, column: int) -> str:
    first = max(0, column - 2)
    shown = row[first : column + 3].tolist()
    entries = ", ".join("-1" if x == _NONE else str(x) for x in shown)
    return f"[{'... ' * (first > 0)}{entries}{' ...' * (column + 3 < len(row))}]"
