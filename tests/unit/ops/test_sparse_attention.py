"""Sparse attention against float64: values, lse, teacher, all gradients."""

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs, reference
from megatron_dsa.testing.comparison import SPARSE_ATTENTION
from tests.cases.sparse_attention import SMALL, check, make_case
from tests.helpers import double_leaf, leaf, relative_error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2, 8, 24])
def test_matches_float64(device, dtype, heads):
    q, kv, indices = make_case(37, 53, heads, 24, 19, device=device, dtype=dtype, causal=True)
    check(q, kv, indices, v_dim=16, tolerance=SPARSE_ATTENTION[dtype])


@pytest.mark.parametrize("k", [1, 63, 64, 100])
def test_widths_and_more_keys_than_exist(device, k):
    # K > Skv: the list is padded with -1.
    q, kv, indices = make_case(20, 50, 4, 32, k, device=device, dtype=torch.float32)
    check(q, kv, indices, v_dim=32, tolerance=2e-6)


def test_invalid_ids_touch_nothing(device):
    """Unselected keys are NaN; -1 in the middle, ids == Skv and beyond."""
    q, kv, indices = make_case(16, 40, 4, 16, 8, device=device, dtype=torch.float32)
    indices = indices.clamp(1, 38)  # rows 0 and 39 stay unselected
    for row in range(16):
        unique = indices[row].unique()
        indices[row] = -1
        indices[row, : len(unique)] = unique
    indices[:, 3] = -1
    indices[::2, 5] = 40
    indices[1::2, 5] = 2**31 - 1
    clean = kv.detach().clone()
    used = torch.zeros(40, dtype=torch.bool, device=device)
    valid = (indices >= 0) & (indices < 40)
    used[indices[valid].long()] = True
    assert not used[0] and not used[39]
    with torch.no_grad():
        kv[~used] = float("nan")
    result = sparse_attention(q, kv, indices, softmax_scale=0.3, v_dim=12, policy=SMALL)
    assert torch.isfinite(result.out).all() and torch.isfinite(result.lse).all()
    result.out.sum().backward()
    q64, kv64 = double_leaf(q), clean.double().requires_grad_()
    out64, *_ = reference(q64, kv64, indices, v_dim=12, softmax_scale=0.3)
    out64.sum().backward()
    assert relative_error(result.out, out64) < 2e-6
    assert relative_error(q.grad, q64.grad) < 2e-6
    assert relative_error(kv.grad, kv64.grad) < 2e-6
    assert (kv.grad[~used] == 0).all()


@pytest.mark.parametrize("with_sink", [False, True])
def test_empty_rows(device, with_sink):
    """Queries without a key give 0, lse -inf and no gradient, also with a sink."""
    q, kv, indices = make_case(12, 30, 4, 16, 8, device=device, dtype=torch.float64)
    indices[3] = -1
    length = torch.full((12,), 8, dtype=torch.int32, device=device)
    length[5] = 0
    length[6] = 2
    sink = leaf(4, seed=5, device=device, dtype=torch.float32) if with_sink else None
    result = check(
        q, kv, indices, v_dim=16, tolerance=1e-6 if with_sink else 1e-12, sink=sink,
        topk_length=length,
    )  # fmt: skip
    for row in (3, 5):
        assert (result.out[row] == 0).all()
        assert (result.lse[row] == float("-inf")).all()
        assert (result.p_sum[row] == 0).all()
        assert (q.grad[row] == 0).all()


def test_sink_is_a_gate(device):
    q, kv, indices = make_case(9, 20, 4, 16, 6, device=device, dtype=torch.float64)
    sink = leaf(4, seed=7, device=device, dtype=torch.float64)
    plain = sparse_attention(q, kv, indices, softmax_scale=0.3, v_dim=16)
    with_sink = sparse_attention(q, kv, indices, softmax_scale=0.3, v_dim=16, attn_sink=sink)
    gate = torch.sigmoid(plain.lse - sink)[..., None]
    assert relative_error(with_sink.out, plain.out * gate) < 1e-12
    assert torch.equal(with_sink.lse, plain.lse)


def test_teacher_is_the_head_sum_of_the_probabilities(device):
    q, kv, indices = make_case(11, 30, 6, 16, 8, device=device, dtype=torch.float64, causal=True)
    result = sparse_attention(
        q, kv, indices, softmax_scale=0.3, v_dim=16, want_p_sum=True, policy=SMALL
    )
    valid = indices >= 0
    keys = kv[indices.clamp_min(0).long()]
    logits = torch.einsum("qhd,qkd->qhk", q, keys) * 0.3
    p = torch.softmax(logits.masked_fill(~valid[:, None], float("-inf")), -1).sum(1)
    assert relative_error(result.p_sum, p) < 1e-12
    assert (result.p_sum[~valid] == 0).all()
    # The same from a second pass, for forwards that do not have the probabilities.
    inputs = SparseAttentionInputs(
        q.detach(), kv.detach(), indices, 16, 0.3, None, None, SMALL.workspace_bytes
    )
    assert relative_error(unfused.probabilities(inputs, result.lse), p) < 1e-12


def test_repeated_calls_do_not_accumulate(device):
    """Gradients of a second call equal those of the first."""
    grads = []
    for _ in range(2):
        q, kv, indices = make_case(16, 20, 4, 16, 8, device=device, dtype=torch.float64)
        sparse_attention(q, kv, indices, softmax_scale=1.0, v_dim=8).out.sum().backward()
        grads.append((q.grad, kv.grad))
    for first, second in zip(*grads, strict=True):
        assert relative_error(second, first) < 1e-14


def test_fp32_gradient_channel(device):
    """With ``kv_grad`` the key gradient arrives unrounded and kv itself gets none."""
    q, kv, indices = make_case(16, 20, 4, 16, 8, device=device, dtype=torch.bfloat16)
    q32, kv32 = q.detach().float().requires_grad_(), kv.detach().float().requires_grad_()
    channel = torch.zeros(20, 16, device=device, requires_grad=True)
    grad = torch.randn(16, 4, 8, device=device).bfloat16()
    sparse_attention(
        q, kv.detach(), indices, softmax_scale=0.3, v_dim=8, kv_grad=channel
    ).out.backward(grad)
    sparse_attention(q32, kv32, indices, softmax_scale=0.3, v_dim=8).out.backward(grad.float())
    assert channel.grad.dtype == torch.float32
    assert relative_error(channel.grad, kv32.grad) < SPARSE_ATTENTION[torch.bfloat16]
    # Unrounded means: not representable in bf16.
    assert not torch.equal(channel.grad, channel.grad.bfloat16().float())


def test_strided_queries(device):
    """Megatron's [s, b, h, d] is used as it is; a strided view gives the same result."""
    q, kv, indices = make_case(16, 20, 4, 16, 8, device=device, dtype=torch.float64)
    wide = torch.randn(16, 4, 40, dtype=torch.float64, device=device)
    wide[..., :16] = q.detach()
    strided = wide[..., :16]
    expected = sparse_attention(q, kv, indices, softmax_scale=0.3, v_dim=8).out
    assert torch.equal(
        sparse_attention(strided, kv, indices, softmax_scale=0.3, v_dim=8).out, expected
    )


def test_there_is_no_separate_value(device):
    """The value is a slice of kv; a separate one must not be ignored silently."""
    q, kv, indices = make_case(4, 8, 2, 8, 4, device=device, dtype=torch.float32)
    with pytest.raises(TypeError):
        sparse_attention(q, kv, indices, softmax_scale=1.0, v_dim=8, v=kv)


@pytest.mark.gpu
def test_no_host_synchronisation():
    q, kv, indices = make_case(64, 80, 4, 16, 8, device="cuda", dtype=torch.bfloat16)
    sink = leaf(4, seed=1, device="cuda")
    for attempt in range(2):  # the first call may load kernels
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            out = sparse_attention(
                q, kv, indices, softmax_scale=0.3, v_dim=8, attn_sink=sink, policy=SMALL
            ).out
            out.backward(torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "most"), [(128, (2.5e-3, 1.9e-3)), (64, (3.0e-3, 2.4e-3))])
def test_rounding_of_gradients(heads, most):
    """Above 64 heads, dS is rounded once: P enters it with its rounding error."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper's kernels")
    passes = ("forward", "backward")
    policy = Policy(named=tuple((f"sparse_attention_{name}", "tilelang") for name in passes))
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        q = leaf(32, heads, 576, seed=1, device="cuda", dtype=torch.bfloat16).detach()
        kv = leaf(4096, 576, seed=2, device="cuda", dtype=torch.bfloat16).detach()
        gradient = leaf(32, heads, 512, seed=3, device="cuda", dtype=torch.bfloat16).detach()
        order = torch.rand(32, 4096, generator=torch.Generator().manual_seed(4)).argsort(1)
        indices = order[:, :1024].int().cuda().contiguous()
        q = q.to(dtype).requires_grad_()
        kv = kv.to(dtype)
        kv_grad = torch.zeros_like(kv, dtype=accumulation_dtype(dtype)).requires_grad_()
        out = sparse_attention(
            q, kv, indices, softmax_scale=192**-0.5, v_dim=512, kv_grad=kv_grad,
            policy=policy if dtype == torch.bfloat16 else Policy(fused=False),
        ).out  # fmt: skip
        out.backward(gradient.to(dtype))
        found.append((q.grad, kv_grad.grad))
    for own, exact, bound in zip(*found, most, strict=True):
        assert relative_error(own, exact) < bound
