"""Lists of keys for groups of adjacent queries, read by our Hopper kernels."""

import dataclasses
import itertools
import math
import sys
import types
from collections import Counter

import pytest
import torch

from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.sparse_attention.tilelang.launch import key_lists
from megatron_dsa.ops.sparse_attention.tilelang.order import to_callers_lists
from tests.cases.sparse_attention import CASE, make_case
from tests.helpers import leaf, relative_error

UNIONS = "megatron_dsa.ops.sparse_attention.tilelang.hopper.unions"
LARGE = 2**28


def list_inputs(indices, keys, topk_length=None, workspace_bytes=LARGE):
    """Return inputs of which only the lists matter."""
    q, kv = (torch.zeros(n, 1, device=indices.device) for n in (indices.shape[0], keys))
    return SparseAttentionInputs(
        q[..., None], kv, indices, 1, 1.0, topk_length, None, workspace_bytes
    )


def random_lists(queries, width, keys, device, seed=0, repeats=False):
    """Return ragged lists with invalid ids between valid ones; distinct unless ``repeats``."""
    generator = torch.Generator().manual_seed(seed)
    # Neighbours share half of their lists.
    near = torch.arange(queries)[:, None] // 8 * 13 + torch.arange(width // 2) * 3
    far = torch.rand(queries, width - width // 2, generator=generator) * keys
    indices = torch.cat([near % keys, far.long()], 1)
    indices = indices.gather(1, torch.rand(queries, width, generator=generator).argsort(1))
    if not repeats:
        for row in indices:
            again = torch.ones(width, dtype=torch.bool)
            again[[row.tolist().index(x) for x in set(row.tolist())]] = False
            row[again] = -1
    special = torch.tensor([-1, keys, 2**31 - 1, -(2**31), -1])
    indices[:, 3:8] = special
    length = torch.randint(width // 3, width + 1, (queries,), generator=generator)
    length[::7], length[1], length[2], length[4] = width + 9, 0, -3, 1
    return indices.int().to(device), length.int().to(device)


def union(indices, length, keys):
    """Return ``{key: bits}`` of a group's union and a ``Counter`` of repeated ``(key, bit)``."""
    bits, again = {}, Counter()
    for g, (row, n) in enumerate(zip(indices.tolist(), length.tolist(), strict=True)):
        for key in row[: max(n, 0)]:
            if 0 <= key < keys:
                if bits.get(key, 0) >> g & 1:
                    again[key, 1 << g] += 1
                bits[key] = bits.get(key, 0) | 1 << g
    return bits, again


def check_lists(inputs, group, with_slots=False):
    """Compare ``key_lists`` with :func:`union`; return the number of parts."""
    keys, (queries, width) = inputs.kv.shape[0], inputs.indices.shape
    length = torch.full((queries,), width) if inputs.topk_length is None else inputs.topk_length
    parts, reached = 0, 0
    for part, (ids, members, count), slots in key_lists(inputs, group, with_slots=with_slots):
        assert part.start == reached and part.start % group == 0
        parts, reached = parts + 1, part.stop
        groups = -(-(part.stop - part.start) // group)
        assert count.shape == (groups,) and count.dtype == ids.dtype == torch.int32
        assert ids.shape == (groups, group * width) and members.dtype == torch.uint8
        ids, members, count = ids.tolist(), members.tolist(), count.tolist()
        for i in range(groups):
            own = slice(part.start + i * group, min(part.start + (i + 1) * group, part.stop))
            bits, again = union(inputs.indices[own], length[own], keys)
            n = len(bits)
            assert count[i] == n + again.total()
            assert ids[i][:n] == sorted(bits)
            assert members[i][:n] == [bits[key] for key in ids[i][:n]]
            behind = slice(n, count[i])
            assert Counter(zip(ids[i][behind], members[i][behind], strict=True)) == again
        assert (slots is not None) == with_slots
        if with_slots:
            own = inputs.indices[part].tolist()
            for t, (row, n, at) in enumerate(
                zip(own, length[part].tolist(), slots.tolist(), strict=True)
            ):
                # A repeated key also points to its entry in the union.
                for key, place in list(zip(row, at, strict=True))[: max(n, 0)]:
                    assert not 0 <= key < keys or ids[t // group].index(key) == place
    assert reached == queries
    return parts


def test_groups_of_one_have_the_callers_lists(device):
    indices, length = random_lists(11, 20, 90, device)
    inputs = list_inputs(indices, 90, length, workspace_bytes=1)
    ((part, (ids, members, count), slots),) = key_lists(inputs, 1, with_slots=True)
    assert slots is None  # nothing has moved
    assert range(11)[part] == range(11)
    assert ids.data_ptr() == indices.data_ptr() and torch.equal(ids, indices)
    assert members.shape == (1, 1) and members.dtype == torch.uint8
    assert count.dtype == torch.int32 and torch.equal(count, length.clamp(0, 20))
    ((_, (_, _, count), _),) = key_lists(dataclasses.replace(inputs, topk_length=None), 1)
    assert count.tolist() == [20] * 11


@pytest.mark.parametrize("budget", [1, 3000, LARGE])
@pytest.mark.parametrize("repeats", [False, True])
def test_ascending_lists_of_groups_of_one(device, budget, repeats):
    indices, length = random_lists(21, 30, 90, device, repeats=repeats)
    before = indices.clone()
    for lengths in (length, None):
        inputs = list_inputs(indices, 90, lengths, budget)
        ((part, (ids, members, count), _),) = key_lists(inputs, 1, ascending=True)
        assert range(21)[part] == range(21) and members.shape == (1, 1)
        assert ids.dtype == count.dtype == torch.int32 and ids.shape == indices.shape
        ends = [30] * 21 if lengths is None else lengths.clamp(0, 30).tolist()
        for row, end, got, n in zip(
            indices.tolist(), ends, ids.tolist(), count.tolist(), strict=True
        ):
            assert got[:n] == sorted(key for key in row[:end] if 0 <= key < 90)
            assert not any(0 <= key < 90 for key in got[n:])
    assert torch.equal(indices, before)


@pytest.fixture
def union_in_python(monkeypatch):
    """Replace the compiled kernel; return the sizes of parts."""
    sizes = []

    def compiled(group, with_slots, target):
        def kernel(indices, length, ids, members, count, slots, keys):
            sizes.append(ids.nbytes + members.nbytes + with_slots * slots.nbytes)
            assert all(x.is_contiguous() for x in (indices, length, ids, members, count))
            assert length.min() >= 0 and length.max() <= indices.shape[1]
            for i in range(len(count)):
                own = slice(i * group, (i + 1) * group)
                bits, again = union(indices[own], length[own], keys)
                entries = sorted(bits.items()) + list(again.elements())
                count[i] = len(entries)
                for at, (key, member) in enumerate(entries):
                    ids[i, at], members[i, at] = key, member
                if with_slots:
                    place = {key: at for at, key in enumerate(sorted(bits))}
                    for row, of in zip(indices[own].tolist(), slots[own], strict=True):
                        of[:] = torch.tensor([place.get(key, -1) for key in row])

        return kernel

    module = types.ModuleType(UNIONS)
    module.compiled = compiled
    monkeypatch.setitem(sys.modules, UNIONS, module)
    return sizes


@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("budget", [1, 1500, 5000, LARGE])
def test_parts_fit_the_budget(union_in_python, group, budget):
    """The caller holds one part while the next is made, so two must fit."""
    indices, length = random_lists(21, 30, 90, "cpu", repeats=True)
    inputs = list_inputs(indices, 90, length, budget)
    parts = check_lists(inputs, group)
    assert parts == len(union_in_python)
    one = group * 30 * (4 + 1)
    assert all(size <= max(budget, one) for size in union_in_python)
    assert all(a + b <= max(budget, 2 * one) for a, b in itertools.pairwise(union_in_python))
    groups, fit = math.ceil(21 / group), budget // one
    assert parts == (1 if fit >= groups else math.ceil(groups / max(1, fit // 2)))
    # Slots come with sums for every query and entry of a union, and need more parts.
    union_in_python.clear()
    more = check_lists(inputs, group, with_slots=True)
    assert more == len(union_in_python) and more >= parts


def test_strided_indices(union_in_python):
    indices, length = random_lists(9, 30, 90, "cpu")
    wide = torch.full((9, 50), 7, dtype=torch.int32)
    wide[:, :30] = indices
    check_lists(list_inputs(wide[:, :30], 90, length), 4)
    ((_, (ids, _, _), _),) = key_lists(list_inputs(wide[:, :30], 90, length), 1)
    assert ids.is_contiguous() and torch.equal(ids, indices)


@pytest.mark.parametrize("group", [2, 3, 4, 8])
@pytest.mark.parametrize("queries", [1, 24, 71])
def test_unions(hopper, group, queries):
    indices, length = (x[:queries] for x in random_lists(71, 300, 2000, "cuda"))
    assert check_lists(list_inputs(indices, 2000, length), group) == 1
    check_lists(list_inputs(indices, 2000), group, with_slots=True)


@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("keys", [1, 31, 33, 65535, 65536, 65537, 70_000, 131_072, 150_000])
def test_unions_of_many_keys(hopper, group, keys):
    indices, length = random_lists(19, 500, keys, "cuda", repeats=keys < 500)
    edges = [k for k in (0, 31, 32, 65535, 65536, 131_071, 131_072, keys - 1) if k < keys]
    edges = torch.tensor(edges, device="cuda", dtype=torch.int32)
    indices[torch.isin(indices, edges)] = -1
    indices[::2, 8 : 8 + len(edges)] = edges
    check_lists(list_inputs(indices, keys, length), group, with_slots=True)


@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("keys", [40, 90_000])
def test_keys_listed_twice(hopper, group, keys):
    indices, _ = random_lists(19, 700, keys, "cuda", repeats=True)
    indices[5:9] = keys - 1
    indices[9] = indices[10] = torch.arange(700, device="cuda") % 7
    indices[11, 350:] = indices[11, :350]
    check_lists(list_inputs(indices, keys), group, with_slots=True)


@pytest.mark.parametrize("group", [2, 4, 8])
def test_unions_in_parts(hopper, group):
    indices, length = random_lists(71, 300, 2000, "cuda", repeats=True)
    inputs = list_inputs(indices, 2000, length)
    assert check_lists(inputs, group) == 1
    for budget, parts in ((1, -(-71 // group)), (group * 300 * 5 * 4, -(-71 // (2 * group)))):
        part = dataclasses.replace(inputs, workspace_bytes=budget)
        assert check_lists(part, group) == parts
        check_lists(part, group, with_slots=True)


@pytest.mark.parametrize(
    ("heads", "keys", "with_sink"),
    [(16, 400, False), (8, 400, True), (64, 70_000, False), (128, 400, True)],
)
def test_attention_in_parts(hopper, heads, keys, with_sink):
    q, kv, indices = make_case(71, keys, heads, 576 - 64 * with_sink, 128, **CASE)
    length = torch.full((71,), 128, dtype=torch.int32, device="cuda")
    length[3], length[9] = 0, 40
    sink = leaf(heads, seed=3, device="cuda").detach() if with_sink else None
    dout = leaf(71, heads, 512, seed=4, **CASE).detach()
    inputs = SparseAttentionInputs(q.detach(), kv.detach(), indices, 512, 0.05, length, sink, LARGE)
    results = []
    for budget in (LARGE, 1, 20_000):
        part = dataclasses.replace(inputs, workspace_bytes=budget)
        out, lse, _ = tilelang_kernels.forward(part)
        dq, dkv, dsink, _ = tilelang_kernels.backward(part, out, lse, dout)
        results.append((out, lse, dq, dkv, dsink))
    for other in results[1:]:
        for i in range(3):
            assert torch.equal(other[i], results[0][i])
        assert relative_error(other[3], results[0][3]) < 1e-3  # atomics are not bitwise equal
        if with_sink:
            assert relative_error(other[4], results[0][4]) < 1e-6


def test_a_key_listed_twice_counts_twice(hopper):
    q, kv, indices = make_case(23, 300, 16, 576, 128, **CASE)
    indices[::3, 64:] = indices[::3, :64]
    indices[1, :] = 5
    indices[2, 3:100] = -1
    indices[6, 10] = indices[6, 11] = indices[6, 12]
    inputs = SparseAttentionInputs(q.detach(), kv.detach(), indices, 512, 0.05, None, None, LARGE)
    out, lse, _ = tilelang_kernels.forward(inputs)
    want_out, want_lse, _ = unfused.forward(inputs)
    assert relative_error(out, want_out) < 5e-3
    assert relative_error(lse, want_lse) < 1e-4
    dout = leaf(23, 16, 512, seed=4, **CASE).detach()
    got = tilelang_kernels.backward(inputs, out, lse, dout)
    want = unfused.backward(inputs, out, lse, dout)
    for x, y in zip(got[:2], want[:2], strict=True):
        assert relative_error(x, y) < 5e-3


@pytest.mark.parametrize("budget", [1, 3000, LARGE])
@pytest.mark.parametrize(("ascending", "group"), [(False, 1), (True, 1), (True, 3)])
def test_sums_return_to_the_callers_lists(union_in_python, ascending, group, budget):
    indices, length = random_lists(23, 40, 90, "cpu")
    for lengths in (length, None):
        inputs = list_inputs(indices, 90, lengths, budget)
        p_sum = torch.full(indices.shape, float("nan"))
        for part, (ids, _, _), slots in key_lists(inputs, group, ascending, True):
            queries = torch.arange(ids.shape[0] * group) + part.start
            sums = ids.repeat_interleave(group, 0) + 1000.0 * queries[:, None]
            sums = sums.view(-1, group, ids.shape[1])
            own = None if lengths is None else lengths[part]
            to_callers_lists(p_sum[part], sums.flatten(0, 1), slots, indices[part], own, 90, budget)
        place = torch.arange(40)
        valid = (indices >= 0) & (indices < 90)
        if lengths is not None:
            valid &= place < lengths[:, None]
        wanted = indices + 1000.0 * torch.arange(23)[:, None]
        assert torch.equal(p_sum, torch.where(valid, wanted, 0.0))
