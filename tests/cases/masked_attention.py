"""Calls of masked dense attention with all kinds of lists, compared with float64."""

import torch

from megatron_dsa.dsa_kernels import key_bits, masked_attention
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.testing.cases import Lists
from megatron_dsa.testing.comparison import SPARSE_ATTENTION, Comparison, by_figure
from megatron_dsa.testing.masked_attention import MaskedDims, MaskedReference, masked_case

DIMS = MaskedDims(heads=3, nope=8, rope=4, v=6)
#: Several blocks of queries and of keys.
SMALL = Policy(workspace_bytes=40_000)


def ascending_lists(queries, keys, width, seed=0):
    """Draw ascending lists, then -1; every fifth query has no key."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((queries, width), -1, dtype=torch.int32)
    for token in range(queries):
        chosen = torch.randperm(keys, generator=generator)[: width - token % 3]
        indices[token, : len(chosen)] = chosen.sort().values.int()
    indices[2::5] = -1
    return Lists(indices, None, keys)


def mixed_lists(queries, keys, width, seed=0):
    """Draw lists in any order, with -1, invalid ids, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    indices = ascending_lists(queries, keys, width, seed).indices
    for token in range(queries):
        indices[token] = indices[token, torch.randperm(width, generator=generator)]
    indices[1::4, :1] = keys
    indices[3::4, -1:] = 2**31 - 1
    length = torch.randint(-1, width + 2, (queries,), generator=generator).int()
    return Lists(indices, length, keys)


def bits_of(lists, policy=SMALL):
    return key_bits(lists.indices, lists.length, lists.num_keys, policy=policy)


def check(lists, dtype=torch.float64, policy=SMALL):
    """Compare values, head sums and all gradients with float64."""
    case = masked_case(DIMS, lists, dtype)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.kv, case.k_pe)]
    result = masked_attention(
        *leaves, bits_of(lists, policy), softmax_scale=case.softmax_scale,
        topk=lists.indices.shape[1], want_p_sum=True, policy=policy,
    )  # fmt: skip
    grads = torch.autograd.grad(result.out, leaves, case.dout)
    tolerance = SPARSE_ATTENTION[dtype]
    reference, found = MaskedReference(case), Comparison(tolerance, by_figure(tolerance))
    reference.forward(found, result.out, result.lse)
    reference.backward(found, *grads)
    reference.compact_teacher(found, result.p_sum)
    assert not found.wrong()
    assert [x.dtype for x in grads] == [dtype] * 3
    return result
