"""Calls of the sparse attention, and their comparison with float64."""

import torch

from megatron_dsa.dispatch import Policy
from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops.sparse_attention.reference import sparse_attention as reference
from tests.helpers import double_leaf, leaf, relative_error

SMALL = Policy(workspace_bytes=200_000)  # forces many chunks


def make_case(sq, skv, heads, dim, k, *, device, dtype, seed=0, causal=False):
    """Return random leaves ``q`` and ``kv``, and ascending lists of random keys."""
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
    """Compare the op with the float64 reference; return the op's outputs."""
    q64, kv64 = double_leaf(q), double_leaf(kv)
    sink64 = None if sink is None else double_leaf(sink)
    result = sparse_attention(
        q, kv, indices, softmax_scale=scale, v_dim=v_dim, topk_length=topk_length,
        attn_sink=sink, want_p_sum=True, policy=policy,
    )  # fmt: skip
    out64, lse64 = reference(
        q64, kv64, indices, v_dim=v_dim, softmax_scale=scale, topk_length=topk_length, sink=sink64
    )
    grad = torch.randn(out64.shape, generator=torch.Generator().manual_seed(9)).to(q.device)
    result.out.backward(grad.to(q.dtype))
    out64.backward(grad.to(q.dtype).double())
    assert relative_error(result.out, out64) < tolerance
    empty = lse64 == float("-inf")
    assert torch.equal(result.lse == float("-inf"), empty)
    assert relative_error(result.lse[~empty], lse64[~empty]) < tolerance
    pairs = [("dq", q.grad, q64.grad), ("dkv", kv.grad, kv64.grad)]
    if sink is not None:
        pairs.append(("dsink", sink.grad, sink64.grad))
    for name, got, expected in pairs:
        assert torch.isfinite(got).all(), name
        assert relative_error(got, expected) < tolerance, name
    return result


CASE = {"device": "cuda", "dtype": torch.bfloat16}


def ragged_case(heads=64, dim=576):
    """-1 in the middle, an id past the keys, empty rows, lengths of 0 and beyond K."""
    q, kv, indices = make_case(24, 300, heads, dim, 128, **CASE)
    indices[3] = -1
    indices[:, 7] = -1
    indices[4, 9] = 300
    length = torch.full((24,), 128, dtype=torch.int32, device="cuda")
    length[5], length[6], length[8] = 0, 2, 1000
    place = torch.arange(128, device="cuda")
    valid = (indices >= 0) & (indices < 300) & (place < length[:, None])
    return q, kv, indices, length, valid
