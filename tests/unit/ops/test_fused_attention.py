"""Every fused sparse attention through the contract, against float64 on a GPU.

The other pass is the torch implementation; ``test_crossed_with_every_backward`` combines fused
ones.
"""

from dataclasses import dataclass

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.dispatch import Candidate, Policy, describe_call, report, reset_report
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, FORWARD, SparseAttentionInputs
from megatron_dsa.testing.comparison import SPARSE_ATTENTION
from tests.cases.sparse_attention import CASE, check, check_poisoned, make_case, ragged_case
from tests.helpers import leaf, relative_error, skip_unless_it_runs

TOLERANCE = SPARSE_ATTENTION[torch.bfloat16]
FORWARDS = {c.name: c for c in FORWARD.candidates if c.fused}
BACKWARDS = {c.name: c for c in BACKWARD.candidates if c.fused}
UNFUSED = Policy(fused=False)


def policy_of(forward="torch", backward="torch"):
    return Policy(
        workspace_bytes=256 * 2**20,
        named=(
            ("sparse_attention_forward", forward),
            ("sparse_attention_backward", backward),
            ("sparse_attention_probabilities", "torch"),
        ),
    )


@dataclass(frozen=True)
class Fused:
    """A fused implementation of one pass."""

    part: str
    candidate: Candidate

    @property
    def policy(self):
        return policy_of(**{self.part: self.candidate.name})


FUSED = [Fused("forward", c) for c in FORWARDS.values()]
FUSED += [Fused("backward", c) for c in BACKWARDS.values()]


@pytest.fixture(params=FUSED, ids=lambda fused: f"{fused.part} {fused.candidate.name}")
def fused(request):
    """One pass; skips where it cannot run."""
    skip_unless_it_runs(request.param.candidate)
    return request.param


@pytest.fixture(params=FORWARDS)
def forward(request):
    """The name of a forward; skips where it cannot run."""
    skip_unless_it_runs(FORWARDS[request.param])
    return request.param


@pytest.fixture(params=BACKWARDS)
def backward(request):
    """The name of a backward; skips where it cannot run."""
    skip_unless_it_runs(BACKWARDS[request.param])
    return request.param


def attend(q, kv, indices, policy, *, scale=0.05, length=None, sink=None):
    with torch.no_grad():
        return sparse_attention(
            q, kv, indices, softmax_scale=scale, v_dim=512, topk_length=length, attn_sink=sink,
            policy=policy,
        )  # fmt: skip


def check_call(fused, q, kv, indices, **more):
    return check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=fused.policy, **more
    )


# Both passes


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 24, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("dim", "with_sink"), [(576, False), (512, True)])
def test_heads(fused, heads, dim, with_sink):
    """A tile of 64 rows must not straddle two queries unnoticed."""
    skip_unless_it_runs(fused.candidate, heads, dim)
    q, kv, indices = make_case(70, 400, heads, dim, 128, causal=True, **CASE)
    sink = leaf(heads, seed=3, device="cuda") if with_sink else None
    reset_report()
    check_call(fused, q, kv, indices, sink=sink)
    assert report()[f"sparse_attention_{fused.part}"] == {fused.candidate.name: 1}


@pytest.mark.parametrize(
    ("heads", "queries"), [(16, 1), (16, 70), (16, 71), (8, 3), (8, 70), (8, 71), (1, 9)]
)
def test_last_group(fused, heads, queries):
    """In a tile of several queries, the last one has fewer."""
    skip_unless_it_runs(fused.candidate, heads)
    check_call(fused, *make_case(queries, 400, heads, 576, 128, causal=True, **CASE))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("k", [1, 63, 64, 100, 640, 2048])
def test_widths_and_more_keys_than_exist(fused, k, heads):
    check_call(fused, *make_case(40, 300, heads, 576, k, **CASE))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_many_keys(fused, heads):
    """More keys than 16 bits count and than the cache holds gradients of, lists in no order."""
    q, kv, indices = make_case(40, 70_000, heads, 576, 128, **CASE)
    indices = indices[:, torch.randperm(128, device="cuda")]
    check_call(fused, q, kv, indices)


@pytest.mark.parametrize(
    ("heads", "with_sink"), [(16, False), (16, True), (64, False), (64, True), (128, True)]
)
def test_invalid_ids_lengths_and_empty_lists(fused, heads, with_sink):
    """Keys that no query selects may be NaN, the first and the last included."""
    check_poisoned(heads, 576, with_sink, fused.policy, TOLERANCE)


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_no_host_synchronisation(fused, heads):
    """After the first call, which compiles."""
    q, kv, indices, length, _ = ragged_case(heads)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            sparse_attention(
                q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length,
                policy=fused.policy,
            ).out.sum().backward()  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Forwards


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
@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_lse_is_natural_and_without_the_sink(forward, heads, scale):
    """Also for logits whose exponentials overflow; a sink of -inf is none."""
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
    """Stale contents of the outputs or of shared memory do not matter."""
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
    """Every backward reads the results of every forward."""
    skip_unless_it_runs(BACKWARDS[backward], heads)
    q, kv, indices, length, _ = ragged_case(heads)
    sink = leaf(heads, seed=5, device="cuda")
    reset_report()
    check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, topk_length=length, scale=0.05,
        policy=policy_of(forward, backward),
    )  # fmt: skip
    assert report()["sparse_attention_backward"] == {backward: 1}


@pytest.mark.parametrize(("rows", "heads"), [(70_000, 64), (270_000, 16)])
def test_forward_of_many_queries(forward, rows, heads):
    """More rows (and groups) than a grid dimension holds, more elements than int32 counts."""
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


# Backwards


@pytest.mark.parametrize("heads", [64, 128])
def test_key_gradient_is_not_rounded(backward, heads):
    """The fp32 accumulator itself: far closer to float64 sums of the same products than bf16."""
    q, kv, indices = make_case(64, 200, heads, 576, 128, **CASE)
    sp = SparseAttentionInputs(q.detach(), kv.detach(), indices, 512, 0.05, None, None, 2**28)
    call = describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=576, v_dim=512, topk=128)
    out, lse, _ = FORWARD.run(call, UNFUSED, sp)
    dout = torch.randn(out.shape, device="cuda").to(out.dtype)
    arguments = (sp, out, lse, dout)
    _, dkv, _, _ = BACKWARD.run(call, policy_of(backward=backward), *arguments)
    assert dkv.dtype == torch.float32
    rounded = dkv.to(torch.bfloat16).float()
    assert not torch.equal(dkv, rounded)
    _, torch_dkv, _, _ = BACKWARD.run(call, UNFUSED, *arguments)
    assert relative_error(dkv, torch_dkv) < relative_error(rounded, torch_dkv)


@pytest.mark.parametrize("heads", [64, 128])
def test_repeated_calls_do_not_accumulate(backward, heads):
    """Gradients of a second call equal the first ones."""
    q, kv, indices = make_case(64, 300, heads, 576, 128, **CASE)
    seen = []
    for _ in range(2):
        q.grad = kv.grad = None
        sparse_attention(
            q, kv, indices, softmax_scale=0.05, v_dim=512, policy=policy_of(backward=backward)
        ).out.float().sum().backward()
        seen.append((q.grad, kv.grad))
    assert torch.equal(seen[0][0], seen[1][0])
    assert relative_error(seen[1][1], seen[0][1]) < 1e-3


@pytest.mark.parametrize(("rows", "heads"), [(70_000, 64), (66_000, 128)])
def test_backward_of_many_queries(backward, rows, heads):
    """More rows than a grid dimension holds, more elements than int32 counts."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=generator)

    q, kv, dout = normal(rows, heads, 576), normal(512, 576), normal(rows, heads, 512)
    indices = torch.rand(rows, 512, device="cuda").argsort(1)[:, :128].int()
    assert q.numel() > 2**31
    sp = SparseAttentionInputs(q, kv, indices, 512, 0.05, None, None, 2**30)
    call = describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=576, v_dim=512, topk=128)
    out, lse, _ = FORWARD.run(call, UNFUSED, sp)
    results = [
        BACKWARD.run(call, policy, sp, out, lse, dout)[:2]
        for policy in (policy_of(backward=backward), UNFUSED)
    ]
    for got, want in zip(*results, strict=True):
        assert relative_error(got[-50:], want[-50:]) < TOLERANCE
        assert relative_error(got[:50], want[:50]) < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "dim"),
    [(2, 576), (8, 512), (16, 576), (24, 512), (64, 576), (96, 512), (128, 576)],
)
@pytest.mark.parametrize(("with_sink", "keys"), [(False, 300), (True, 300), (True, 40_000)])
def test_teacher_of_the_indexer(backward, heads, dim, with_sink, keys):
    """Head sums of the probabilities, also where the backward sorts lists of many keys."""
    skip_unless_it_runs(BACKWARDS[backward], heads, dim)
    q, kv, indices, length, valid = ragged_case(heads, dim)
    kv = torch.cat([kv.detach(), torch.randn(keys - 300, dim, device="cuda").to(kv.dtype)])
    if keys > 300:
        place = torch.randint(300, keys, indices.shape, device="cuda", dtype=torch.int32)
        indices = torch.where(valid, place, torch.where(indices >= 300, keys, indices))
        valid &= indices < keys
    sink = leaf(heads, seed=5, device="cuda").detach() if with_sink else None
    sp = SparseAttentionInputs(
        q.detach(), kv.detach(), indices, 512, 0.05, length, sink, 2**28, True
    )
    call = describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=dim, v_dim=512, topk=128)
    out, lse, wanted = FORWARD.run(call, UNFUSED, sp)
    dout = torch.randn(out.shape, device="cuda").to(out.dtype)
    *_, p_sum = BACKWARD.run(call, policy_of(backward=backward), sp, out, lse, dout)
    if p_sum is None:
        pytest.skip(f"{backward} gives none; it is an operation of its own then")
    assert p_sum.dtype == torch.float32 and (p_sum[~valid] == 0).all()
    assert relative_error(p_sum, wanted) < 1e-3
