"""Random small calls of the public operations equal an independent reference in float64.

100 examples each; ``--examples 1000`` draws more (docs/develop/tests.md).
"""

from dataclasses import dataclass

import pytest
import torch

from megatron_dsa import dsa_kernels as ops
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import CompressedKeys, compressed_keys
from megatron_dsa.ops.layout.layout import Layout, bshd_layout, packed_layout
from tests.helpers import double_leaf, relative_error
from tests.reference import operations_float64 as ref

hypothesis = pytest.importorskip("hypothesis", reason="pip install megatron-dsa[test]")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SCALE = 0.6
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """A layout, and the visible keys of each query by the reference."""

    layout: Layout
    seen: list[list[int]]
    length: int | None  # of every sequence; None: packed

    @property
    def tokens(self) -> int:
        return len(self.seen)

    def compressed(self, ratio: int) -> tuple[CompressedKeys, list[list[int]]]:
        def slot_of_first(token: int) -> int:
            return token // ratio if self.length is None else token * (self.length // ratio)

        keys = compressed_keys(self.layout, ratio)
        return keys, ref.group_seen(self.seen, slot_of_first, ratio)


@st.composite
def batches(draw) -> Batch:
    """Draw unpacked batches, and packed ones with empty, one-token and padded documents."""
    if draw(st.booleans()):
        length, batch = draw(st.integers(1, 9)), draw(st.integers(1, 3))
        return Batch(bshd_layout(length, batch, CPU), ref.batch_seen(length, batch), length)
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    padding = draw(st.none() | st.lists(st.integers(0, 3), min_size=5, max_size=5))
    rooms = lengths
    if padding is not None:
        rooms = [x + more for x, more in zip(lengths, padding, strict=False)]
    tokens = max(sum(rooms) + draw(st.integers(0, 3)), 1)
    real, padded = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, rooms))
    longest = draw(st.sampled_from([None, max(lengths), max(lengths) + 3]))
    layout = packed_layout(real, tokens, longest, None if padding is None else padded)
    return Batch(layout, ref.packed_seen(lengths, rooms, tokens), None)


class Numbers:
    """Tensors of one example: small integers, which tie, or normal numbers."""

    def __init__(self, seed: int, integers: bool, dtype: torch.dtype):
        self.generator, self.integers = torch.Generator().manual_seed(seed), integers
        self.dtype = dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        if self.integers:
            x = torch.randint(-1, 2, shape, generator=self.generator)
        else:
            x = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return x.to(self.dtype).requires_grad_()

    def upto(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high + 1, shape, generator=self.generator)

    def some(self, keys: list[int], count: int) -> list[int]:
        """Draw at most ``count`` distinct ``keys`` in any order."""
        order = torch.randperm(len(keys), generator=self.generator)[:count].tolist()
        return [keys[i] for i in order]


numbers = st.builds(
    Numbers, st.integers(0, 2**31), st.booleans(), st.sampled_from([torch.float32, torch.float64])
)
#: One byte gives the smallest blocks.
policies = st.builds(
    Policy, fused=st.just(False), workspace_bytes=st.sampled_from([1, 1, 3000, 2**28])
)
heads = st.sampled_from([1, 3])


def assert_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape, what
    infinite = want == float("-inf")
    assert infinite.equal(got == float("-inf")), what
    tolerance = TOLERANCE.get(got.dtype)
    got, want = (x.masked_fill(infinite, 0.0) for x in (got, want))
    assert relative_error(got, want) < tolerance, what


def assert_equal_loss(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """Compare a loss up to the rounding of its terms, whose absolute sum is ``size``."""
    if (got.double() - want).abs() > 4 * torch.finfo(got.dtype).eps * size:
        assert_equal(got, want, "loss")


def assert_equal_gradients(got, leaves, want, doubles) -> None:
    """Compare the gradients of a sum that weighs every result entry differently."""

    def total(results):
        weighed = [
            (x.double() * torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)).sum()
            for x in results
            if x.requires_grad
        ]
        return sum(weighed) if weighed else None

    losses = total(got), total(want)
    assert (losses[0] is None) <= (losses[1] is None)
    if losses[1] is None:
        return
    grads = [
        torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)
        for loss, x in zip(losses, (leaves, doubles), strict=True)
    ]
    for number, (x, y) in enumerate(zip(*grads, strict=True)):
        assert_equal(x, y, f"gradient {number}")


@given(st.data(), numbers, policies, heads)
def test_sparse_attention(data, numbers, policy, heads):
    queries, keys = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    width, v_dim = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 4))
    invalid = [-1, -1, -9, keys, keys + 7, 2**31 - 1, -(2**31)]
    rows = [numbers.some([*range(keys), *invalid], width) for _ in range(queries)]
    rows = [row + [-1] * (width - len(row)) for row in rows]
    indices = torch.tensor(rows, dtype=torch.int32)
    length = None
    if data.draw(st.booleans()):
        length = (numbers.upto(width + 3, queries) - 1).int()
        rows = [row[: max(n, 0)] for row, n in zip(rows, length.tolist(), strict=True)]
    lists = [[s for s in row if 0 <= s < keys] for row in rows]
    q, kv = numbers(queries, heads, 4), numbers(keys, 4)
    sink = numbers(heads) if data.draw(st.booleans()) else None
    leaves = [x for x in (q, kv, sink) if x is not None]
    doubles = [double_leaf(x.clone()) for x in leaves]
    # Unselected keys are not read and get no gradient.
    unselected = torch.tensor([all(s not in row for row in lists) for s in range(keys)])
    with torch.no_grad():
        kv[unselected] = float("nan")

    got = ops.sparse_attention(
        q, kv, indices, softmax_scale=SCALE, v_dim=v_dim, topk_length=length, attn_sink=sink,
        want_p_sum=True, policy=policy,
    )  # fmt: skip
    per_head = doubles[1][:, None].expand(-1, heads, -1)
    denominator = None if sink is None else doubles[2].expand(queries, -1)
    out, lse, p = ref.attention(
        doubles[0], per_head, per_head[..., :v_dim], lists, SCALE, denominator
    )
    listed = torch.zeros(queries, width, dtype=torch.float64)
    for t, row in enumerate(rows):
        for j, s in enumerate(row):
            listed[t, j] = p[t, :, s].sum() if 0 <= s < keys else 0.0
    assert_equal(got.out, out, "out")
    assert_equal(got.lse, lse, "lse")
    assert_equal(got.p_sum, listed, "p_sum")
    assert_equal_gradients([got.out], leaves, [out], doubles)


@given(batches(), numbers, policies, heads)
def test_dense_attention(batch, numbers, policy, heads):
    leaves = [numbers(batch.tokens, heads, dim) for dim in (4, 4, 3)]
    doubles = [double_leaf(x) for x in leaves]
    got, lse = ops.dense_attention(*leaves, batch.layout, softmax_scale=SCALE, policy=policy)
    out, right_lse, _ = ref.attention(*doubles, batch.seen, SCALE)
    assert_equal(lse, right_lse, "lse")
    assert_equal(got, out, "out")
    assert_equal_gradients([got], leaves, [out], doubles)


@given(st.data(), batches(), numbers, policies, heads)
def test_hybrid_attention(data, batch, numbers, policy, heads):
    keys, groups = batch.compressed(data.draw(st.sampled_from([2, 4])))
    window, topk = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
    lists = KeyLists(batch.layout, window, keys)
    if topk and keys.count:
        groups = [numbers.some(slots, topk) for slots in groups]
        rows = [row + [-1] * (topk - len(row)) for row in groups]
        length = torch.tensor([len(row) for row in groups], dtype=torch.int32)
        selected = torch.tensor(rows, dtype=torch.int32)
        lists = KeyLists(batch.layout, window, keys, selected, length)
    seen = [
        slots + [keys.count + s for s in positions[-window:]]
        for slots, positions in zip(groups, batch.seen, strict=True)
    ]
    leaves = [
        numbers(batch.tokens, heads, 4),
        numbers(keys.count + batch.tokens, 4),
        numbers(heads),
    ]
    doubles = [double_leaf(x) for x in leaves]
    got = ops.sparse_attention(
        leaves[0], leaves[1], lists, softmax_scale=SCALE, v_dim=4, attn_sink=leaves[2],
        policy=policy,
    )  # fmt: skip
    per_head = doubles[1][:, None].expand(-1, heads, -1)
    sink = doubles[2].expand(batch.tokens, -1)
    out, lse, _ = ref.attention(doubles[0], per_head, per_head, seen, SCALE, sink)
    assert_equal(got.out, out, "out")
    assert_equal(got.lse, lse, "lse")
    assert_equal_gradients([got.out], leaves, [out], doubles)


def keys_of(data, batch: Batch) -> tuple[Layout, list[list[int]], int]:
    """Return the layout of single or compressed keys, their visibility and number."""
    ratio = data.draw(st.sampled_from([1, 1, 2, 4]))
    if ratio == 1:
        return batch.layout, batch.seen, batch.tokens
    keys, seen = batch.compressed(ratio)
    return keys.layout, seen, keys.count


def index_inputs(data, numbers: Numbers, queries: int, keys: int):
    """Return the indexer's tensors, and the reference's scores with its leaves."""
    heads, relu = data.draw(st.sampled_from([1, 2])), data.draw(st.booleans())
    leaves = [numbers(queries, heads, 3), numbers(keys, 3), numbers(queries, heads)]
    doubles = [double_leaf(x) for x in leaves]
    return ops.IndexerInputs(*leaves, relu), leaves, ref.index_scores(*doubles, relu), doubles


@given(st.data(), batches(), numbers, policies, st.integers(1, 12))
def test_selection(data, batch, numbers, policy, topk):
    if numbers.integers:
        numbers.dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    else:
        numbers.dtype = torch.float64  # in others a rounding might decide
    layout, seen, count = keys_of(data, batch)
    inputs, _, scores, _ = index_inputs(data, numbers, batch.tokens, count)
    indices, length = ops.indexer_topk(inputs, layout, topk, policy=policy)
    want = ref.selected(scores.detach(), seen, topk)
    assert length.tolist() == [len(keys) for keys in want]
    assert indices.tolist() == [keys + [-1] * (topk - len(keys)) for keys in want]


@given(st.data(), batches(), numbers, policies, st.integers(1, 12))
def test_sparse_indexer_loss(data, batch, numbers, policy, topk):
    layout, seen, count = keys_of(data, batch)
    inputs, leaves, scores, doubles = index_inputs(data, numbers, batch.tokens, count)
    lists = [numbers.some(keys, topk) for keys in seen]
    indices = torch.tensor([keys + [-1] * (topk - len(keys)) for keys in lists]).int()
    length = None
    if data.draw(st.booleans()):
        length = numbers.upto(topk, batch.tokens).int()
        lists = [keys[:n] for keys, n in zip(lists, length.tolist(), strict=True)]
    teacher = numbers(batch.tokens, topk).detach().abs()  # integers: some queries without mass
    got = ops.sparse_indexer_loss(
        inputs, indices, teacher, layout, topk_length=length, policy=policy
    )
    full = torch.zeros(batch.tokens, count, dtype=torch.float64)
    for t, keys in enumerate(lists):
        full[t, keys] = teacher[t, : len(keys)].double()
    want = ref.kl(scores, full, lists)
    assert_equal_loss(got, want, ref.kl_size(scores, full, lists))
    assert_equal_gradients([got], leaves, [want], doubles)


@given(st.data(), batches(), numbers, policies, heads)
def test_dense_indexer_loss(data, batch, numbers, policy, heads):
    layout, seen, count = keys_of(data, batch)
    inputs, leaves, scores, doubles = index_inputs(data, numbers, batch.tokens, count)
    q = numbers(batch.tokens, heads, 4).detach()
    k = numbers(count, data.draw(st.sampled_from([1, heads])), 4).detach()
    other = numbers(batch.tokens, heads).detach() if data.draw(st.booleans()) else None
    per_head = k.double().expand(-1, heads, -1)
    _, lse, p = ref.attention(
        q.double(), per_head, per_head, seen, SCALE, None if other is None else other.double()
    )
    given_lse = lse.to(q.dtype) if data.draw(st.booleans()) else None
    got = ops.dense_indexer_loss(
        inputs, q, k, layout, softmax_scale=SCALE, other_lse=other, lse=given_lse, policy=policy
    )
    want = ref.kl(scores, p.sum(1), seen)
    assert_equal_loss(got, want, ref.kl_size(scores, p.sum(1), seen))
    assert_equal_gradients([got], leaves, [want], doubles)
