"""Calls of the sparse attention, and their comparison with float64."""

import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.testing.cases import Lists
from megatron_dsa.testing.comparison import Comparison, by_figure
from megatron_dsa.testing.sparse_attention import AttentionCase, AttentionReference
from tests.helpers import leaf, relative_error

SMALL = Policy(workspace_bytes=200_000)  # forces many chunks


def make_case(sq, skv, heads, dim, k, *, device, dtype, seed=0, causal=False):
    """Draw leaves ``q`` and ``kv``, and ascending random lists."""
    q = leaf(sq, heads, dim, seed=seed, device=device, dtype=dtype)
    kv = leaf(skv, dim, seed=seed + 1, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 2)
    indices = torch.full((sq, k), -1, dtype=torch.int32)
    for t in range(sq):
        visible = min(skv, t + 1) if causal else skv
        chosen = torch.randperm(visible, generator=generator)[:k].sort().values
        indices[t, : len(chosen)] = chosen.int()
    return q, kv, indices.to(device)


def check(
    q, kv, indices, *, v_dim, tolerance, sink=None, topk_length=None, scale=0.3, policy=SMALL
):
    """Compare the operation with float64; return its outputs."""
    result = sparse_attention(
        q, kv, indices, softmax_scale=scale, v_dim=v_dim, topk_length=topk_length,
        attn_sink=sink, want_p_sum=True, policy=policy,
    )  # fmt: skip
    dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(9))
    dout = dout.to(q.device, q.dtype)
    result.out.backward(dout)
    lists = Lists(indices, topk_length, len(kv))
    case = AttentionCase(q.detach(), kv.detach(), lists, sink, dout, v_dim, scale)
    reference, found = AttentionReference(case), Comparison(tolerance, by_figure(tolerance))
    reference.forward(found, result.out, result.lse, result.p_sum)
    reference.backward(found, q.grad, kv.grad, None if sink is None else sink.grad)
    assert not found.wrong()
    return result


CASE = {"device": "cuda", "dtype": torch.bfloat16}


def ragged_case(heads=64, dim=576, **where):
    """Draw lists with -1 in the middle, an invalid id, empty lists, lengths of 0 and above K."""
    q, kv, indices = make_case(24, 300, heads, dim, 128, **where or CASE)
    indices[3] = -1
    indices[:, 7] = -1
    indices[4, 9], indices[7, 2] = 300, 2**31 - 1
    length = torch.full((24,), 128, dtype=torch.int32, device=q.device)
    length[5], length[6], length[8], length[9] = 0, 2, 1000, -3
    slot = torch.arange(128, device=q.device)
    valid = (indices >= 0) & (indices < 300) & (slot < length[:, None])
    return q, kv, indices, length, valid


def check_poisoned(case, sink, run, compare):
    """Compare a ragged call with float64, then again with NaN in all unselected keys.

    Args:
        case: of :func:`ragged_case`.
        sink: a leaf or ``None``.
        run, compare: take ``(q, kv, indices, **rest)``.
    """
    q, kv, indices, length, valid = case
    used = torch.zeros(300, dtype=torch.bool, device=q.device)
    used[indices[valid].long()] = True
    used[0] = used[-1] = False
    indices[(indices == 0) | (indices == 299)] = -1
    clean = compare(q, kv, indices, topk_length=length, sink=sink)
    for query in (3, 5, 9):
        assert (clean.out[query] == 0).all() and (clean.lse[query] == float("-inf")).all()
        assert (clean.p_sum[query] == 0).all() and (q.grad[query] == 0).all()
    dq, dkv, q.grad, kv.grad = q.grad, kv.grad, None, None
    with torch.no_grad():
        kv[~used] = float("nan")
    again = run(q, kv, indices, topk_length=length, attn_sink=sink)
    dout = torch.randn(again.out.shape, generator=torch.Generator().manual_seed(9))  # as in check
    again.out.backward(dout.to(q.device, q.dtype))
    assert torch.equal(again.out, clean.out) and torch.equal(again.lse, clean.lse)
    assert torch.equal(q.grad, dq) and (kv.grad[~used] == 0).all()
    assert relative_error(kv.grad, dkv) < 1e-3  # atomics are not bitwise equal
