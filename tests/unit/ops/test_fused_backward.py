"""Every fused sparse attention backward through the contract, against float64 on a GPU.

Numbers in docstrings are rows of the list of bugs that other systems shipped.
"""

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.dispatch import Policy, describe_call, report, reset_report
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, FORWARD, SparseAttentionInputs
from megatron_dsa.testing.comparison import SPARSE_ATTENTION
from tests.cases.sparse_attention import CASE, check, make_case, ragged_case
from tests.helpers import leaf, relative_error, skip_unless_it_runs

TOLERANCE = SPARSE_ATTENTION[torch.bfloat16]
FUSED = {c.name: c for c in BACKWARD.candidates if c.fused}


def policy_of(name):
    """Only the backward is fused, and it is the one named."""
    return Policy(
        workspace_bytes=256 * 2**20,
        named=(("sparse_attention_forward", "torch"), ("sparse_attention_backward", name)),
    )


@pytest.fixture(params=FUSED)
def backward(request):
    """The name of an implementation; skips where it cannot run."""
    skip_unless_it_runs(FUSED[request.param])
    return request.param


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 24, 32, 48, 64, 96, 128])
@pytest.mark.parametrize(("dim", "with_sink"), [(576, False), (512, True)])
def test_backward_heads(backward, heads, dim, with_sink):
    """1: a tile of 64 rows must not straddle two queries."""
    skip_unless_it_runs(FUSED[backward], heads, dim)
    q, kv, indices = make_case(70, 400, heads, dim, 128, causal=True, **CASE)
    sink = leaf(heads, seed=3, device="cuda") if with_sink else None
    reset_report()
    check(
        q,
        kv,
        indices,
        v_dim=512,
        tolerance=TOLERANCE,
        sink=sink,
        scale=0.05,
        policy=policy_of(backward),
    )
    assert report()["sparse_attention_backward"] == {backward: 1}


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("k", [1, 63, 64, 100, 640, 2048])
def test_backward_widths_and_more_keys_than_exist(backward, k, heads):
    """4."""
    q, kv, indices = make_case(40, 300, heads, 576, k, **CASE)
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=policy_of(backward))


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_backward_many_keys(backward, heads):
    """More keys than 16 bits count and than the cache holds gradients of, lists in no order."""
    q, kv, indices = make_case(40, 70_000, heads, 576, 128, **CASE)
    indices = indices[:, torch.randperm(128, device="cuda")]
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=policy_of(backward))


@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (16, 71), (8, 3), (8, 71)])
def test_backward_last_group(backward, heads, queries):
    """1: a tile of several queries, of which the last one has fewer."""
    q, kv, indices = make_case(queries, 400, heads, 576, 128, causal=True, **CASE)
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=policy_of(backward))


@pytest.mark.parametrize(
    ("heads", "with_sink"), [(64, False), (64, True), (16, False), (128, True)]
)
def test_backward_invalid_ids_and_empty_rows(backward, heads, with_sink):
    """2, 3: NaN in every row that nobody selected, rows 0 and last included."""
    q, kv, indices, length, valid = ragged_case(heads)
    used = torch.zeros(300, dtype=torch.bool, device="cuda")
    used[indices[valid].long()] = True
    used[0] = used[-1] = False
    indices[(indices == 0) | (indices == 299)] = -1
    with torch.no_grad():
        kv[~used] = 0.0
    sink = leaf(heads, seed=5, device="cuda") if with_sink else None
    check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, topk_length=length, scale=0.05,
        policy=policy_of(backward),
    )  # fmt: skip
    clean = q.grad.clone(), kv.grad.clone()
    assert (q.grad[3] == 0).all() and (q.grad[5] == 0).all()
    q.grad = kv.grad = None
    with torch.no_grad():
        kv[~used] = float("nan")
    out = sparse_attention(
        q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length, attn_sink=sink,
        policy=policy_of(backward),
    ).out  # fmt: skip
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))  # as in check()
    out.backward(grad.to("cuda").to(q.dtype))
    assert torch.equal(q.grad, clean[0])
    assert (kv.grad[~used] == 0).all()
    assert relative_error(kv.grad, clean[1]) < 1e-3  # atomics: not bitwise


@pytest.mark.parametrize("heads", [64, 128])
def test_key_gradient_is_not_rounded(backward, heads):
    """The fp32 accumulator itself: far closer to float64 sums of the same products than bf16."""
    q, kv, indices = make_case(64, 200, heads, 576, 128, **CASE)
    sp = SparseAttentionInputs(q.detach(), kv.detach(), indices, 512, 0.05, None, None, 2**28)
    call = describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=576, v_dim=512, topk=128)
    out, lse, _ = FORWARD.run(call, Policy(fused=False), sp)
    dout = torch.randn(out.shape, device="cuda").to(out.dtype)
    arguments = (sp, out, lse, dout)
    _, dkv, _, _ = BACKWARD.run(call, policy_of(backward), *arguments)
    assert dkv.dtype == torch.float32
    rounded = dkv.to(torch.bfloat16).float()
    assert not torch.equal(dkv, rounded)
    _, torch_dkv, _, _ = BACKWARD.run(call, Policy(fused=False), *arguments)
    assert relative_error(dkv, torch_dkv) < relative_error(rounded, torch_dkv)


@pytest.mark.parametrize("heads", [64, 128])
def test_repeated_calls_do_not_accumulate(backward, heads):
    """6."""
    q, kv, indices = make_case(64, 300, heads, 576, 128, **CASE)
    seen = []
    for _ in range(2):
        q.grad = kv.grad = None
        sparse_attention(
            q, kv, indices, softmax_scale=0.05, v_dim=512, policy=policy_of(backward)
        ).out.float().sum().backward()
        seen.append((q.grad, kv.grad))
    assert torch.equal(seen[0][0], seen[1][0])
    assert relative_error(seen[1][1], seen[0][1]) < 1e-3


@pytest.mark.parametrize(("rows", "heads"), [(70_000, 64), (66_000, 128)])
def test_many_rows(backward, rows, heads):
    """25: more rows than a grid dimension holds, more elements than int32 counts."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=generator)

    q, kv, dout = normal(rows, heads, 576), normal(512, 576), normal(rows, heads, 512)
    indices = torch.rand(rows, 512, device="cuda").argsort(1)[:, :128].int()
    assert q.numel() > 2**31
    sp = SparseAttentionInputs(q, kv, indices, 512, 0.05, None, None, 2**30)
    call = describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=576, v_dim=512, topk=128)
    out, lse, _ = FORWARD.run(call, Policy(fused=False), sp)
    results = [
        BACKWARD.run(call, policy, sp, out, lse, dout)[:2]
        for policy in (policy_of(backward), Policy(fused=False))
    ]
    for got, want in zip(*results, strict=True):
        assert relative_error(got[-50:], want[-50:]) < TOLERANCE
        assert relative_error(got[:50], want[:50]) < TOLERANCE


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_no_host_synchronisation(backward, heads):
    """24, after the first call, which compiles."""
    q, kv, indices, length, _ = ragged_case(heads)
    for attempt in range(2):
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            sparse_attention(
                q, kv, indices, softmax_scale=0.05, v_dim=512, topk_length=length,
                policy=policy_of(backward),
            ).out.sum().backward()  # fmt: skip
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("heads", "dim"),
    [(2, 576), (8, 512), (16, 576), (24, 512), (64, 576), (96, 512), (128, 576)],
)
@pytest.mark.parametrize(("with_sink", "keys"), [(False, 300), (True, 300), (True, 40_000)])
def test_teacher_of_the_indexer(backward, heads, dim, with_sink, keys):
    """Where a backward also gives the head sums of the probabilities, they are the softmax's.

    Also where it puts lists of many keys in another order.
    """
    skip_unless_it_runs(FUSED[backward], heads, dim)
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
    out, lse, wanted = FORWARD.run(call, Policy(fused=False), sp)
    dout = torch.randn(out.shape, device="cuda").to(out.dtype)
    *_, p_sum = BACKWARD.run(call, policy_of(backward), sp, out, lse, dout)
    if p_sum is None:
        pytest.skip(f"{backward} gives none; it is an operation of its own then")
    assert p_sum.dtype == torch.float32 and (p_sum[~valid] == 0).all()
    assert relative_error(p_sum, wanted) < 1e-3
