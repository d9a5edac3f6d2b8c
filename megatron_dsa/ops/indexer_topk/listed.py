"""Index scores of listed keys in torch, for what a first, rougher selection found; and lists."""

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, bmm, rows_in_budget
from megatron_dsa.ops.common.scaling import has_triton
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs
from megatron_dsa.ops.layout.layout import Seen


def scores(inputs: IndexerInputs, columns: torch.Tensor, workspace_bytes: int) -> torch.Tensor:
    """Return the scores ``[r, C]`` of each query against its own list of keys.

    Args:
        inputs: queries and weights of ``r`` rows, and the keys that the lists refer to.
        columns: int32 ``[r, C]``, rows of ``inputs.k``. Where it is negative the result may be
            anything.
        workspace_bytes: budget for gathered keys and products.
    """
    acc = accumulation_dtype(inputs.q.dtype)
    (rows, heads, dim), width = inputs.q.shape, columns.shape[1]
    out = inputs.q.new_empty(rows, width, dtype=acc)
    per_row = width * ((2 * dim + 2 * heads) * acc.itemsize + 8)
    rows_at_once = rows_in_budget(workspace_bytes, per_row)
    for first in range(0, rows, rows_at_once):
        part = slice(first, first + rows_at_once)
        keys = inputs.k[columns[part].clamp_min(0).long()]
        products = bmm(inputs.q[part], keys.transpose(1, 2))
        if inputs.relu:
            products.relu_()
        out[part] = torch.bmm(inputs.weights[part, None].to(acc), products).squeeze(1)
    return out


def chosen(columns: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return int32 ``[r, K]``: the entries of ``columns [r, C]`` at ``places [r, K]``, -1 where
    those are negative. All are int32.
    """
    if columns.is_cuda and places.shape[1] and has_triton():
        from megatron_dsa.ops.indexer_topk.triton import chosen as fused

        return fused(columns, places)
    entries = columns.gather(1, places.clamp_min(0).long())
    return torch.where(places < 0, places, entries)


def put(
    out: torch.Tensor,
    columns: torch.Tensor | None,
    seen: Seen,
    first: int,
    key_rows: torch.Tensor | None,
) -> None:
    """Write the selection of a block as key rows; one launch on a GPU.

    Args:
        out: int32 ``[tokens, K]``, rows of any stride; -1 where nothing is selected.
        columns: int32 ``[tokens, K]``, selected columns of the block, -1 for none. Queries that see
            no more than ``K`` get all that they see in their place. ``None``: all queries do.
        seen: what the queries see.
        first: slot of the block's first column.
        key_rows: int64, slot -> key row, or ``None`` for the identity.
    """
    topk = out.shape[1]
    if out.is_cuda and topk and has_triton():
        from megatron_dsa.ops.indexer_topk.triton import put as fused

        fused(out, columns, seen, first, key_rows)
        return
    found = seen.first(topk)
    if columns is not None:
        few = (seen.end - seen.start <= topk)[:, None]
        found = torch.where(few, found, columns, out=columns)
    slots = torch.where(found < 0, found, found + first)
    if key_rows is not None:
        rows = key_rows[slots.clamp_min(0).long()].to(slots.dtype)
        slots = torch.where(slots < 0, slots, rows)
    out.copy_(slots)
