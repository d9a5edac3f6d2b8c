"""Sparse attention through our TileLang kernels (bf16), without padding.

With at most 32 heads, adjacent queries share a tile and the union of their lists, where a
non-finite key spoils all queries.
"""

from dataclasses import dataclass

import torch

from megatron_dsa.ops.common.arithmetic import items_within, part_of, slices
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.hopper.sums import in_column_order, in_column_order_transposed, largest
from megatron_dsa.ops.sparse_attention.lists import ascending_lists, caller_lists, sorting_pays
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang.fixed_point import to_float, units_per_one
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels, Way, kernels_for
from megatron_dsa.ops.sparse_attention.tilelang.order import to_callers_lists
from megatron_dsa.ops.sparse_attention.torch import replace_negative_infinity


def forward(inputs: SparseAttentionInputs, kernels: Kernels | None = None):
    from megatron_dsa.ops.hopper.tiles import queries_per_tile

    q, kv, sink = inputs.q.contiguous(), inputs.kv.contiguous(), inputs.sink
    queries, heads, dim = q.shape
    kernels = kernels or kernels_for(q.device)
    group = queries_per_tile(heads, kernels.rows("forward"))
    out = torch.empty(queries, heads, inputs.v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernel = kernels.compiled("forward", heads, dim, inputs.v_dim, group, sink is not None)
    sink = torch.empty(1, device=q.device) if sink is None else sink.float().contiguous()
    for part, lists, _ in key_lists(inputs, group, kernels=kernels):
        flat = (part_of(x, part).flatten(0, 1) for x in (q, out, lse))
        kernel(next(flat), kv, *lists, sink, *flat, inputs.softmax_scale)
    return out, lse, None


def backward(
    inputs: SparseAttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    kernels: Kernels | None = None,
):
    """Return ``dq``, fp32 ``dkv``, optional fp32 ``dsink`` and optional ``p_sum``.

    ``dkv`` is ``None`` with ``inputs.key_sum``. In torch's deterministic mode results are bitwise
    repeatable (:mod:`.fixed_point`), unless a query lists a key twice.
    """
    from megatron_dsa.ops.hopper.tiles import head_tiles, queries_per_tile

    kernels, fixed = kernels or kernels_for(inputs.q.device), deterministic_mode()
    q, kv, sink = inputs.q.contiguous(), inputs.kv.contiguous(), inputs.sink
    out, dout = out.contiguous(), dout.to(q.dtype).contiguous()
    heads, tile = q.shape[1], kernels.rows("backward")
    way, group = kernels.way(heads, fixed), queries_per_tile(heads, tile)
    # The fp32 sum of two head tiles is the same in either order.
    sums_heads = inputs.want_p_sum and not (fixed and head_tiles(heads, tile) > 2)
    total = lse if sink is None else torch.logaddexp(lse, sink.float().expand_as(lse))
    total = total.contiguous()
    dq, delta = torch.empty_like(q), torch.empty_like(total)
    keys = _key_sum(inputs, way, fixed, out, dout)
    launch = _launch_two if way is Way.TWO else _launch_one
    p_sum = torch.empty_like(inputs.indices, dtype=torch.float32) if sums_heads else None
    ascending = sorting_pays(inputs)
    for part, lists, slots in key_lists(inputs, group, ascending, sums_heads, kernels):
        sums = None
        if sums_heads:
            count, width = lists[0].shape
            sums = torch.zeros(count, group, width, device=out.device)
        per_query = [part_of(x, part) for x in (q, out, dout, total, dq, delta)]
        launch(inputs, kernels, group, per_query, kv, keys, lists, sums)
        if p_sum is not None and sums is not None:
            length = None if inputs.topk_length is None else inputs.topk_length[part]
            to_callers_lists(
                p_sum[part], sums.flatten(0, 1), slots, inputs.indices[part], length,
                len(kv), inputs.workspace_bytes,
            )  # fmt: skip
        del sums
    dsink = None
    if sink is not None:
        # Queries without keys, with a sink of -inf, get gradient 0 instead of NaN.
        total = replace_negative_infinity(total, float("inf"))
        dsink = -(torch.exp(sink.float() - total) * delta).sum(0)
    return dq, keys.result() if inputs.key_sum is None else None, dsink, p_sum


@dataclass
class _KeySum:
    way: Way
    fixed: bool
    v_dim: int
    dkv: torch.Tensor
    units: torch.Tensor
    #: Addend that is NaN after a non-finite attention output, else 0.
    poison: torch.Tensor | float = 0.0

    def result(self) -> torch.Tensor:
        if self.fixed:
            units, one = self.units + self.poison, self.way is Way.ONE
            return to_float(self.dkv, units) if one else self.dkv.float().div_(units)
        match self.way:
            case Way.PORTABLE:
                return self.dkv
            case Way.ONE:
                return in_column_order(self.dkv)
            case Way.TWO:
                return in_column_order_transposed(self.dkv, self.v_dim)


def _key_sum(inputs: SparseAttentionInputs, way: Way, fixed: bool, out, dout) -> _KeySum:
    def new() -> _KeySum:
        dtype = torch.int64 if fixed else torch.float32
        dkv = torch.zeros_like(inputs.kv, dtype=dtype, memory_format=torch.contiguous_format)
        units = units_per_one(inputs, out, dout) if fixed else torch.empty(1, device=out.device)
        return _KeySum(way, fixed, inputs.v_dim, dkv, units)

    if inputs.key_sum is None:
        return new()
    keys = inputs.key_sum.buffer(new, _KeySum.result)
    if fixed:
        keys.poison = keys.poison + 0.0 * largest(out)
    return keys


def _launch_one(inputs, kernels: Kernels, group: int, per_query, kv, keys: _KeySum, lists, sums):
    heads, dim = per_query[0].shape[1:]
    kernel = kernels.compiled(
        "backward", heads, dim, inputs.v_dim, group, keys.fixed, sums is not None
    )
    q, out, dout, total, dq, delta = (x.flatten(0, 1) for x in per_query)
    sums = delta.new_empty(1, 1, 1) if sums is None else sums
    kernel(
        q, kv, out, dout, total, *lists, dq, keys.dkv, keys.units, delta, sums, inputs.softmax_scale
    )


def _launch_two(inputs, kernels: Kernels, _group: int, per_query, kv, keys: _KeySum, lists, sums):
    from megatron_dsa.ops.hopper.tiles import TILE, head_tiles

    heads, dim = per_query[0].shape[1:]
    ids, _, length = lists
    tiles, blocks = head_tiles(heads), -(-ids.shape[1] // TILE)
    step = _queries_at_once(inputs, tiles, blocks * tiles * 2 * TILE * TILE * 2)
    pds = kv.new_empty(step, blocks, tiles, 2, TILE, TILE)
    query_gradient = kernels.compiled("query_gradient", heads, dim, inputs.v_dim, sums is not None)
    key_gradient = kernels.compiled("key_gradient", heads, dim, inputs.v_dim, keys.fixed)
    unused = pds.new_empty(1, 1, 1, dtype=torch.float32)
    for some in slices(len(ids), step):
        q, out, dout, total, dq, delta = (x[some].flatten(0, 1) for x in per_query)
        listed, n, some_pds = ids[some], length[some], pds[: some.stop - some.start]
        query_gradient(
            q, kv, out, dout, total, listed, n, dq, some_pds, delta,
            unused if sums is None else sums[some], inputs.softmax_scale,
        )  # fmt: skip
        key_gradient(q, dout, listed, n, some_pds, keys.dkv, keys.units)


def _queries_at_once(inputs: SparseAttentionInputs, tiles: int, bytes_per_query: int) -> int:
    queries = inputs.indices.shape[0]
    step = items_within(inputs.workspace_bytes, bytes_per_query)
    if step < queries:
        wave = max(1, processors(inputs.q.device) // tiles)
        step = step // wave * wave or step
    return min(step, queries)


def key_lists(
    inputs: SparseAttentionInputs,
    group: int,
    ascending: bool = False,
    with_slots: bool = False,
    kernels: Kernels | None = None,
):
    """Yield slices of the queries, with the key lists that kernels read.

    Lists are ids int32 ``[lists, W]``, members uint8 ``[lists, W]`` and length int32 ``[lists]``;
    groups of several queries get unions (:mod:`.hopper.unions`). ``with_slots`` adds int32
    ``[queries, K]``: each valid entry's index in its list, ``None`` if unchanged.
    """
    queries, width = inputs.indices.shape
    unused = torch.empty(1, 1, dtype=torch.uint8, device=inputs.indices.device)
    if queries == 0:
        return
    if group == 1:
        slots = torch.empty_like(inputs.indices) if ascending and with_slots else None
        lists = ascending_lists(inputs, slots) if ascending else caller_lists(inputs)
        yield slice(0, queries), (lists[0], unused, lists[1]), slots
        return
    indices, length = caller_lists(inputs)
    form_unions = (kernels or kernels_for(indices.device)).unions(group, with_slots)
    capacity = group * width
    # Temporary bytes per list entry: id, members, head sums, int32 and int64 indices.
    bytes_per_group = capacity * (5 + (4 * group + 16 if with_slots else 0))
    groups = inputs.workspace_bytes // bytes_per_group
    if groups * group < queries:
        groups //= 2  # the caller still holds the previous lists in memory
        wave = 1 if indices.device.type == "cpu" else max(1, processors(indices.device))
        groups = groups // wave * wave or groups
    step = max(1, groups) * group
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        groups = -(-(part.stop - first) // group)
        ids = torch.empty(groups, capacity, dtype=torch.int32, device=indices.device)
        members = torch.empty_like(ids, dtype=torch.uint8)
        count = torch.empty(groups, dtype=torch.int32, device=indices.device)
        slots = torch.empty_like(indices[part] if with_slots else count[:1, None])
        form_unions(indices[part], length[part], ids, members, count, slots, inputs.kv.shape[0])
        yield part, (ids, members, count), slots if with_slots else None
