"""Ranks that share a microbatch, and their collectives."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_dsa.config.model import options_of
from megatron_dsa.config.options import TPMode
from megatron_dsa.layers.parallel.gather import (
    Gathering,
    finish_with_gradient,
    finish_with_proxy,
    start_gather,
)
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.collectives import all_gather_async, reduce_scatter_async, several
from megatron_dsa.ops.dispatch import count
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.sharding import Sharding, sharded_layout


@dataclass(frozen=True)
class Ranks:
    """Tensor- and context-parallel ranks that share a microbatch.

    Ranks compute keys of local tokens and gather all keys. *Query tokens* are the indexer's tokens
    and depend on ``tp_mode`` (in the table, ``tp`` means all tokens of the group ``tp``):

    ============  ================  ==================  =====  ===========  ============
    tp_mode       indexer's tokens  attention's tokens  heads  indexer_tp   attention_tp
    ============  ================  ==================  =====  ===========  ============
    ``heads``     tp                tp                  local  ``tp``       ``None``
    ``sequence``  local             local               all    ``None``     ``None``
    ``select``    local             tp                  local  ``None``     ``tp``
    ============  ================  ==================  =====  ===========  ============

    Attributes (groups are ``None`` for one rank):
        group: ranks with different tokens.
        tp: ranks of ``group`` with the same context-parallel index (sequence parallelism).
        cp: ranks of ``group`` with the same tensor-parallel index.
        indexer_tp: ranks that gather tokens before the indexer.
        attention_tp: ranks that gather tokens between indexer and attention.
        query_group: ranks with different query tokens.
    """

    sharding: Sharding = field(default_factory=Sharding)
    group: object = None
    tp: Any = None
    cp: Any = None
    tp_mode: TPMode = "heads"

    by_sequence: bool = field(init=False)
    indexer_tp: Any = field(init=False)
    attention_tp: Any = field(init=False)
    query_sharding: Sharding = field(init=False)
    query_group: Any = field(init=False)

    def __post_init__(self):
        by_heads = self.tp_mode == "heads"
        for name, value in {
            "by_sequence": self.tp_mode == "sequence",
            "indexer_tp": self.tp if by_heads else None,
            "attention_tp": self.tp if self.tp_mode == "select" else None,
            "query_sharding": self.sharding.whole() if by_heads else self.sharding,
            "query_group": self.cp if by_heads else self.group,
        }.items():
            object.__setattr__(self, name, value)

    def count(self) -> None:
        if self.tp is not None:
            count("tensor_parallel_attention", self.tp_mode)
        if self.cp is not None:
            count("context_parallel_attention", self.sharding.cp_layout)

    def held(self, tables) -> Any:
        return tuple(self._part(table, self.indexer_tp) for table in tables)

    def queries_of(self, x: torch.Tensor) -> torch.Tensor:
        return self._part(x, self.attention_tp)

    def _part(self, x: torch.Tensor, gathered_by) -> torch.Tensor:
        return x if gathered_by is None else x.chunk(self.sharding.sp)[self.sharding.sp_rank]

    def attention_layout(self, layout: Layout) -> Layout:
        if self.attention_tp is None:
            return layout
        keys, whole = layout.key_ownership, self.sharding.whole()
        assert keys is not None
        return layout.derive(
            "attention's tokens", lambda: sharded_layout(layout.all_tokens, whole, keys)
        )


def ranks_of(config, pg_collection, tp_mode: TPMode) -> Ranks:
    tp = pg_collection.tp if config.sequence_parallel and pg_collection.tp.size() > 1 else None
    cp = pg_collection.cp if config.context_parallel_size > 1 else None
    sharding = Sharding(
        cp=1 if cp is None else cp.size(),
        cp_rank=0 if cp is None else cp.rank(),
        cp_layout=options_of(config).cp_layout,
        sp=1 if tp is None else tp.size(),
        sp_rank=0 if tp is None else tp.rank(),
    )
    group = tp if cp is None else cp
    if tp is not None and cp is not None:
        group = getattr(pg_collection, "tp_cp", None)
        if group is None:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_and_context_parallel_group()
        if group.rank() != sharding.rank:
            raise RuntimeError(
                "Megatron's tensor-and-context-parallel group has another order than tp before cp: "
                "create the process groups in the order 'tp-cp-ep-dp-pp'."
            )
    return Ranks(sharding, group, tp, cp, tp_mode)


def gather_detached(x: torch.Tensor, group) -> torch.Tensor:
    return all_gather_async(x, group).wait()


def gather_same(x: torch.Tensor, group) -> torch.Tensor:
    """All-gather tokens; the backward slices the gradient, which all ranks share."""
    if not several(group):
        return x
    return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group)


def scatter_sum(x: torch.Tensor, group) -> torch.Tensor:
    return reduce_scatter_async(x, group).wait()


def gather_keys(kv: torch.Tensor, group) -> tuple[torch.Tensor, torch.Tensor]:
    return finish_with_proxy(start_gather(kv, group))


def finish_index_gather(gathering: Gathering, ranks: Ranks) -> torch.Tensor:
    """Return the indexer's keys of all ranks; the backward returns the gradient of local keys.

    In mode ``heads``, ``ranks.tp`` have equal gradients, so only ``ranks.cp`` sum them.
    """
    if ranks.indexer_tp is None:
        return finish_with_gradient(gathering)
    sharding = ranks.sharding

    def local(grad: torch.Tensor) -> torch.Tensor:
        parts = grad.view(sharding.cp, sharding.sp, -1, grad.shape[1])
        return parts[:, sharding.sp_rank].flatten(0, 1)

    return finish_with_gradient(gathering, local, ranks.cp)


def heads_to_sequence(x: torch.Tensor, group) -> torch.Tensor:
    """Reshard ``[tokens * ranks, H / ranks, D]`` to ``[tokens, H, D]`` by an all-to-all."""
    return _Exchange.apply(x, group, True)


def sequence_to_heads(x: torch.Tensor, group) -> torch.Tensor:
    return _Exchange.apply(x, group, False)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, to_sequence):
        ctx.group, ctx.to_sequence = group, to_sequence
        return _exchange(x, group, to_sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _exchange(grad, ctx.group, not ctx.to_sequence), None, None


def _exchange(x: torch.Tensor, group, to_sequence: bool) -> torch.Tensor:
    ranks = group.size()
    tokens, heads, dim = x.shape
    if to_sequence:
        sent = x.contiguous().view(ranks, tokens // ranks, heads, dim)
    else:
        sent = x.view(tokens, ranks, heads // ranks, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    if to_sequence:
        return received.transpose(0, 1).reshape(tokens // ranks, heads * ranks, dim)
    return received.view(tokens * ranks, heads // ranks, dim)
