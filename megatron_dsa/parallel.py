"""Collectives of the attention core: gathering keys, with an fp32 way back, and exchanging heads.

Under sequence and context parallelism each rank makes the keys of some rows. All ranks need all
keys, and the gradient of a key is the sum over all queries: over all ranks. Autograd would round
each rank's part to bf16 before that sum. :func:`gather_keys` therefore returns the keys together
with an fp32 tensor that stands for their gradient (a *channel*); the attention sends its fp32
accumulator there and it is rounded once, after the reduction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_dsa.ops.arithmetic import accumulation_dtype
from megatron_dsa.spread import Spread


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a microbatch.

    Attributes:
        spread: which rows this rank holds, and so makes keys of.
        group: all ranks that hold different rows; ``None`` if one holds all.
        tp: the part of ``group`` with one context-parallel rank (sequence parallelism), or
            ``None``.
        cp: the part of ``group`` at one place of sequence parallelism, or ``None``.
        by_rows: whether attention is computed for this rank's rows and all heads; otherwise for
            the rows of all of ``tp`` and the local heads.
    """

    spread: Spread = field(default_factory=Spread)
    group: object = None
    tp: object = None
    cp: object = None
    by_rows: bool = False

    @property
    def queries(self) -> Spread:
        """How query rows are spread."""
        return self.spread if self.by_rows else self.spread.whole()

    @property
    def query_group(self):
        """The ranks that have different query rows, or ``None``."""
        return self.group if self.by_rows else self.cp

    @property
    def row_group(self):
        """The ranks whose rows are put together for queries, or ``None``."""
        return None if self.by_rows else self.tp

    def own(self, tables):
        """Return the part of per-query-row tables that belongs to the rows this rank holds."""
        if self.row_group is None:
            return tables
        return tuple(table.chunk(self.spread.sp)[self.spread.sp_rank] for table in tables)


def ranks_of(config, pg_collection) -> Ranks:
    """Return the ranks of an attention module, from Megatron's process groups."""
    from megatron_dsa.config import by_rows, options_of

    tp = pg_collection.tp if config.sequence_parallel else None
    cp = pg_collection.cp if config.context_parallel_size > 1 else None
    if tp is not None and tp.size() == 1:
        tp = None
    spread = Spread(
        cp=1 if cp is None else cp.size(),
        cp_rank=0 if cp is None else cp.rank(),
        cp_layout=options_of(config).cp_layout,
        sp=1 if tp is None else tp.size(),
        sp_rank=0 if tp is None else tp.rank(),
    )
    group = tp if cp is None else cp
    if tp is not None and cp is not None:
        group = _both(pg_collection)
        if group.rank() != spread.rank:
            raise RuntimeError(
                "Megatron's tensor-and-context-parallel group has another order than tp before cp: "
                "create the process groups in the order 'tp-cp-ep-dp-pp'."
            )
    return Ranks(spread, group, tp, cp, by_rows(config))


def _both(pg_collection):
    group = getattr(pg_collection, "tp_cp", None)
    if group is None:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_and_context_parallel_group()
    return group


def gather_rows(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather ``x`` along dim 0 over ``group``, outside of autograd."""
    if group is None or group.size() == 1:
        return x.detach()
    gathered = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(gathered, x.detach().contiguous(), group=group)
    return gathered


def gather_same(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather rows for what every rank computes alike: in the backward it takes its rows."""
    if group is None or group.size() == 1:
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group)


def scatter_sum(x: torch.Tensor, group) -> torch.Tensor:
    """Return this rank's part (of equal parts along dim 0) of the sum of ``x`` over ``group``."""
    if group is None or group.size() == 1:
        return x
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    torch.distributed.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


def channel_for(keys: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Return a tensor without memory that stands for the fp32 gradient of ``rows`` keys."""
    rows = keys.shape[0] if rows is None else rows
    return keys.new_zeros((), dtype=accumulation_dtype(keys.dtype)).expand(rows, keys.shape[1])


def gather_keys(kv: torch.Tensor, group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of all ranks and a channel for their gradient.

    Args:
        kv: ``[rows / ranks, b, D]``, this rank's keys (all of them if ``group`` is ``None``).
        group: the ranks that hold different rows, or ``None``.

    Returns:
        ``keys [rows * b, D]`` without gradient, one rank's after the other, and ``channel [rows *
        b, D]`` in fp32 without content: what is sent to it as a gradient is summed over the group
        in fp32 and becomes kv's gradient.
    """
    return _GatherKeys.apply(kv, group)


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv, group):
        ctx.group, ctx.shape, ctx.dtype = group, kv.shape, kv.dtype
        keys = gather_rows(kv, group).flatten(0, -2)
        ctx.mark_non_differentiable(keys)
        return keys, channel_for(keys)

    @staticmethod
    def backward(ctx, _dkeys, dchannel):
        return scatter_sum(dchannel, ctx.group).view(ctx.shape).to(ctx.dtype), None


def gather_for_index(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All-gather the indexer's keys along dim 0; each rank gets the gradient of its own.

    Where attention runs by heads, the ranks of ``ranks.tp`` have the same query rows and form the
    same gradient: the sum is over ``ranks.cp`` alone.
    """
    if ranks.group is None:
        return x
    return _GatherForIndex.apply(x, ranks)


class _GatherForIndex(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return gather_rows(x, ranks.group)

    @staticmethod
    def backward(ctx, grad):
        ranks: Ranks = ctx.ranks
        wide = grad.to(accumulation_dtype(grad.dtype))
        if ranks.by_rows:
            return scatter_sum(wide, ranks.group).to(grad.dtype), None
        spread = ranks.spread
        own = wide.view(spread.cp, spread.sp, -1, *grad.shape[1:])[:, spread.sp_rank]
        return scatter_sum(own.flatten(0, 1), ranks.cp).to(grad.dtype), None


def to_rows(x: torch.Tensor, group) -> torch.Tensor:
    """Turn "all rows of the group, local heads" into "this rank's rows, all heads".

    Args:
        x: ``[rows * ranks, H / ranks, D]``.
        group: the tensor-parallel group; rows and heads lie in the order of its ranks.

    Returns:
        ``[rows, H, D]``. One all-to-all; its backward is :func:`to_heads`.
    """
    return _Exchange.apply(x, group, True)


def to_heads(x: torch.Tensor, group) -> torch.Tensor:
    """Turn ``[rows, H, D]`` into ``[rows * ranks, H / ranks, D]``; undoes :func:`to_rows`."""
    return _Exchange.apply(x, group, False)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, rows_out):
        ctx.group, ctx.rows_out = group, rows_out
        return _exchange(x, group, rows_out)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.group, not ctx.rows_out), None, None


def _exchange(x: torch.Tensor, group, rows_out: bool) -> torch.Tensor:
    ranks = group.size()
    rows, heads, dim = x.shape
    if rows_out:
        sent = x.contiguous().view(ranks, rows // ranks, heads, dim)
    else:
        sent = x.view(rows, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    if rows_out:
        return received.transpose(0, 1).reshape(rows // ranks, heads * ranks, dim)
    return received.view(rows * ranks, heads // ranks, dim)
