"""Targets of multi-token prediction stay within separately padded documents."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor

from megatron_dsa.ops.layout.sharding import Sharding
from megatron_dsa.patches.prediction import shift_within_padded_documents
from tests.processes import run_ranks

shift_within_padded_documents()

#: A document without tokens, one without padding, and tokens after the last document.
LENGTHS, PADDED, TOKENS = [5, 0, 8, 10], [8, 0, 8, 16], 40


def packed(lengths=LENGTHS, padded=PADDED) -> PackedSeqParams:
    real, offsets = (
        torch.tensor([0, *numbers], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for numbers in (lengths, padded)
    )
    return PackedSeqParams("thd", real, real, offsets, offsets)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Return ``x [TOKENS]`` shifted document by document; 0 at the end."""
    out, first = torch.zeros_like(x), 0
    for length, padded in zip(LENGTHS, PADDED, strict=True):
        if length:
            out[first : first + length - 1] = x[first + 1 : first + length]
        first += padded
    return out


def test_one_rank():
    x, want = torch.arange(1, TOKENS + 1), torch.arange(1, TOKENS + 1)
    for _ in range(3):  # several prediction layers shift repeatedly
        x, total = roll_tensor(x[None], packed_seq_params=packed())
        x, want = x[0], shifted(want)
        assert x.equal(want) and total == want.sum()
    mask, count = roll_tensor(torch.ones(1, TOKENS), packed_seq_params=packed())
    assert count == mask.sum() == sum(max(length - 1, 0) for length in LENGTHS)


def test_without_padding_between_documents():
    params = packed(PADDED, PADDED)
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = None
    rolled, _ = roll_tensor(torch.arange(1, 33)[None], packed_seq_params=params)
    want = torch.arange(2, 34)
    want[[7, 15, 31]] = 0
    assert rolled[0].equal(want)


def test_padding_stays_padding():
    """A ``padding_mask`` keeps padding out of the balance of experts."""
    padding = shifted(torch.ones(TOKENS)) == 0
    ends = torch.tensor([4, 15, 25])
    padding[ends] = False
    rolled, _ = roll_tensor(padding[None], packed_seq_params=packed())
    assert rolled[0].equal(padding)


def compare_ranks(rank: int, ranks: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )

    params = packed([5, 0, 8, 11], [8, 0, 16, 16])
    whole = torch.arange(1, TOKENS + 1)
    want, _ = roll_tensor(whole[None], packed_seq_params=params)
    table = Sharding(cp=ranks).global_positions(TOKENS, params.cu_seqlens_q_padded, "cpu")
    group = torch.distributed.group.WORLD
    x, _ = roll_tensor(whole[None, table[rank]], cp_group=group, packed_seq_params=params)
    assert x.equal(want[:, table[rank]])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_context_parallelism(ranks, tmp_path):
    run_ranks(compare_ranks, (ranks, str(tmp_path / "store")), ranks)
