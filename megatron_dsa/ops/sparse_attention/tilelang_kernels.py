"""Sparse attention through this package's own kernels (bf16), of which Hopper has its own.

Any width, ragged lengths, a sink, and any number of heads up to 128 need no padding and no other
kernel; one kernel is compiled per head count and dim, when it is first called. Up to 32 heads, a
tile of rows holds several adjacent queries and reads the union of their lists; a key that is not
finite then spoils all queries of the tile, not only the one that selects it.
"""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import deterministic_mode
from megatron_dsa.ops.arithmetic import rows_in_budget, valid_entries
from megatron_dsa.ops.sparse_attention import SparseProblem
from megatron_dsa.ops.sparse_attention.fixed_point import to_float, units_per_one
from megatron_dsa.ops.sparse_attention.fragments import in_column_order
from megatron_dsa.ops.sparse_attention.kernels import Kernels, kernels_for, target_of
from megatron_dsa.ops.sparse_attention.lists import (
    ascending_lists,
    caller_lists,
    gradient_exceeds_cache,
)


def forward(problem: SparseProblem, kernels: Kernels | None = None):
    """Return ``out`` (dtype of q), ``lse`` fp32 and ``None`` (no probabilities).

    Tests name ``kernels`` other than those of the GPU.
    """
    from megatron_dsa.ops.sparse_attention.hopper.tiles import queries_per_tile

    q, kv, sink = problem.q.contiguous(), problem.kv.contiguous(), problem.sink
    queries, heads, dim = q.shape
    kernels = kernels or kernels_for(q.device)
    group = queries_per_tile(heads, kernels.forward_rows())
    out = torch.empty(queries, heads, problem.v_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernel = kernels.forward(heads, dim, problem.v_dim, group, sink is not None)
    sink = torch.empty(1, device=q.device) if sink is None else sink.float().contiguous()
    for part, lists, _ in key_lists(problem, group):
        kernel(
            _rows(q[part]),
            kv,
            *lists,
            sink,
            _rows(out[part]),
            lse[part].view(-1),
            problem.softmax_scale,
        )
    return out, lse, None


def backward(
    problem: SparseProblem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    kernels: Kernels | None = None,
):
    """Return ``dq`` (dtype of q), ``dkv`` fp32, ``dsink`` fp32 or ``None``, ``p_sum`` or ``None``.

    In torch's deterministic mode equal inputs give bitwise equal gradients (:mod:`.fixed_point`),
    unless a query lists a key twice. Tests name ``kernels`` other than those of the GPU.
    """
    from megatron_dsa.ops.sparse_attention.hopper.tiles import head_tiles, queries_per_tile

    q, kv = problem.q.contiguous(), problem.kv.contiguous()
    queries, heads, dim = q.shape
    total, sink = lse, problem.sink
    if sink is not None:
        sink = sink.float()
        total = torch.logaddexp(lse, sink.expand_as(lse))
    total = total.contiguous()
    out, dout = out.contiguous(), dout.to(q.dtype).contiguous()
    fixed = deterministic_mode()
    units = units_per_one(problem, out, dout) if fixed else torch.empty(1, device=q.device)
    dq = torch.empty_like(q)
    dkv = torch.zeros(kv.shape, dtype=torch.int64 if fixed else torch.float32, device=q.device)
    delta = torch.empty(queries, heads, dtype=torch.float32, device=q.device)
    kernels = kernels or kernels_for(q.device)
    tile = kernels.backward_rows()
    group = queries_per_tile(heads, tile)
    # The tiles of a query add to its sums in fp32: any order gives the same for two, not for more.
    sums_heads = problem.want_p_sum and not (fixed and head_tiles(heads, tile) > 2)
    p_sum = torch.empty_like(problem.indices, dtype=torch.float32) if sums_heads else None
    sums = torch.empty(1, 1, 1, device=q.device)
    kernel = kernels.backward(heads, dim, problem.v_dim, group, fixed, sums_heads)
    ascending = gradient_exceeds_cache(kv)
    for part, lists, places in key_lists(problem, group, ascending, p_sum is not None):
        if p_sum is not None:
            count, width = lists[0].shape
            sums = torch.zeros(count, group, width, device=q.device)
        kernel(
            _rows(q[part]),
            kv,
            _rows(out[part]),
            _rows(dout[part]),
            total[part].view(-1),
            *lists,
            _rows(dq[part]),
            dkv,
            units,
            delta[part].view(-1),
            sums,
            problem.softmax_scale,
        )
        if p_sum is not None:
            _to_callers_lists(p_sum, sums, places, part, problem)
    dsink = None
    if sink is not None:
        # A head without any key and a sink of -inf has no probability to lose: 0, not NaN.
        share = torch.exp(sink - torch.where(total == float("-inf"), float("inf"), total))
        dsink = -(share * delta).sum(0)
    if kernels.tiles is not None:
        dkv = dkv.float().div_(units) if fixed else dkv
    else:
        dkv = to_float(dkv, units) if fixed else in_column_order(dkv)
    return dq, dkv, dsink, p_sum


def _to_callers_lists(p_sum, sums, places, part, problem) -> None:
    """Fill ``p_sum[part]``, one for each entry of the caller's, from sums ``[lists, group, W]``."""
    sums = sums.view(-1, sums.shape[-1])
    # Per entry: validity, masked and int64 places, the result twice.
    step = rows_in_budget(problem.workspace_bytes, p_sum.shape[1] * 24)
    for first in range(part.start, part.stop, step):
        rows = slice(first, min(first + step, part.stop))
        own = slice(rows.start - part.start, rows.stop - part.start)
        length = None if problem.topk_length is None else problem.topk_length[rows]
        valid = valid_entries(problem.indices[rows], length, problem.kv.shape[0])
        found = sums[own]
        if places is not None:
            found = found.gather(1, torch.where(valid, places[own], 0).long())
        p_sum[rows] = torch.where(valid, found, 0.0)


def key_lists(
    problem: SparseProblem, group: int, ascending: bool = False, with_places: bool = False
):
    """Yield parts of the queries (slices) with the lists of keys that the kernels read for them.

    The lists are: ids int32 ``[lists, W]``, members uint8 alike, length int32 ``[lists]``, as
    :mod:`.hopper.unions` describes; they come in parts, so that unions fit
    ``problem.workspace_bytes``. Groups of one query have the caller's lists and no members. Unions
    are always ``ascending``. The third result is int32 ``[queries, K]`` or ``None``: where in its
    group's list each valid entry of the caller's is, if that is wanted and another place.
    """
    queries, width = problem.indices.shape
    unused = torch.empty(1, 1, dtype=torch.uint8, device=problem.indices.device)
    if queries == 0:
        return
    if group == 1:
        places = torch.empty_like(problem.indices) if ascending and with_places else None
        lists = ascending_lists(problem, places) if ascending else caller_lists(problem)
        yield slice(0, queries), (lists[0], unused, lists[1]), places
        return
    from megatron_dsa.ops.sparse_attention.hopper.unions import compiled

    indices, length = caller_lists(problem)
    capacity = group * width
    # Ids and members, the sums that go with places, and places with their int64 copy.
    bytes_per_group = capacity * (5 + (4 * group + 16 if with_places else 0))
    step = max(1, problem.workspace_bytes // bytes_per_group) * group
    for first in range(0, queries, step):
        part = slice(first, min(first + step, queries))
        groups = -(-(part.stop - first) // group)
        ids = torch.empty(groups, capacity, dtype=torch.int32, device=indices.device)
        members = torch.empty_like(ids, dtype=torch.uint8)
        count = torch.empty(groups, dtype=torch.int32, device=indices.device)
        places = torch.empty_like(indices[part]) if with_places else unused.int()
        compiled(group, with_places, target_of(indices.device))(
            indices[part], length[part], ids, members, count, places, problem.kv.shape[0]
        )
        yield part, (ids, members, count), places if with_places else None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, x.shape[-1])
