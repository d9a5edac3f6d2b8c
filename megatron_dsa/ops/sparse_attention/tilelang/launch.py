"""Sparse attention through this package's own kernels (bf16), of which Hopper has its own.

Any width, ragged lengths, a sink, and any number of heads up to 128 need no padding and no other
kernel; one kernel is compiled per head count and dim, when it is first called. Up to 32 heads, a
tile of rows holds several adjacent queries and reads the union of their lists; a key that is not
finite then spoils all queries of the tile, not only the one that selects it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_dsa.ops.common.arithmetic import rows_in_budget
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.hopper.fixed_point import largest
from megatron_dsa.ops.hopper.fragments import (
    in_column_order,
    in_column_order_transposed,
)
from megatron_dsa.ops.sparse_attention.lists import ascending_lists, caller_lists, sorting_pays
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang.fixed_point import to_float, units_per_one
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels, kernels_for
from megatron_dsa.ops.sparse_attention.tilelang.order import to_callers_lists


def forward(inputs: SparseAttentionInputs, kernels: Kernels | None = None):
    """Return ``out`` (dtype of q), ``lse`` fp32 and ``None`` (no probabilities).

    Tests name ``kernels`` other than those of the GPU.
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
    twice. Tests name ``kernels`` other than those of the GPU.
    """
    sink = inputs.sink
    plan = _plan(inputs, kernels or kernels_for(inputs.q.device))
    work = _backward_tensors(plan, inputs, out, lse, dout)
    launch = _two_kernels if plan.in_two else _one_kernel
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
        # A head without any key and a sink of -inf has no probability to lose: 0, not NaN.
        total = torch.where(work.total == float("-inf"), float("inf"), work.total)
        dsink = -(torch.exp(sink.float() - total) * work.delta).sum(0)
    dkv = None if inputs.key_sum is not None else _key_gradient(plan, inputs.v_dim, work.sums)
    return work.dq, dkv, dsink, p_sum


@dataclass
class _KeySums:
    """What kernels add the key gradient to, and how many integers of it are one."""

    dkv: torch.Tensor
    units: torch.Tensor
    #: 0, or NaN once an output is not finite in a call after the units were chosen.
    poison: torch.Tensor | float = 0.0


@dataclass(frozen=True)
class _Plan:
    """How a backward runs: queries per tile, and what its kernels were compiled with."""

    kernels: Kernels
    group: int
    fixed_point: bool
    sums_heads: bool
    in_two: bool


def _plan(inputs: SparseAttentionInputs, kernels: Kernels) -> _Plan:
    from megatron_dsa.ops.hopper.tiles import head_tiles, queries_per_tile

    heads, fixed, tile = inputs.q.shape[1], deterministic_mode(), kernels.backward_rows()
    return _Plan(
        kernels,
        queries_per_tile(heads, tile),
        fixed,
        # The tiles of a query add in fp32: any order gives the same sum of two, not of more.
        inputs.want_p_sum and not (fixed and head_tiles(heads, tile) > 2),
        kernels.in_two(heads, fixed),
    )


@dataclass(frozen=True)
class _Tensors:
    """Inputs and results of a backward as kernels take them; ``total`` is lse with the sink."""

    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    total: torch.Tensor
    dq: torch.Tensor
    delta: torch.Tensor
    sums: _KeySums

    def rows(self, part: slice) -> _Tensors:
        """Return the rows ``[queries * heads, ...]`` of some queries; what is per key stays."""
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
        sums=_key_sums(plan, inputs, out, dout),
    )


def _key_sums(plan: _Plan, inputs: SparseAttentionInputs, out, dout) -> _KeySums:
    """Return what the kernels add to: new zeros, or what the call before has added to."""
    fixed, shared = plan.fixed_point, inputs.key_sum

    def new() -> _KeySums:
        dkv = torch.zeros_like(
            inputs.kv,
            dtype=torch.int64 if fixed else torch.float32,
            memory_format=torch.contiguous_format,
        )
        units = units_per_one(inputs, out, dout) if fixed else torch.empty(1, device=out.device)
        return _KeySums(dkv, units)

    if shared is None:
        return new()
    v_dim = inputs.v_dim
    sums = shared.accumulator(new, lambda sums: _key_gradient(plan, v_dim, sums))
    if fixed:
        sums.poison = sums.poison + 0.0 * largest(out)
    return sums


def _one_kernel(
    plan: _Plan, inputs: SparseAttentionInputs, work: _Tensors, part: slice, lists, sums
):
    heads, dim = work.q.shape[1:]
    kernel = plan.kernels.backward(
        heads, dim, inputs.v_dim, plan.group, plan.fixed_point, plan.sums_heads
    )
    x, scale = work.rows(part), inputs.softmax_scale
    kernel(
        x.q, x.kv, x.out, x.dout, x.total, *lists, x.dq, x.sums.dkv, x.sums.units, x.delta, sums,
        scale,
    )  # fmt: skip


def _two_kernels(
    plan: _Plan, inputs: SparseAttentionInputs, work: _Tensors, part: slice, lists, sums
):
    """All queries (``part``), as many at a time as their P and dS fit in the workspace."""
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
        x, own, n, scale = work.rows(some), ids[some], length[some], inputs.softmax_scale
        own_pds, own_sums = pds[: n.shape[0]], sums[some] if plan.sums_heads else sums
        first_half(
            x.q, x.kv, x.out, x.dout, x.total, own, n, x.dq, own_pds, x.delta, own_sums, scale
        )
        second_half(x.q, x.dout, own, n, own_pds, x.sums.dkv, x.sums.units)


def _queries_at_once(inputs: SparseAttentionInputs, tiles: int, bytes_per_query: int) -> int:
    """Return how many queries, of ``tiles`` thread blocks each, fit in the workspace at a time."""
    queries = inputs.indices.shape[0]
    step = rows_in_budget(inputs.workspace_bytes, bytes_per_query)
    if step < queries:
        # As many thread blocks as fill the GPU some times over.
        wave = max(1, processors(inputs.q.device) // tiles)
        step = step // wave * wave or step
    return min(step, queries)


def _key_gradient(plan: _Plan, v_dim: int, sums: _KeySums) -> torch.Tensor:
    """Bring what the kernels have added up to fp32 in column order."""
    dkv = sums.dkv
    if plan.fixed_point:
        units = sums.units + sums.poison
        in_order = plan.in_two or plan.kernels.tiles
        return dkv.float().div_(units) if in_order else to_float(dkv, units)
    if plan.in_two:
        return in_column_order_transposed(dkv, v_dim)
    return dkv if plan.kernels.tiles else in_column_order(dkv)


def key_lists(
    inputs: SparseAttentionInputs,
    group: int,
    ascending: bool = False,
    with_places: bool = False,
    kernels: Kernels | None = None,
):
    """Yield parts of the queries (slices) with the lists of keys that the kernels read for them.

    The lists are: ids int32 ``[lists, W]``, members uint8 alike, length int32 ``[lists]``, as
    :mod:`.hopper.unions` describes; they come in parts, so that unions fit
    ``inputs.workspace_bytes``, with those of the part before. Groups of one query have the
    caller's lists and no members. Unions are always ``ascending``. The third result is int32
    ``[queries, K]`` or ``None``: where in its group's list each valid entry of the caller's is, if
    that is wanted and another place.
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
