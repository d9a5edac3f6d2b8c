"""Layouts: visibility in unpacked and packed batches, including blocks."""

from dataclasses import replace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout


def seen_rows(layout):
    """Return per query the set of visible key indices, from start, end and key order."""
    out = []
    for start, end in zip(layout.start.tolist(), layout.end.tolist(), strict=True):
        slots = torch.arange(start, end, dtype=torch.int32)
        out.append(set(layout.to_key_indices(slots).tolist()))
    return out


def seen_rows_by_blocks(layout, rows_at_once):
    """Return the same from blocks: every query must be in exactly one block that covers its
    keys.
    """
    out = [None] * layout.num_queries
    for block in layout.blocks(lambda width: rows_at_once):
        rows = range(layout.num_queries)[block.tokens]
        slots = torch.arange(block.lo, block.hi, dtype=torch.int32)
        keys = layout.to_key_indices(slots)
        for row, mask in zip(rows, layout.seen(block).columns(block.width), strict=True):
            assert out[row] is None
            out[row] = set(keys[mask].tolist())
    return out


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_unpacked(batch, rows_at_once):
    layout = bshd_layout(7, batch, torch.device("cpu"))
    expected = [{s * batch + b for s in range(t + 1)} for t in range(7) for b in range(batch)]
    assert seen_rows(layout) == expected
    assert seen_rows_by_blocks(layout, rows_at_once) == expected
    assert layout.position.tolist() == [t for t in range(7) for _ in range(batch)]
    assert layout.real_tokens() == 7 * batch


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("max_seqlen", [None, 5])
def test_packed(rows_at_once, max_seqlen):
    layout = packed_layout(torch.tensor([0, 3, 3, 8], dtype=torch.int32), 10, max_seqlen)
    expected = [{0}, {0, 1}, {0, 1, 2}, {3}, {3, 4}, {3, 4, 5}, {3, 4, 5, 6}, {3, 4, 5, 6, 7}]
    expected += [set(), set()]
    assert seen_rows(layout) == expected
    assert seen_rows_by_blocks(layout, rows_at_once) == expected
    assert layout.position.tolist()[:8] == [0, 1, 2, 0, 1, 2, 3, 4]
    assert layout.real.tolist() == [True] * 8 + [False] * 2
    assert int(layout.real_tokens()) == 8


def test_the_last_two_layouts_keep_what_is_large():
    layouts = [bshd_layout(rows, 1, torch.device("cpu")) for rows in (11, 12, 13)]
    made = []

    def large(layout, key="large"):
        return layout.derive_large(key, lambda: made.append(layout) or len(made))

    first = [large(layouts[0]), large(layouts[0], "other"), layouts[0].derive("small", int)]
    assert first == [1, 2, 0] and large(layouts[1]) == 3
    assert large(layouts[0]) == 1 and large(layouts[1]) == 3 and len(made) == 3
    assert large(layouts[2]) == 4  # now the last two are the others
    assert layouts[0].derived.keys() & {"large", "other", "small"} == {"small"}
    assert large(layouts[1]) == 3 and large(layouts[0]) == 5
    assert "large" not in layouts[2].derived and large(layouts[1]) == 3


def test_packed_with_padding_between_sequences():
    layout = packed_layout(
        torch.tensor([0, 3, 5], dtype=torch.int32), 8, 4, torch.tensor([0, 4, 8], dtype=torch.int32)
    )
    expected = [{0}, {0, 1}, {0, 1, 2}, set(), {4}, {4, 5}, set(), set()]
    assert seen_rows(layout) == expected
    assert seen_rows_by_blocks(layout, 2) == expected
    assert layout.position.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_blocks_skip_what_no_query_sees():
    layout = bshd_layout(256, 1, torch.device("cpu"))
    work = sum((b.tokens.stop - b.tokens.start) * b.width for b in layout.blocks(lambda width: 8))
    assert work < 0.53 * 256 * 256
    packed = packed_layout(torch.arange(0, 257, 32, dtype=torch.int32), 256, 32)
    assert max(b.width for b in packed.blocks(lambda width: 8)) <= 32 + 8


class Packed:
    """The fields of Megatron's PackedSeqParams that a layout reads."""

    def __init__(self, qkv_format="thd", cu=(0, 4), max_seqlen=4):
        self.qkv_format = qkv_format
        self.cu_seqlens_q = None if cu is None else torch.tensor(cu, dtype=torch.int32)
        self.cu_seqlens_q_padded = None
        self.max_seqlen_q = max_seqlen


def test_layout_is_built_once_per_microbatch():
    params = Packed()
    first = layout_from_megatron(4, 1, torch.device("cpu"), params)
    assert layout_from_megatron(4, 1, torch.device("cpu"), params) is first
    assert layout_from_megatron(4, 1, torch.device("cpu"), Packed()) is not first


def test_a_changed_copy_derives_again():
    """``replace`` must not keep values derived from other ranges."""
    layout = bshd_layout(8, 1, torch.device("cpu"))
    assert layout.derive("keys", lambda: layout.num_keys) == 8
    fewer = replace(layout, num_keys=4, end=layout.end.clamp_max(4))
    assert fewer.derive("keys", lambda: fewer.num_keys) == 4


@pytest.mark.parametrize(
    ("params", "batch", "message"),
    [
        (Packed(qkv_format="sbhd"), 1, "thd"),
        (Packed(cu=None), 1, "cu_seqlens_q"),
        (Packed(cu=(0,)), 1, "cu_seqlens_q"),
        (Packed(), 2, "micro-batch size 1"),
    ],
)
def test_unsupported_packing_is_refused(params, batch, message):
    with pytest.raises(ConfigError, match=message):
        layout_from_megatron(4, batch, torch.device("cpu"), params)
