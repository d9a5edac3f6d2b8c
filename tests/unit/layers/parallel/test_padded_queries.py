"""Absorbed queries are written with the padding that the forward's kernel requires."""

import dataclasses

import pytest
import torch

from megatron_dsa.dsa_kernels import absorbed_attention, sparse_attention
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.sparse_attention.blocks import token_blocks
from tests.helpers import leaf, relative_error

#: Heads supported by the made-up kernel.
SIZES = (4, 8)
OWN, ROPE, RANK, VALUE = 5, 4, 11, 7


class Forward:
    """Torch's forward as a kernel for 4 or 8 heads that returns a view of as many."""

    def __init__(self):
        self.buffers, self.copied = [], 0

    def wrap(self, torchs):
        def forward(inputs):
            heads = inputs.q.shape[1]
            size = next(size for size in SIZES if heads <= size)
            if inputs.padded_q is None:
                self.copied += size > heads
                return torchs(inputs)
            q = inputs.padded_q
            assert q.shape[1] == size > heads and q.is_contiguous()
            assert inputs.q.data_ptr() == q.data_ptr() and torch.equal(inputs.q, q[:, :heads])
            assert not q[:, heads:].any()  # uninitialised memory is NaN in tests
            self.buffers.append(q.data_ptr())
            out, lse, _ = torchs(dataclasses.replace(inputs, q=q, padded_q=None))
            return out[:, :heads], lse[:, :heads], None

        return forward


def watching(torchs):
    """Return a backward that requires unpadded inputs, like kernels."""

    def backward(inputs, out, lse, dout):
        assert inputs.padded_q is None
        assert all(x.is_contiguous() for x in (inputs.q, lse, dout))
        return torchs(inputs, out, lse, dout)

    return backward


def leaves_of(heads, tokens=37):
    like = {"dtype": torch.float64, "device": "cpu"}
    return (
        leaf(tokens, heads, OWN + ROPE, seed=1, **like),
        leaf(53, RANK + ROPE, seed=2, **like),
        leaf(heads, OWN + VALUE, RANK, seed=3, scale=RANK**-0.5, **like),
    )


def lists(tokens=37):
    generator = torch.Generator().manual_seed(7)
    return torch.stack([torch.randperm(53, generator=generator)[:9] for _ in range(tokens)]).int()


def attend(leaves, indices, **settings):
    """Return output and gradients, in blocks of about ten tokens."""
    heads = leaves[0].shape[1]
    workspace = 10 * 2 * heads * (2 * RANK + ROPE) * 8
    policy = Policy(workspace_bytes=workspace)
    result = absorbed_attention(*leaves, indices, softmax_scale=0.3, policy=policy, **settings)
    dout = leaf(*result.out.shape, seed=4, dtype=torch.float64, device="cpu").detach()
    return (result.out, *torch.autograd.grad(result.out, leaves, dout)), result.lse


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("heads", [3, 4, 5, 8])
def test_results_with_padding(heads, recompute, add):
    leaves, indices = leaves_of(heads), lists()
    expected, lse = attend(leaves, indices)
    kernel = Forward()
    add("sparse_attention_backward", watching)
    add("sparse_attention_forward", kernel.wrap, head_sizes=SIZES)
    found, own_lse = attend(leaves, indices, recompute=recompute)
    for ours, reference in zip((*found, own_lse), (*expected, lse), strict=True):
        assert relative_error(ours, reference) < 1e-12
    padded = heads not in SIZES
    # One buffer for all blocks of the forward; the backward writes queries for its kernels.
    assert (len(kernel.buffers) > 2) == padded and len(set(kernel.buffers)) == padded
    assert bool(kernel.copied) == (padded and recompute)


def test_padding_is_not_kept(add):
    """Saved outputs must have the call's heads, without memory behind."""
    add("sparse_attention_forward", Forward().wrap, head_sizes=SIZES)
    leaves, indices = leaves_of(5), lists()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(leaves, indices)
    latents = [x for x in kept if x.shape[1:] == (5, RANK)]
    assert sum(len(x) for x in latents) == 37 and len(latents) > 2
    assert all(x.untyped_storage().nbytes() == x.numel() * 8 for x in latents)


def test_sparse_attention_returns_no_view_of_padding(add):
    def padding(torchs):
        def forward(inputs):
            out, lse, p_sum = torchs(inputs)
            return torch.cat([out, out], 1)[:, : out.shape[1]], lse, p_sum

        return forward

    add("sparse_attention_forward", padding, head_sizes=SIZES)
    q = leaf(37, 3, RANK + ROPE, seed=1, dtype=torch.float64, device="cpu")
    out = sparse_attention(q, leaves_of(3)[1], lists(), softmax_scale=0.3, v_dim=RANK).out
    assert out.untyped_storage().nbytes() == out.numel() * 8


def test_blocks_count_padding():
    call = describe_call("cpu", dtype=torch.bfloat16, heads=8, qk_dim=576, v_dim=512, topk=64)
    policy = Policy(workspace_bytes=2 * 100 * 8 * (576 + 512) * 2)

    def longest(kernel_heads):
        cpu = torch.device("cpu")
        return token_blocks(4000, 4000, call, policy, cpu, True, kernel_heads)[0].stop

    assert longest(0) == longest(16) == 100 and longest(64) == 25
