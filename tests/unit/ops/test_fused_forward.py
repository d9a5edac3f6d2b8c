"""Every fused sparse attention forward through the contract, against float64 on a GPU.

Backward is the torch implementation, so these are also forward/backward crossings (5). Numbers in
docstrings are rows of the list of bugs that other systems shipped.
"""

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, FORWARD
from megatron_dsa.testing.comparison import SPARSE_ATTENTION
from tests.cases.sparse_attention import CASE, check, make_case, ragged_case
from tests.helpers import leaf, relative_error, skip_unless_it_runs

TOLERANCE = SPARSE_ATTENTION[torch.bfloat16]
FUSED = {c.name: c for c in FORWARD.candidates if c.fused}
BACKWARDS = {c.name: c for c in BACKWARD.candidates if c.fused}
UNFUSED = Policy(fused=False)


def policy_of(name, backward="torch"):
    """Only the forward is fused, and it is the one named."""
    return Policy(
        workspace_bytes=256 * 2**20,
        named=(
            ("sparse_attention_forward", name),
            ("sparse_attention_backward", backward),
            ("sparse_attention_probabilities", "torch"),
        ),
    )


@pytest.fixture(params=FUSED)
def forward(request):
    """The name of an implementation; skips where it cannot run."""
    skip_unless_it_runs(FUSED[request.param])
    return request.param


def attend(q, kv, indices, policy, *, scale=0.05, length=None, sink=None):
    with torch.no_grad():
        return sparse_attention(
            q, kv, indices, softmax_scale=scale, v_dim=512, topk_length=length, attn_sink=sink,
            policy=policy,
        )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 24, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("dim", "with_sink"), [(576, False), (512, True)])
def test_heads(forward, heads, dim, with_sink):
    """1: a tile of 64 rows must not straddle two queries unnoticed."""
    skip_unless_it_runs(FUSED[forward], heads, dim)
    q, kv, indices = make_case(70, 400, heads, dim, 128, causal=True, **CASE)
    sink = leaf(heads, seed=3, device="cuda") if with_sink else None
    reset_report()
    check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, scale=0.05,
        policy=policy_of(forward),
    )  # fmt: skip
    assert report()["sparse_attention_forward"] == {forward: 1}


@pytest.mark.parametrize(
    ("heads", "queries"), [(16, 1), (16, 70), (16, 71), (8, 3), (8, 70), (8, 71), (1, 9)]
)
def test_last_group(forward, heads, queries):
    """1: a tile of several queries, of which the last one has fewer."""
    q, kv, indices = make_case(queries, 400, heads, 576, 128, causal=True, **CASE)
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=policy_of(forward))


@pytest.mark.parametrize("heads", [8, 16])
def test_neighbours_without_common_keys(forward, heads):
    """Whole blocks of keys that one query of a tile selects and the others do not."""
    q, kv, _ = make_case(24, 2400, heads, 576, 1, **CASE)
    indices = torch.arange(2400, dtype=torch.int32, device="cuda").view(24, 100)
    indices[1::5] = -1
    indices[::7] = indices[::7].flip(1)
    for order in (indices, indices.flip(0)):  # the first query's keys come first, then last
        q.grad = kv.grad = None
        check(q, kv, order, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=policy_of(forward))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("k", [1, 63, 64, 100, 640, 2048])
def test_widths_and_more_keys_than_exist(forward, k, heads):
    """4."""
    q, kv, indices = make_case(40, 300, heads, 576, k, **CASE)
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=policy_of(forward))


@pytest.mark.parametrize("heads", [16, 64])
def test_full_lists_of_many_keys(forward, heads):
    """More keys than 16 bits count, in lists without an order that are full to the end."""
    q, kv, indices = make_case(40, 70_000, heads, 576, 2048, **CASE)
    indices = indices[:, torch.randperm(2048, device="cuda")]
    want = attend(q, kv, indices, UNFUSED)
    got = attend(q, kv, indices, policy_of(forward))
    assert relative_error(got.out, want.out) < TOLERANCE
    assert relative_error(got.lse, want.lse) < 1e-4


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("queries", [1, 3, 9])
@pytest.mark.parametrize("with_sink", [False, True])
def test_few_queries_with_long_lists(forward, heads, queries, with_sink):
    """Not enough thread blocks for a GPU, and lists that are long and ragged."""
    q, kv, indices = make_case(queries, 5000, heads, 576, 2000, **CASE)
    indices[0, 300:700] = -1
    length = torch.full((queries,), 2000, dtype=torch.int32, device="cuda")
    length[-1] = 600
    sink = leaf(heads, seed=3, device="cuda") if with_sink else None
    check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, topk_length=length,
        scale=0.05, policy=policy_of(forward),
    )  # fmt: skip
    length.zero_()
    empty = sparse_attention(
        q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length, attn_sink=sink,
        policy=policy_of(forward),
    )  # fmt: skip
    assert (empty.out == 0).all() and (empty.lse == float("-inf")).all()


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("with_sink", [False, True])
def test_invalid_ids_lengths_and_empty_rows(forward, heads, with_sink):
    """2, 3: NaN in every row that nobody selected, rows 0 and last included."""
    q, kv, indices, length, valid = ragged_case(heads)
    used = torch.zeros(300, dtype=torch.bool, device="cuda")
    used[indices[valid].long()] = True
    used[0] = used[-1] = False
    indices[(indices == 0) | (indices == 299)] = -1
    sink = leaf(heads, seed=5, device="cuda") if with_sink else None
    policy = policy_of(forward)
    result = check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, topk_length=length, scale=0.05,
        policy=policy,
    )  # fmt: skip
    for row in (3, 5):
        assert (result.out[row] == 0).all()
        assert (result.lse[row] == float("-inf")).all()
    with torch.no_grad():
        kv[~used] = float("nan")
    again = attend(q, kv, indices, policy, length=length, sink=sink)
    assert torch.equal(again.out, result.out) and torch.equal(again.lse, result.lse)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_lse_is_natural_and_without_the_sink(forward, heads, scale):
    """5, also for logits whose exponentials overflow; a sink of -inf is none."""
    q, kv, indices, length, valid = ragged_case(heads)
    sink = leaf(heads, seed=5, device="cuda").detach()
    sink[0] = float("-inf")
    got = attend(q, kv, indices, policy_of(forward), scale=scale, length=length, sink=sink)
    keys = kv.detach().double()[indices.clamp(0, 299).long()]
    logits = torch.einsum("qhd,qkd->qhk", q.detach().double(), keys) * scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    lse, some = torch.logsumexp(logits, -1), valid.any(1)
    assert got.lse.dtype == torch.float32
    assert (got.lse[~some] == float("-inf")).all()
    assert relative_error(got.lse[some], lse[some]) < 1e-4
    values = torch.einsum("qhk,qkd->qhd", torch.softmax(logits, -1), keys[..., :512])
    out = values * torch.sigmoid(lse - sink)[..., None]
    assert relative_error(got.out[some], out[some]) < TOLERANCE


@pytest.mark.parametrize("heads", [16, 24, 64])
def test_repeated_calls_are_bitwise_equal(forward, heads):
    """6: whatever the outputs' memory, or a multiprocessor's shared memory, held before."""
    q, kv, indices, length, _ = ragged_case(heads)
    policy = policy_of(forward)
    first = attend(q, kv, indices, policy, length=length)
    torch.utils.deterministic.fill_uninitialized_memory = False  # or torch.empty writes
    for filler in (float("nan"), 1e4):
        rubbish = torch.full_like(q, filler), torch.full_like(kv, filler)
        attend(*rubbish, torch.zeros_like(indices), policy)
        stale = [torch.full_like(x, filler) for x in (first.out, first.lse)]
        del stale  # the allocator hands it out again
        again = attend(q, kv, indices, policy, length=length)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


def test_strided_views(forward):
    """Views give what contiguous tensors give."""
    q, kv, indices = make_case(40, 300, 16, 576, 128, **CASE)
    views = []
    for x in (q.detach(), kv.detach(), indices):
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device="cuda")
        wide[..., : x.shape[-1]] = x
        views.append(wide[..., : x.shape[-1]])
    got, want = (attend(*x, policy_of(forward)) for x in (views, (q, kv, indices)))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_teacher_from_a_second_pass(forward):
    """A forward without probabilities: they come from its lse and are counted as an operation."""
    q, kv, indices = make_case(40, 300, 64, 576, 128, **CASE)
    reset_report()
    arguments = {"softmax_scale": 0.05, "v_dim": 512, "want_p_sum": True}
    fused = sparse_attention(q, kv, indices, policy=policy_of(forward), **arguments)
    assert report()["sparse_attention_probabilities"] == {"torch": 1}
    unfused = sparse_attention(q, kv, indices, policy=UNFUSED, **arguments)
    assert relative_error(fused.p_sum, unfused.p_sum) < 1e-3


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_crossed_with_every_backward(forward, backward, heads):
    """5: whatever a forward saves, every backward takes."""
    skip_unless_it_runs(BACKWARDS[backward], heads)
    q, kv, indices, length, _ = ragged_case(heads)
    sink = leaf(heads, seed=5, device="cuda")
    reset_report()
    check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, topk_length=length, scale=0.05,
        policy=policy_of(forward, backward),
    )  # fmt: skip
    assert report()["sparse_attention_backward"] == {backward: 1}


@pytest.mark.parametrize("heads", [16, 64])
def test_no_host_synchronisation(forward, heads):
    """24, after the first call, which compiles."""
    q, kv, indices, length, _ = ragged_case(heads)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            attend(q, kv, indices, policy_of(forward), length=length)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("rows", "heads"), [(70_000, 64), (270_000, 16)])
def test_many_rows(forward, rows, heads):
    """25: more rows (and groups) than a grid dimension holds, more elements than int32 counts."""
    q = torch.empty(rows, heads, 576, device="cuda", dtype=torch.bfloat16).normal_()
    kv = torch.randn(512, 576, device="cuda", dtype=torch.bfloat16)
    first = torch.randint(0, 384, (rows, 1), device="cuda", dtype=torch.int32)
    indices = first + torch.arange(128, device="cuda", dtype=torch.int32)
    assert q.numel() > 2**31
    got = attend(q, kv, indices, policy_of(forward))
    for part in (slice(0, 50), slice(rows - 50, rows)):
        want = attend(q[part], kv, indices[part], UNFUSED)
        assert relative_error(got.out[part], want.out) < TOLERANCE
        assert relative_error(got.lse[part], want.lse) < 1e-4
