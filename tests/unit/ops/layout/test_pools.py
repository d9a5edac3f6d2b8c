"""Pools of index keys: lists of tokens, attention mass per pool, keys by token."""

import gc
import weakref

import pytest
import torch

from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.pools import KeyPools

CPU = torch.device("cpu")


def packed(lengths, padded=None):
    def ends(of):
        return torch.tensor([0, *of]).cumsum(0).int()

    return packed_layout(
        ends(lengths), sum(padded or lengths) + 3, max(lengths), padded and ends(padded)
    )


LAYOUTS = {
    "one": lambda: bshd_layout(18, 1, CPU),
    "two": lambda: bshd_layout(13, 2, CPU),
    "packed": lambda: packed([7, 1, 0, 3, 12, 4]),
    "padded": lambda: packed([7, 1, 9, 2], [8, 4, 9, 5]),
}


def documents(layout):
    """Return key indices of each query token's document up to itself, in order; none for
    padding.
    """
    for start, end in zip(layout.start.tolist(), layout.end.tolist(), strict=True):
        yield layout.to_key_indices(torch.arange(start, end, dtype=torch.int32)).tolist()


def random_selection(pools, most, seed=0):
    """Return random ascending visible pools of every query."""
    torch.manual_seed(seed)
    see = pools.keys.layout
    chosen = []
    for start, end in zip(see.start.tolist(), see.end.tolist(), strict=True):
        some = (torch.randperm(end - start)[:most] + start).sort().values.tolist()
        chosen.append(some)
    selected = torch.tensor(
        [some + [-1] * (most - len(some)) for some in chosen], dtype=torch.int32
    )
    return chosen, selected.view(-1, most), torch.tensor(list(map(len, chosen)), dtype=torch.int32)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_lists(name, size):
    """Pools must not cross documents; tokens after the last complete pool must be included."""
    layout = LAYOUTS[name]()
    pools = KeyPools.of(layout, size)
    chosen, selected, count = random_selection(pools, 2)
    indices, length = pools.expand(selected, count)
    assert indices.shape == (layout.num_queries, 2 * size + size - 1)
    assert indices.dtype == length.dtype == torch.int32
    for query, document in enumerate(documents(layout)):
        whole = len(document) // size
        first = int(pools.keys.layout.start[query])
        expected = []
        for pool in chosen[query]:
            expected += document[(pool - first) * size : (pool - first + 1) * size]
        expected += document[whole * size :]
        assert int(length[query]) == len(expected)
        assert indices[query].tolist() == expected + [-1] * (indices.shape[1] - len(expected))


@pytest.mark.parametrize("name", LAYOUTS)
def test_mass_of_lists(name):
    layout, size = LAYOUTS[name](), 4
    pools = KeyPools.of(layout, size)
    chosen, selected, count = random_selection(pools, 2)
    indices, length = pools.expand(selected, count)
    mass = torch.rand(indices.shape, dtype=torch.float64)
    for tokens in (slice(None), torch.tensor([5, 2, 9])):
        given = indices[tokens], length[tokens], mass[tokens], tokens
        for lengths in (length[tokens], None):
            found, number, of_pools = pools.of_lists(given[0], lengths, *given[2:])
            assert torch.equal(found, selected[tokens]) and torch.equal(number, count[tokens])
            queries = range(layout.num_queries) if isinstance(tokens, slice) else tokens.tolist()
            for place, query in enumerate(queries):
                for slot, _ in enumerate(chosen[query]):
                    part = mass[query, slot * size : (slot + 1) * size].sum()
                    torch.testing.assert_close(of_pools[place, slot], part)
                assert not of_pools[place, len(chosen[query]) :].any()


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_by_token(name):
    layout, size = LAYOUTS[name](), 4
    pools = KeyPools.of(layout, size)
    k = torch.randn(pools.keys.count, 3)
    of_tokens, seen = pools.by_token(k)
    assert len(of_tokens) == layout.num_keys
    for query, document in enumerate(documents(layout)):
        first = int(pools.keys.layout.start[query])
        count = len(document) // size * size
        assert list(documents(seen))[query] == document[:count]
        for place in range(count):
            assert torch.equal(of_tokens[document[place]], k[first + place // size])


def test_a_layout_does_not_keep_itself():
    """Packed layouts must end with their microbatch, even without garbage collection."""
    layout = LAYOUTS["packed"]()
    pools = KeyPools.of(layout, 4)
    pools.by_token(torch.randn(pools.keys.count, 3))
    gone = weakref.ref(layout)
    gc.disable()
    try:
        del layout, pools
        assert gone() is None
    finally:
        gc.enable()
