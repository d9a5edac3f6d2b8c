"""Bits of listed and of visible keys, and their tiles: torch and Triton against masks."""

import pytest
import torch

from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.masked_attention import api
from megatron_dsa.ops.masked_attention import torch as unfused
from megatron_dsa.ops.masked_attention.spec import (
    GROUP,
    KeyBitsInputs,
    VisibleBitsInputs,
    groups,
    pack,
    unpack,
)
from megatron_dsa.testing.cases import visible_keys
from tests.cases.masked_attention import ascending_lists, mixed_lists
from tests.cases.triton_kernels import assembly, interpret, prepare_interpreter, recorded
from tests.helpers import no_synchronisation

SIZES = (1, 127, 128, 129, 300)
BITS = "megatron_dsa.ops.masked_attention.triton.bits"
TILES = "megatron_dsa.ops.masked_attention.triton.tiles"


def masked(queries, keys, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(queries, keys, generator=generator) < density


def transposed(bits, num_keys):
    """Return the bits of queries per key, and flags of the tiles of 64 queries by 128 keys."""
    queries = groups(len(bits)) * GROUP
    mask = bits.new_zeros(queries, groups(num_keys) * GROUP, dtype=torch.bool)
    mask[: len(bits), :num_keys] = unpack(bits, num_keys)
    tiles = mask.unflatten(0, (queries // 64, 64)).unflatten(2, (groups(num_keys), GROUP))
    return pack(mask.t()), tiles.any(3).any(1).to(torch.uint8)


def tile_lists(flags):
    """Return per line the columns whose flag is set, ascending, then 0, and their number."""
    ids = torch.zeros(flags.shape, dtype=torch.int32, device=flags.device)
    for row, entries in enumerate(flags):
        columns = entries.nonzero().flatten()
        ids[row, : len(columns)] = columns.int()
    return ids, (flags != 0).sum(1, dtype=torch.int32)


@pytest.mark.parametrize("keys", [0, *SIZES])
@pytest.mark.parametrize("queries", [0, 1, 5])
def test_round_trip(queries, keys):
    mask = masked(queries, keys)
    bits = pack(mask)
    assert bits.dtype == torch.int32 and bits.shape == (queries, -(-keys // 128), 4)
    assert torch.equal(unpack(bits, keys), mask)


def test_the_order_of_the_bits():
    mask = torch.ones(1, 300, dtype=torch.bool)
    bits = pack(mask)[0].long() & 0xFFFFFFFF
    for g in range(3):
        for word in range(4):
            for n in range(16):
                for e in range(2):
                    exists = 128 * g + 8 * n + 2 * word + e < 300
                    assert (int(bits[g, word]) >> (2 * n + e)) & 1 == exists
    mask[0] = False
    mask[0, 128 + 8 * 15 + 2 * 3 + 1] = True
    assert pack(mask)[0].tolist() == [[0] * 4, [0, 0, 0, -(2**31)], [0] * 4]


def check_bits(build, lists, workspace=10_000):
    """Compare with the packed mask of the lists."""
    mask = torch.zeros(len(lists.indices), lists.num_keys, dtype=torch.bool)
    for token, (ids, valid) in enumerate(zip(lists.indices, lists.valid, strict=True)):
        mask[token, ids[valid].long()] = True
    bits = build(KeyBitsInputs(lists.indices, lists.length, lists.num_keys, workspace))
    assert bits.dtype == torch.int32 and torch.equal(bits, pack(mask))


def check_all_bits(build):
    """Check ragged sizes, invalid entries, lengths, strided lists, no query, no entry."""
    for keys in SIZES:
        check_bits(build, ascending_lists(7, keys, 20))
        check_bits(build, mixed_lists(33, keys, 9))
    wide = mixed_lists(5, 3000, 2500)
    check_bits(build, wide)
    for part in (slice(0), slice(None, None, 2)):
        check_bits(build, wide.take(part))
    narrow = ascending_lists(5, 100, 8)
    for columns in (slice(0), slice(1, 5), slice(None, None, 3)):
        part = type(narrow)(narrow.indices[:, columns], None, 100)
        check_bits(build, part)


def packed(device):
    """Return uneven sequences with padding, and a padded tail: queries that see nothing."""
    real = torch.tensor([0, 5, 5, 170, 171, 270], device=device, dtype=torch.int32)
    apart = torch.tensor([0, 8, 16, 184, 192, 301], device=device, dtype=torch.int32)
    return packed_layout(real, 333, 300, apart)


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(300, 1, device),
    "batch of 3": lambda device: bshd_layout(57, 3, device),
    "packed": packed,
}


def ranges(queries, keys, shuffled, seed=0):
    """Return random ranges of slots; every fifth query sees nothing, every seventh all."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, keys + 1, (queries, 2), generator=generator, dtype=torch.int32)
    start, end = both.sort(1).values.unbind(1)
    start, end = start.clone(), end.clone()
    start[2::5] = end[2::5]
    start[3::7], end[3::7] = 0, keys
    slots = torch.randperm(keys, generator=generator).int() if shuffled else None
    return VisibleBitsInputs(start, end, slots, keys, 20_000)


def check_visible(build, inputs):
    slots = range(inputs.num_keys) if inputs.slots is None else inputs.slots.tolist()
    mask = torch.zeros(len(inputs.start), inputs.num_keys, dtype=torch.bool)
    bounds = zip(inputs.start.tolist(), inputs.end.tolist(), strict=True)
    for query, (first, last) in enumerate(bounds):
        for key, slot in enumerate(slots):
            mask[query, key] = first <= slot < last
    bits = build(inputs)
    assert bits.dtype == torch.int32 and torch.equal(bits, pack(mask))


def check_all_visible(build):
    """Check ragged sizes, permuted keys, no query, no key."""
    for keys in (*SIZES, 63, 64, 777):
        for shuffled in (False, True):
            check_visible(build, ranges(11, keys, shuffled))
    for shuffled in (False, True):
        check_visible(build, ranges(5, 5000, shuffled))  # several programs of a query
    check_visible(build, ranges(0, 300, False))
    nothing = torch.zeros(4, dtype=torch.int32)
    check_visible(build, VisibleBitsInputs(nothing, nothing, None, 0, 20_000))
    strided = ranges(20, 300, False)
    check_visible(build, VisibleBitsInputs(strided.start[::2], strided.end[::2], None, 300, 20_000))


def test_bits_in_torch():
    check_all_bits(unfused.key_bits)
    check_all_visible(unfused.visible_bits)


def test_the_transposed_bits_by_hand():
    """One pair: query 128 + 8 * 3 + 2 * 2 + 1 selects key 5."""
    mask = torch.zeros(200, 130, dtype=torch.bool)
    mask[157, 5] = True
    bits_t, flags = transposed(pack(mask), 130)
    assert bits_t.shape == (256, 2, 4) and flags.shape == (4, 2)
    assert bits_t.nonzero().tolist() == [[5, 1, 2]] and bits_t[5, 1, 2] == 1 << 7
    assert flags.nonzero().tolist() == [[2, 0]]
    ids, count = tile_lists(flags)
    assert count.tolist() == [0, 0, 1, 0] and ids[2, 0] == 0


def check_tiles(tiles, queries, keys, density):
    """Compare transposed bits, flags and lists with the reference, including empty tiles."""
    mask = masked(queries, keys, density)
    mask[64:128] = False
    mask[:, 128:256] &= torch.arange(queries)[:, None] % 128 == 3
    bits = pack(mask)
    bits_t, flags = tiles.transpose(bits, keys)
    expected_bits, expected_flags = transposed(bits, keys)
    assert bits_t.dtype == torch.int32 and torch.equal(bits_t, expected_bits)
    assert flags.dtype == torch.uint8 and torch.equal(flags, expected_flags)
    key_flags = expected_flags[0::2] | expected_flags[1::2]
    for with_queries in (False, True):
        found = tiles.tiles_for(bits, keys, with_queries)
        same_lists((found.key_groups, found.key_group_count), key_flags)
        assert (found.bits_t is not None) == with_queries
        if with_queries:
            assert torch.equal(found.bits_t, expected_bits)
            same_lists((found.query_blocks, found.query_block_count), expected_flags.t())


def check_listed_keys(numbers, queries, keys, density, width):
    """Compare the lists of bits with the mask's columns."""
    mask = masked(queries, keys, density)
    mask[2::3] = False
    bits = pack(mask)
    before, length = numbers.keys_before(bits)
    assert length.tolist() == mask.sum(1).tolist()
    found = numbers.listed_keys(bits, before, length, width)
    assert found.dtype == torch.int32 and found.shape == (queries, width)
    for own, selected in zip(found, mask, strict=True):
        expected = selected.nonzero()[:width, 0]
        assert torch.equal(own[: len(expected)].long(), expected)
        assert (own[len(expected) :] == -1).all()


def same_lists(found, flags):
    """Compare lists up to their counts."""
    (ids, count), (expected, expected_count) = found, tile_lists(flags)
    assert ids.dtype == count.dtype == torch.int32 and ids.shape == expected.shape
    assert torch.equal(count, expected_count)
    for row, some in enumerate(count.tolist()):
        assert torch.equal(ids[row, :some], expected[row, :some])


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.masked_attention.triton import bits, numbers, tiles

    prepare_interpreter()
    check_all_bits(bits.key_bits)
    check_all_visible(bits.visible_bits)
    for queries in SIZES:
        for keys in SIZES:
            check_tiles(tiles, queries, keys, 0.3 if queries > 1 else 0.01)
    for keys in (1, 128, 1000, 1024, 1025, 3000):
        for width in (1, 100, 3000):
            check_listed_keys(numbers, 7, keys, 0.3, width)
    check_listed_keys(numbers, 0, 130, 0.3, 5)
    check_tiles(tiles, 0, 130, 0.3)
    check_tiles(tiles, 300, 300, 0.0)
    for rows, columns in ((2, 511), (4, 512), (6, 513), (2, 1025), (512, 3), (514, 1), (8, 0)):
        flags = masked(rows, columns, 0.4).to(torch.uint8)
        found = tiles.tile_lists(flags)
        same_lists(found[:2], flags[0::2] | flags[1::2])
        same_lists(found[2:], flags.t())


def test_compile_once_without_a_gpu(monkeypatch):
    kernels = pytest.importorskip(BITS), pytest.importorskip(TILES)
    names = (("_set_bits", "_visible_bits"), ("_transpose", "_list_tiles", "_list_key_groups"))
    recorders = [
        recorder
        for module, some in zip(kernels, names, strict=True)
        for recorder in recorded(monkeypatch, module, some)
    ]
    bits, tiles = kernels
    for queries, keys, width in ((1, 1, 1), (256, 256, 16), (37, 301, 5)):
        lists = ascending_lists(queries, keys, width)
        packed = bits.key_bits(KeyBitsInputs(lists.indices, None, keys, 0))
        tiles.tiles_for(packed, keys, True)
        tiles.tiles_for(packed, keys, False)
        for shuffled in (False, True):
            bits.visible_bits(ranges(queries, keys, shuffled))
    for recorder, variants in zip(recorders, (1, 2, 1, 1, 1), strict=True):
        assert len(recorder.launches) >= 3
        for capability in (80, 90, 100):
            compiled = [
                assembly(recorder.kernel, args, kwargs, capability)
                for args, kwargs in recorder.launches
            ]
            assert len({one.hash for one in compiled}) == variants
            assert all(".local" not in one.asm["ptx"] for one in compiled)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys", "width"), [(4096, 4096, 2048), (1000, 9001, 333)])
def test_triton_on_the_gpu(queries, keys, width):
    bits, tiles = pytest.importorskip(BITS), pytest.importorskip(TILES)
    lists = mixed_lists(queries, keys, width)
    given = KeyBitsInputs(lists.indices.cuda(), lists.length.cuda(), keys, 2**28)
    expected = unfused.key_bits(given)
    tiles.tiles_for(bits.key_bits(given), keys, True)  # compiles
    with no_synchronisation():
        found = bits.key_bits(given)
        by_key, flags = tiles.transpose(found, keys)
        bundle = tiles.tiles_for(found, keys, True)
        forward = tiles.tiles_for(found, keys, False)
    assert torch.equal(found, expected)
    expected_bits, expected_flags = transposed(expected, keys)
    assert torch.equal(by_key, expected_bits) and torch.equal(flags, expected_flags)
    same_lists((bundle.key_groups, bundle.key_group_count), flags[0::2] | flags[1::2])
    same_lists((forward.key_groups, forward.key_group_count), flags[0::2] | flags[1::2])
    same_lists((bundle.query_blocks, bundle.query_block_count), flags.t())


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_layouts(name):
    for workspace in (1, 2**20):
        layout = LAYOUTS[name](torch.device("cpu"))
        layout.derived.clear()  # unpacked ones are cached
        bits = api.visible_bits(layout, Policy(workspace_bytes=workspace))
        assert torch.equal(unpack(bits, layout.num_keys), visible_keys(layout))
        if layout.real is not None:
            assert not bits[~layout.real].any()


def test_layers_share_the_bits(monkeypatch):
    layout = packed(torch.device("cpu"))
    reset_report()
    with torch.inference_mode():
        first = api.visible_bits(layout)
    assert not first.is_inference()
    assert api.visible_bits(layout) is first
    assert report()["visible_bits"] == {"torch": 1}
    monkeypatch.setattr(api, "MOST_KEPT", layout.num_keys - 1)
    again = api.visible_bits(packed(torch.device("cpu")))
    assert torch.equal(again, first)
    other = packed(torch.device("cpu"))
    api.visible_bits(other)
    assert "visible bits" not in other.derived


@pytest.mark.gpu
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8192, 8192), (1000, 9001), (3, 40_000)])
def test_visible_bits_on_the_gpu(queries, keys, shuffled):
    kernel = pytest.importorskip(BITS)
    given = ranges(queries, keys, shuffled)
    slots = None if given.slots is None else given.slots.cuda()
    given = VisibleBitsInputs(given.start.cuda(), given.end.cuda(), slots, keys, 2**28)
    expected = unfused.visible_bits(given)
    kernel.visible_bits(given)  # compiles
    poison = torch.full((2**27,), -1, dtype=torch.int32, device="cuda")
    del poison
    with no_synchronisation():
        found = kernel.visible_bits(given)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_synchronisation(name):
    device = torch.device("cuda")
    api.visible_bits(LAYOUTS[name](device))
    layout = LAYOUTS[name](device)
    layout.derived.clear()
    with no_synchronisation():
        api.visible_bits(layout)


if __name__ == "__main__":
    main()
