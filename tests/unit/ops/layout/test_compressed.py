"""Compressed keys and key lists of hybrid attention, against brute force."""

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from tests.helpers import leaf, relative_error

CPU = torch.device("cpu")


def cumulative(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def unpacked(length, batch):
    rows = [[s * batch + b for s in range(length)] for b in range(batch)]
    return bshd_layout(length, batch, CPU), rows


def packed(lengths, padded=None, tokens=None):
    starts = cumulative(*(padded or lengths))
    layout = packed_layout(
        cumulative(*lengths),
        tokens or int(starts[-1]),
        max(padded or lengths),
        starts if padded else None,
    )
    rows = [list(range(s, s + n)) for s, n in zip(starts.tolist(), lengths, strict=False)]
    return layout, rows


LAYOUTS = {
    "one sequence": lambda: unpacked(45, 1),
    "three in a batch": lambda: unpacked(19, 3),
    "shorter than a group": lambda: unpacked(2, 3),
    "packed": lambda: packed([3, 20, 0, 1, 17, 9]),
    "packed with padding": lambda: packed([3, 20, 0, 7, 2], [8, 24, 8, 8, 16], 70),
    "packed, all short": lambda: packed([1, 2, 1, 0]),
}


def first_slots(layout, sequences, ratio):
    """Return the compressed slot of every sequence's first group."""
    if layout.real is None:
        return [b * (len(rows) // ratio) for b, rows in enumerate(sequences)]
    return [rows[0] // ratio if rows else 0 for rows in sequences]


def groups_of(rows, ratio):
    """Return the tokens of every group of a sequence, without the tail."""
    return [rows[g * ratio : (g + 1) * ratio] for g in range(len(rows) // ratio)]


@pytest.mark.parametrize("ratio", [2, 4, 5, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups(name, ratio):
    layout, sequences = LAYOUTS[name]()
    keys = compressed_keys(layout, ratio)
    found = []
    for first, position in zip(
        keys.groups.first_token.tolist(), keys.groups.position.tolist(), strict=True
    ):
        if first >= 0:
            found.append(([first + i * keys.groups.token_step for i in range(ratio)], position))
    expected = [
        (group, g * ratio) for rows in sequences for g, group in enumerate(groups_of(rows, ratio))
    ]
    assert found == expected
    assert compressed_keys(layout, ratio) is keys


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
@pytest.mark.parametrize("ratio", [2, 4, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_visibility_and_its_host_side_bounds(name, ratio, rows_at_once):
    layout, sequences = LAYOUTS[name]()
    keys = compressed_keys(layout, ratio)
    expected = {}
    for rows, slot in zip(sequences, first_slots(layout, sequences, ratio), strict=True):
        for t, row in enumerate(rows):
            expected[row] = set(range(slot, slot + (t + 1) // ratio))
    everything = [expected.get(row, set()) for row in range(layout.num_queries)]
    ranges = zip(keys.layout.start.tolist(), keys.layout.end.tolist(), strict=True)
    assert [set(range(a, b)) for a, b in ranges] == everything
    # Blocks must cover the keys of their queries.
    seen = [None] * layout.num_queries
    for block in keys.layout.blocks(lambda width: rows_at_once):
        slots = torch.arange(block.lo, block.hi)
        queries = range(layout.num_queries)[block.tokens]
        for row, mask in zip(queries, keys.layout.seen(block).columns(block.width), strict=True):
            assert seen[row] is None
            seen[row] = set(slots[mask].tolist())
    assert seen == everything
    for first in range(0, layout.num_queries, rows_at_once):
        rows = slice(first, min(layout.num_queries, first + rows_at_once))
        assert keys.layout.widest(rows) >= max(map(len, everything[rows]))
        own = (layout.end - layout.start)[rows]
        assert layout.widest(rows) >= int(own.max())


def test_padding_between_sequences_widens_no_list():
    """With 64 padded sequences a list must be as wide as one sequence requires."""
    layout, _ = packed([1000] * 64, [1024] * 64)
    for ratio in (4, 128):
        keys = compressed_keys(layout, ratio)
        rows = slice(0, layout.num_queries)
        assert KeyLists(layout, 128, keys).width(rows) == 128 + 1024 // ratio
        widths = [block.width for block in keys.layout.blocks(lambda width: 1024)]
        assert max(widths) <= 2 * 1024 // ratio + 1


def brute_force_lists(layout, sequences, window, ratio, offset):
    """Return sets of key indices per query; the sequence's tokens start at ``offset``."""
    out = [set() for _ in range(layout.num_queries)]
    slots = first_slots(layout, sequences, ratio) if ratio else [0] * len(sequences)
    for rows, slot in zip(sequences, slots, strict=True):
        for t, row in enumerate(rows):
            out[row] = {offset + seen for seen in rows[max(0, t + 1 - window) : t + 1]}
            if ratio:
                out[row] |= {slot + g for g in range((t + 1) // ratio)}
    return out


@pytest.mark.parametrize("workspace", [1, 2000, 2**28])
@pytest.mark.parametrize("window", [1, 6, 100])
@pytest.mark.parametrize("ratio", [0, 4, 5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_lists(name, ratio, window, workspace):
    layout, sequences = LAYOUTS[name]()
    keys = compressed_keys(layout, ratio) if ratio else None
    lists = KeyLists(layout, window, keys)
    offset = keys.count if ratio else 0
    expected = brute_force_lists(layout, sequences, window, ratio, offset)
    rows = 0
    for part, indices, length in lists.blocks(Policy(workspace_bytes=workspace)):
        assert part.start == rows
        rows = part.stop
        for row, ids, count in zip(range(part.start, rows), indices, length.tolist(), strict=True):
            assert (ids[count:] == -1).all() and (ids[:count].diff() > 0).all()
            assert set(ids[:count].tolist()) == expected[row] and count == len(expected[row])
    assert rows == layout.num_queries


def selection(keys, topk, seed=1):
    """Return some visible slots of every query, ascending, and their number."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((keys.layout.num_queries, topk), -1, dtype=torch.int32)
    for row, (a, b) in enumerate(
        zip(keys.layout.start.tolist(), keys.layout.end.tolist(), strict=True)
    ):
        chosen = (torch.randperm(b - a, generator=generator)[:topk] + a).sort().values
        indices[row, : len(chosen)] = chosen.int()
    return indices, (indices >= 0).sum(1, dtype=torch.int32)


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("name", ["one sequence", "three in a batch", "packed with padding"])
def test_attention_over_blocks_of_lists(name, selects):
    layout, _ = LAYOUTS[name]()
    keys = compressed_keys(layout, 4)
    picked = selection(keys, 3) if selects else (None, None)
    lists = KeyLists(layout, 6, keys, *picked)
    ((_, indices, length),) = lists.blocks(Policy())
    results = []
    for given, workspace, own in ((lists, 1000, None), (indices, 2**28, length)):
        q = leaf(layout.num_queries, 4, 20, seed=1, dtype=torch.float64)
        kv = leaf(layout.num_keys + keys.count, 20, seed=2, dtype=torch.float64)
        sink = leaf(4, seed=3, dtype=torch.float64)
        result = sparse_attention(
            q, kv, given, softmax_scale=0.3, v_dim=20, topk_length=own, attn_sink=sink,
            want_p_sum=selects, policy=Policy(workspace_bytes=workspace),
        )  # fmt: skip
        result.out.square().sum().backward()
        results.append([result.out, result.lse, q.grad, kv.grad, sink.grad, result.p_sum])
    for one, other in zip(results[0][:5], results[1][:5], strict=True):
        one, other = one.nan_to_num(neginf=-1e3), other.nan_to_num(neginf=-1e3)
        assert relative_error(one, other) < 1e-13
    if selects:
        # With lists the teacher has only the selection's columns.
        teacher = results[1][5][:, :3].masked_fill(picked[0] < 0, 0.0)
        assert relative_error(results[0][5], teacher) < 1e-13
    assert len(list(lists.blocks(Policy(workspace_bytes=1000)))) > 1


def test_a_teacher_needs_a_selection():
    layout, _ = LAYOUTS["one sequence"]()
    keys = compressed_keys(layout, 4)
    q, kv = torch.zeros(45, 2, 20), torch.zeros(45 + keys.count, 20)
    with pytest.raises(ConfigError, match="want_p_sum and indexer need lists with a selection"):
        sparse_attention(
            q, kv, KeyLists(layout, 6, keys), softmax_scale=1.0, v_dim=20, want_p_sum=True
        )


def test_a_batch_without_tokens_has_no_compressed_keys():
    layout = bshd_layout(0, 1, torch.device("cpu"))
    keys = compressed_keys(layout, 4, overlap=True)
    values, ape = leaf(0, 6, seed=0), leaf(4, 6, seed=1)
    pooled = compress(values, leaf(0, 6, seed=2), ape, keys, overlap=True)
    assert keys.count == 0 and pooled.shape == (0, 3)
    pooled.sum().backward()
    assert values.grad.shape == (0, 6) and not ape.grad.any()
