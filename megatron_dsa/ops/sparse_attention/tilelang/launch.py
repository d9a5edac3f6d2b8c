"""Sparse attention through our own kernels (bf16).

Any width, ragged lengths, a sink, and any number of heads up to 128 need no padding; a kernel is
compiled per head count and dim at its first call. Up to 32 heads, a tile holds several adjacent
queries and reads the union of their lists; a key that is not finite then spoils all queries of the
tile, not only the one that selects it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_dsa.ops.common.arithmetic import rows_in_budget
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.hopper.fixed_point import largest
from megatron_dsa.ops.hopper.fragments import in_column_order, in_column_order_transposed
from megatron_dsa.ops.sparse_attention.lists import ascending_lists, caller_lists, sorting_pays
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang.fixed_point import to_float, units_per_one
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels, Way, kernels_for
from megatron_dsa.ops.sparse_attention.tilelang.order import to_callers_lists


def forward(inputs: SparseAttentionInputs, kernels: Kernels | None = None):
    """Return ``out`` (dtype of q), ``lse`` fp32 and ``None`` (no probabilities).

    ``kernels`` defaults to the GPU's; tests pass others.
    """
    from megatron_dsa.ops.hopper.tiles import queries_per_tile

    q, kv, sink = inputs.q.contiguous(), inputs.kv.contiguous(), inputs.sink
    queries, heads, dim = q.shape
    kernels = kernels or kernels_for(q.device)
    group = queries_per_tile(heads, kernels.forward_rows())
    out = torch.empty(queries, heads, inputs.v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernel = kernels.forward(heads, dim, inputs.v_dim, group, sink is not None)
    sink = torch.empty(1, device=q.device) if sink is None else sink.float().contiguous()
    for part, lists, _ in key_lists(inputs, group, kernels=kernels):
        rows = (x[part].flatten(0, 1) for x in (out, lse))
        kernel(q[part].flatten(0, 1), kv, *lists, sink, *rows, inputs.softmax_scale)
    return out, lse, None


def backward(
    inputs: SparseAttentionInputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    kernels: Kernels | None = None,
):
    """Return ``dq`` (dtype of q), ``dkv`` fp32, ``dsink`` fp32 or ``None``, ``p_sum`` or ``None``.

    ``dkv`` is ``None`` with ``inputs.key_sum``, to which the kernels add. In torch's deterministic
    mode equal inputs give bitwise equal gradients (:mod:`.fixed_point`), unless a query lists a key
    twice.
    """
    sink = inputs.sink
    plan = _plan(inputs, kernels or kernels_for(inputs.q.device))
    work = _backward_tensors(plan, inputs, out, lse, dout)
    launch = _two_kernels if plan.way is Way.TWO else _one_kernel
    p_sum, unused = None, torch.empty(1, 1, 1, device=out.device)
    if plan.sums_heads:
        p_sum = torch.empty_like(inputs.indices, dtype=torch.float32)
    ascending = sorting_pays(inputs)
    for part, lists, places in key_lists(
        inputs, plan.group, ascending, plan.sums_heads, plan.kernels
    ):
        sums = unused
        if plan.sums_heads:
            count, width = lists[0].shape
            sums = torch.zeros(count, plan.group, width, device=out.device)
        launch(plan, inputs, work, part, lists, sums)
        if plan.sums_heads:
            length = None if inputs.topk_length is None else inputs.topk_length[part]
            to_callers_lists(
                p_sum[part], sums.flatten(0, 1), places, inputs.indices[part], length,
                inputs.kv.shape[0], inputs.workspace_bytes,
            )  # fmt: skip
        del sums  # before the next part takes memory
    dsink = None
    if sink is not None:
        # A head without keys and with a sink of -inf has no probability: 0, not NaN.
        total = torch.where(work.total == float("-inf"), float("inf"), work.total)
        dsink = -(torch.exp(sink.float() - total) * work.delta).sum(0)
    dkv = None if inputs.key_sum is not None else _key_gradient(plan, inputs.v_dim, work.keys)
    return work.dq, dkv, dsink, p_sum


@dataclass
class _KeyBuffer:
    """Accumulator of the key gradient; ``units`` is the fixed-point scale."""

    dkv: torch.Tensor
    units: torch.Tensor
    #: 0, or NaN once an output is not finite in a call after the units were chosen.
    poison: torch.Tensor | float = 0.0


@dataclass(frozen=True)
class _Plan:
    """Kernels of a backward and their arguments.

    Attributes:
        group: queries of a tile.
        fixed_point: key gradients are 64-bit integers.
        sums_heads: the kernels also return ``p_sum``.
    """

    kernels: Kernels
    way: Way
    group: int
    fixed_point: bool
    sums_heads: bool


def _plan(inputs: SparseAttentionInputs, kernels: Kernels) -> _Plan:
    from megatron_dsa.ops.hopper.tiles import head_tiles, queries_per_tile

    heads, fixed, tile = inputs.q.shape[1], deterministic_mode(), kernels.backward_rows()
    return _Plan(
        kernels=kernels,
        way=kernels.way(heads, fixed),
        group=queries_per_tile(heads, tile),
        fixed_point=fixed,
        # The tiles of a query add in fp32: any order gives the same sum of two, not of more.
        sums_heads=inputs.want_p_sum and not (fixed and head_tiles(heads, tile) > 2),
    )


@dataclass(frozen=True)
class _Tensors:
    """Inputs and results of a backward for the kernels; ``total`` is lse with the sink."""

    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    total: torch.Tensor
    dq: torch.Tensor
    delta: torch.Tensor
    keys: _KeyBuffer

    def rows(self, part: slice) -> _Tensors:
        """Return tensors ``[queries * heads, ...]`` of some queries; tensors of keys stay."""
        per_query = ("q", "out", "dout", "total", "dq", "delta")
        return replace(
            self, **{name: getattr(self, name)[part].flatten(0, 1) for name in per_query}
        )


def _backward_tensors(plan: _Plan, inputs: SparseAttentionInputs, out, lse, dout) -> _Tensors:
    q, kv = inputs.q.contiguous(), inputs.kv.contiguous()
    out, dout = out.contiguous(), dout.to(q.dtype).contiguous()
    total = lse
    if inputs.sink is not None:
        total = torch.logaddexp(lse, inputs.sink.float().expand_as(lse))
    return _Tensors(
        q=q,
        kv=kv,
        out=out,
        dout=dout,
        total=total.contiguous(),
        dq=torch.empty_like(q),
        delta=torch.empty_like(lse, memory_format=torch.contiguous_format),
        keys=_key_buffer(plan, inputs, out, dout),
    )


def _key_buffer(plan: _Plan, inputs: SparseAttentionInputs, out, dout) -> _KeyBuffer:
    """Return zeros, or the buffer that the previous call added to."""
    fixed, shared = plan.fixed_point, inputs.key_sum

    def new() -> _KeyBuffer:
        dkv = torch.zeros_like(
            inputs.kv,
            dtype=torch.int64 if fixed else torch.float32,
            memory_format=torch.contiguous_format,
        )
        units = units_per_one(inputs, out, dout) if fixed else torch.empty(1, device=out.device)
        return _KeyBuffer(dkv, units)

    if shared is None:
        return new()
    v_dim = inputs.v_dim
    keys = shared.buffer(new, lambda keys: _key_gradient(plan, v_dim, keys))
    if fixed:
        keys.poison = keys.poison + 0.0 * largest(out)
    return keys


def _one_kernel(
    plan: _Plan, inputs: SparseAttentionInputs, work: _Tensors, part: slice, lists, sums
):
    heads, dim = work.q.shape[1:]
    kernel = plan.kernels.backward(
        heads, dim, inputs.v_dim, plan.group, plan.fixed_point, plan.sums_heads
    )
    x, scale = work.rows(part), inputs.softmax_scale
    kernel(
        x.q, x.kv, x.out, x.dout, x.total, *lists, x.dq, x.keys.dkv, x.keys.units, x.delta, sums,
        scale,
    )  # fmt: skip


def _two_kernels(
    plan: _Plan, inputs: SparseAttentionInputs, work: _Tensors, part: slice, lists, sums
):
    """Run all queries (``part``), as many at a time as their P and dS fit the workspace."""
    from megatron_dsa.ops.hopper.tiles import TILE, head_tiles

    heads, dim = work.q.shape[1:]
    ids, _, length = lists
    tiles, blocks = head_tiles(heads), -(-ids.shape[1] // TILE)
    step = _queries_at_once(inputs, tiles, blocks * tiles * 2 * TILE * TILE * 2)
    pds = work.q.new_empty(step, blocks, tiles, 2, TILE, TILE)
    first_half = plan.kernels.query_gradient(heads, dim, inputs.v_dim, plan.sums_heads)
    second_half = plan.kernels.key_gradient(heads, dim, inputs.v_dim, plan.fixed_point)
    for first in range(0, ids.shape[0], step):
        some = slice(first, first + step)
        x, listed, n = work.rows(some), ids[some], length[some]
        some_pds, some_sums = pds[: n.shape[0]], sums[some] if plan.sums_heads else sums
        first_half(
            x.q, x.kv, x.out, x.dout, x.total, listed, n, x.dq, some_pds, x.delta, some_sums,
            inputs.softmax_scale,
        )  # fmt: skip
        second_half(x.q, x.dout, listed, n, some_pds, x.keys.dkv, x.keys.units)


def _queries_at_once(inputs: SparseAttentionInputs, tiles: int, bytes_per_query: int) -> int:
    """Return the queries, of ``tiles`` thread blocks each, that fit the workspace."""
    queries = inputs.indices.shape[0]
    step = rows_in_budget(inputs.workspace_bytes, bytes_per_query)
    if step < queries:
        # As many thread blocks as fill the GPU some times over.
        wave = max(1, processors(inputs.q.device) // tiles)
        step = step // wave * wave or step
    return min(step, queries)


def _key_gradient(plan: _Plan, v_dim: int, keys: _KeyBuffer) -> torch.Tensor:
    """Return the accumulated gradient in fp32 and in column order."""
    dkv = keys.dkv
    if plan.fixed_point:
        units = keys.units + keys.poison
        return to_float(dkv, units) if plan.way is Way.ONE else dkv.float().div_(units)
    match plan.way:
        case Way.PORTABLE:
            return dkv
        case Way.ONE:
            return in_column_order(dkv)
        case Way.TWO:
            return in_column_order_transposed(dkv, v_dim)


def key_lists(
    inputs: SparseAttentionInputs,
    group: int,
    ascending: bool = False,
    with_places: bool = False,
    kernels: Kernels | None = None,
):
    """Yield parts of the queries (slices) with the lists of keys that the kernels read.

    The lists are: ids int32 ``[lists, W]``, members uint8 alike, length int32 ``[lists]``, see
    :mod:`.hopper.unions`. The unions of two parts fit ``inputs.workspace_bytes``. Groups of one
    query have the caller's lists and no members. Unions are always ``ascending``. The third result
    is int32 ``[queries, K]``, with ``with_places``: the index in its group's list of each valid
    entry of the caller's; ``None`` if that is the same index.
    """
    queries, width = inputs.indices.shape
    unused = torch.empty(1, 1, dtype=torch.uint8, device=inputs.indices.device)
    if queries == 0:
        return
    if group == 1:
        places = torch.empty_like(inputs.indices) if ascending and with_places else None
        lists = ascending_lists(inputs, places) if ascending else caller_lists(inputs)
        yield slice(0, queries), (lists[0], unused, lists[1]), places
        return
    indices, length = caller_lists(inputs)
    form_unions = (kernels or kernels_for(indices.device)).unions(group, with_places)
    capacity = group * width
    # Ids and members, the sums that go with places, and places with their int64 copy.
    bytes_per_group = capacity * (5 + (4 * group + 16 if with_places else 0))
    groups = inputs.workspace_bytes // bytes_per_group
    if groups * group < queries:
        groups //= 2  # the caller holds one part until it gets the next
        # As many thread blocks as run at once, some times over.
        wave = 1 if indices.device.type == "cpu" else max(1, processors(indices.device))
        groups = groups // wave * wave or groups
    step = max(1, groups) * group
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        groups = -(-(part.stop - first) // group)
        ids = torch.empty(groups, capacity, dtype=torch.int32, device=indices.device)
        members = torch.empty_like(ids, dtype=torch.uint8)
        count = torch.empty(groups, dtype=torch.int32, device=indices.device)
        places = torch.empty_like(indices[part] if with_places else count[:1, None])
        form_unions(indices[part], length[part], ids, members, count, places, inputs.kv.shape[0])
        yield part, (ids, members, count), places if with_places else None
