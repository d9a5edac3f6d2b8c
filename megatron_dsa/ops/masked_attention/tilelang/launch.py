"""Launches of masked dense attention on Hopper, in bf16 with dims of V3.2, GLM-5 or GLM-5.3.

The workspace limits the number of heads per launch of the backward, by their fp32 dq.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import deterministic_mode
from megatron_dsa.ops.dispatch.gpus import processors
from megatron_dsa.ops.masked_attention.spec import GROUP, ListedProbabilities, MaskedAttentionInputs
from megatron_dsa.ops.masked_attention.tilelang import backward as backward_program
from megatron_dsa.ops.masked_attention.tilelang import forward as forward_program
from megatron_dsa.ops.masked_attention.tilelang import probabilities as probabilities_program
from megatron_dsa.ops.masked_attention.tilelang import value_gradient as value_program
from megatron_dsa.ops.masked_attention.tilelang.tiles import Dims
from megatron_dsa.ops.masked_attention.triton.numbers import (
    keys_before,
    listed_keys,
    numbers,
    round_gradient,
)
from megatron_dsa.ops.masked_attention.triton.tiles import Tiles, tiles_for


def forward(inputs: MaskedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call.of(inputs)
    queries, heads = call.q.shape[:2]
    out = call.q.new_empty(queries, heads, inputs.v_dim)
    lse = call.q.new_empty(queries, heads, dtype=torch.float32)
    if queries > 0 and len(call.kv) > 0:
        tiles = _tiles(inputs, with_queries=False)
        forward_program.compiled(*call.dims)(
            call.q, call.kv, call.k_pe, inputs.bits, tiles.key_groups, tiles.key_group_count, out,
            lse, inputs.softmax_scale, call.heads_together(len(tiles.key_groups)),
        )  # fmt: skip
    else:
        out.zero_()
        lse.fill_(float("-inf"))
    return out, lse


def backward(
    inputs: MaskedAttentionInputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Call.of(inputs)
    q, kv, k_pe, rope = call.q, call.kv, call.k_pe, call.dims[1]
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    if len(q) == 0 or len(kv) == 0:
        return dq.zero_(), dkv.zero_(), torch.zeros_like(inputs.k_pe, dtype=torch.float32)
    dout = dout.to(q.dtype).contiguous()
    tiles = _tiles(inputs, with_queries=True)
    per_query = numbers(lse, out.contiguous(), dout)
    ordered = deterministic_mode()
    order = _order(tiles, ordered)
    kernel = backward_program.compiled(*call.dims, ordered)
    together = call.heads_together(len(tiles.bits_t) // GROUP)
    lists = tiles.bits_t, tiles.query_blocks, tiles.query_block_count
    if Dims(*call.dims).tiling.split:
        value_program.compiled(*call.dims)(
            q, kv, k_pe, dout, per_query, *lists, dkv, inputs.softmax_scale, together
        )
    dk_pe = None
    for part in inputs.head_parts():
        count = part.stop - part.start
        sums = q.new_zeros(len(q), count, q.shape[2], dtype=torch.float32)
        dk_rope = k_pe.new_empty(len(kv), count, max(rope, 1))
        kernel(
            q, kv, k_pe, dout, per_query, *lists, _turns(order, count, ordered), order, sums,
            dkv, dk_rope, part.start, inputs.softmax_scale, together,
        )  # fmt: skip
        round_gradient(dq, sums, part.start, inputs.softmax_scale)
        total = dk_rope[..., :rope].sum(1, dtype=torch.float32)
        dk_pe = total if dk_pe is None else dk_pe.add_(total)
        del sums, dk_rope, total
    # Head sums do not need the transposed bits, which are large.
    inputs.kept["tiles"] = Tiles(tiles.key_groups, tiles.key_group_count)
    inputs.kept["numbers"] = lse, per_query
    assert dk_pe is not None
    return dq, dkv, dk_pe


def probabilities(
    inputs: MaskedAttentionInputs, lse: torch.Tensor, width: int, listed: slice
) -> ListedProbabilities:
    queries, heads = inputs.q.shape[:2]
    p_sum = inputs.q.new_zeros(queries, width, dtype=torch.float32)
    bits = inputs.bits.contiguous()
    before, length = keys_before(bits)
    if p_sum.numel() > 0 and len(inputs.kv) > 0:
        part = inputs.part or queries
        if part % GROUP == 0 or part == queries:
            _add_probabilities(inputs, lse, before, p_sum, 0, part)
        else:  # a tile must not span two parts
            for i, some in enumerate(slices(queries, part)):
                of_part = inputs.of_queries(some)
                _add_probabilities(of_part, lse[some], before[some], p_sum[some], i * heads, part)
    length = length[listed]
    indices = listed_keys(bits[listed], before[listed], length, width)
    return ListedProbabilities(p_sum, indices, length)


def _add_probabilities(inputs: MaskedAttentionInputs, lse, before, p_sum, key_head: int, part: int):
    call, tiles = _Call.of(inputs), _tiles(inputs, with_queries=False)
    probabilities_program.compiled(*call.dims)(
        call.q, call.kv, call.k_pe, _lse(inputs, lse), inputs.bits.contiguous(), before,
        tiles.key_groups, tiles.key_group_count, p_sum, key_head, part, inputs.softmax_scale,
    )  # fmt: skip


@dataclass(frozen=True)
class _Call:
    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    dims: tuple[int, int, int]

    @classmethod
    def of(cls, inputs: MaskedAttentionInputs) -> _Call:
        q, kv, k_pe = (x.contiguous() for x in (inputs.q, inputs.kv, inputs.k_pe))
        dims = inputs.nope_dim, k_pe.shape[1], inputs.v_dim
        # Kernels do not accept an empty k_pe, even if there is no rope.
        return cls(q, kv, k_pe if dims[1] > 0 else k_pe.new_empty(1, 1), dims)

    def heads_together(self, blocks: int) -> int:
        """Return how many heads fill the GPU once, so that their blocks share keys in L2."""
        return max(1, processors(self.q.device) // blocks)


def _tiles(inputs: MaskedAttentionInputs, with_queries: bool) -> Tiles:
    found = inputs.kept.get("tiles")
    if found is None or (with_queries and found.bits_t is None):
        found = inputs.kept["tiles"] = tiles_for(inputs.bits, len(inputs.kv), with_queries)
    return found


def _lse(inputs: MaskedAttentionInputs, lse: torch.Tensor) -> torch.Tensor:
    before, found = inputs.kept.pop("numbers", (None, None))
    return found if before is lse else numbers(lse, None, None)


def _order(tiles: Tiles, ordered: bool) -> torch.Tensor:
    ids, count = tiles.query_blocks, tiles.query_block_count
    if not ordered:
        return ids.new_empty(1, 1)
    blocks, columns = ids.shape
    listed = torch.arange(columns, device=ids.device) < count[:, None]
    ids = torch.where(listed, ids, 0).long()
    present = torch.zeros(blocks, columns, dtype=torch.int32, device=ids.device)
    present.scatter_add_(1, ids, listed.int())
    later = present.flip(0).cumsum(0, dtype=torch.int32).flip(0) - present
    return later.gather(1, ids)


def _turns(order: torch.Tensor, heads: int, ordered: bool) -> torch.Tensor:
    if not ordered:
        return order.new_empty(1, 1, 2)
    return order.new_zeros(heads, order.shape[1], 2)
