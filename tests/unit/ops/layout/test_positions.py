"""Positions instead of key-buffer indices: on any layout, validated."""

import pytest
import torch

from megatron_dsa.dsa_kernels import indexer_topk
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import packed_layout
from megatron_dsa.ops.layout.positions import (
    indices_to_positions,
    local_part,
    positions_to_indices,
    validate_indices,
)
from tests.cases.layouts import LAYOUTS, SPREADS, indexer_inputs, layouts, sequence_places, shuffled
from tests.host import start


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("sharding", SPREADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_lead_back_to_the_selection(name, sharding, ratio):
    ranks = layouts(name, sharding)
    (alone,) = layouts(name, "alone")
    whole = torch.full((alone.num_queries, 3), -7, dtype=torch.int32, device=start())
    for layout, queries in zip(ranks, SPREADS[sharding], strict=True):
        keys = layout if ratio == 1 else compressed_keys(layout, ratio).layout
        inputs = indexer_inputs(layout, keys.num_keys)
        indices, length = indexer_topk(inputs, keys, 3)
        positions = indices_to_positions(indices, keys, workspace_bytes=2000)
        validate_indices(positions, keys, topk=3, ascending=True, workspace_bytes=3000)
        for row, (_, position, real) in enumerate(sequence_places(layout)):
            listed = [x for x in positions[row].tolist() if x >= 0]
            assert len(listed) == (min(3, (position + 1) // ratio) if real else 0)
            assert all(x < (position + 1) // ratio for x in listed)
        given = positions_to_indices(shuffled(positions), keys, 5, workspace_bytes=2000)
        assert given[0][:, :3].equal(indices) and given[0][:, 3:].eq(-1).all()
        assert given[1].equal(length) and given[1].dtype == torch.int32
        # A rank takes its tokens of all ranks'.
        rows = torch.arange(alone.num_queries, device=start())
        own = local_part(rows[:, None], layout, queries, "rows")[:, 0]
        assert alone.position[own].equal(layout.position) and alone.start[own].equal(layout.start)
        whole[own] = positions
    one = alone if ratio == 1 else compressed_keys(alone, ratio).layout
    indices, _ = indexer_topk(indexer_inputs(alone, one.num_keys), one, 3)
    assert whole.equal(indices_to_positions(indices, one))


def good():
    """Return lists of the last keys of two sequences of 6, and their layout."""
    layout = packed_layout(torch.tensor([0, 6, 11]), 14, 6, torch.tensor([0, 6, 12]))
    lists = layout.position[:, None].int() - torch.arange(3, dtype=torch.int32)
    lists = torch.where((lists < 0) | ~layout.real[:, None], -1, lists)
    return lists, layout


def changed(row, *entries):
    def change(lists):
        lists[row] = torch.tensor(entries, dtype=torch.int32)

    return change


BROKEN = {
    "range": (changed(4, 1, -2, 3), "-1 .no key. or positions from 0. Row 4"),
    "causal": (changed(4, 1, 5, 3), r"up to itself only .* Row 4, whose query sees 5 keys"),
    "other sequence": (changed(7, 0, 7, -1), r"own sequence .* Row 7, whose query sees 2 keys"),
    "twice": (changed(5, 4, -1, 4), r"twice. Row 5, .*\[4, 4, -1\]"),
    "nothing": (changed(3, -1, -1, -1), "must list at least one. Row 3"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rules_are_named(rule):
    change, message = BROKEN[rule]
    lists, layout = good()
    validate_indices(lists, layout, topk=3)
    positions_to_indices(lists, layout, 3)
    change(lists)
    with pytest.raises(ConfigError, match="given: .*" + message):
        validate_indices(lists, layout, name="given", workspace_bytes=500)
    with pytest.raises(ConfigError, match=r"given: one of these rules .*validate_indices"):
        positions_to_indices(lists, layout, 3, name="given", workspace_bytes=500)


def test_the_device_is_told_who_says_more(monkeypatch):
    from megatron_dsa.ops.layout import positions

    said = []
    monkeypatch.setattr(positions, "require_values", lambda rules, summary: said.append(summary))
    lists, layout = good()
    positions_to_indices(lists, layout, 3, name="x" * 400)
    assert "validate_indices says which and where" in said[0][:150]


def test_rows_of_padding_are_not_read():
    lists, layout = good()
    expected = positions_to_indices(lists, layout, 3)
    lists[11:] = 77
    validate_indices(lists, layout)
    for got, want in zip(positions_to_indices(lists, layout, 3), expected, strict=True):
        assert got.equal(want)


def test_order_is_checked_on_request():
    lists, layout = good()
    validate_indices(lists, layout)  # the last key first
    with pytest.raises(ConfigError, match=r"ascending with -1 last\. Row 1"):
        validate_indices(lists, layout, ascending=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lists: lists.long(), "must be an int32 tensor"),
        (lambda lists: lists[0], "must be an int32 tensor"),
        (lambda lists: None, "must be an int32 tensor .* got NoneType"),
        (lambda lists: lists[:5], "one row for each of the 14 query rows"),
        (lambda lists: lists.repeat(1, 2), "at most 3 keys per query"),
    ],
)
def test_forms_that_are_no_lists(change, message):
    lists, layout = good()
    with pytest.raises(ConfigError, match=message):
        validate_indices(change(lists), layout, topk=3)
