"""Inputs, float64 results and comparison of masked dense attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.masked_attention.spec import (
    ListedProbabilities,
    MaskedAttentionInputs,
    pack,
    reference,
)
from megatron_dsa.testing.cases import Lists, chunks, normal
from megatron_dsa.testing.comparison import Comparison


@dataclass(frozen=True)
class MaskedDims:
    """Heads per rank and dims per head (without rope, with rope, of values), by default V3.2's."""

    heads: int = 128
    nope: int = 128
    rope: int = 64
    v: int = 128


@dataclass(frozen=True)
class MaskedCase:
    """Inputs of forward and backward; for shapes see ``MaskedAttentionInputs``."""

    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    lists: Lists
    dout: torch.Tensor
    softmax_scale: float
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES

    @cached_property
    def mask(self) -> torch.Tensor:
        lists = self.lists
        mask = lists.valid.new_zeros(len(lists.indices), lists.num_keys + 1)
        column = torch.where(lists.valid, lists.indices, lists.num_keys).long()
        return mask.scatter_(1, column, True)[:, :-1]

    def inputs(self) -> MaskedAttentionInputs:
        return MaskedAttentionInputs(
            q=self.q, kv=self.kv, k_pe=self.k_pe, bits=pack(self.mask), v_dim=self.dout.shape[2],
            softmax_scale=self.softmax_scale, workspace_bytes=self.workspace_bytes,
        )  # fmt: skip


def masked_case(
    dims: MaskedDims, lists: Lists, dtype: torch.dtype = torch.bfloat16, seed: int = 2
) -> MaskedCase:
    """Draw a case with logits of standard deviation 1."""
    draw, tokens = normal(lists.indices.device, seed), len(lists.indices)
    dim = dims.nope + dims.rope
    q = draw(tokens, dims.heads, dim)
    # Nonzero means keep results from cancelling to rounding error.
    kv = draw(lists.num_keys, dims.heads, dims.nope + dims.v).add_(0.1)
    k_pe = draw(lists.num_keys, dims.rope).add_(0.1)
    dout = draw(tokens, dims.heads, dims.v) + draw(tokens, dims.heads, 1).sign()
    q, kv, k_pe, dout = (x.to(dtype) for x in (q, kv, k_pe, dout))
    return MaskedCase(q, kv, k_pe, lists, dout, dim**-0.5)


@dataclass(frozen=True)
class ExpectedMasked:
    """Float64 results of a :class:`MaskedCase`; ``p_sum [Sq, Skv]`` covers all keys."""

    out: torch.Tensor
    lse: torch.Tensor
    p_sum: torch.Tensor
    dq: torch.Tensor
    dkv: torch.Tensor
    dk_pe: torch.Tensor


def expected_masked(case: MaskedCase) -> ExpectedMasked:
    (queries, heads), num_keys = case.q.shape[:2], len(case.kv)
    out, dq, dkv, dk_pe = (
        torch.zeros_like(x, dtype=torch.float64) for x in (case.dout, case.q, case.kv, case.k_pe)
    )
    lse, p_sum = out.new_zeros(queries, heads), out.new_zeros(queries, num_keys)
    for part in chunks(heads, 8 * 8 * max(1, num_keys) * case.kv.shape[2]):
        kv = case.kv[:, part].detach().double().requires_grad_()
        k_pe = case.k_pe.detach().double().requires_grad_()
        for tokens in chunks(queries, 8 * 8 * max(1, num_keys) * kv.shape[1]):
            q = case.q[tokens, part].detach().double().requires_grad_()
            found = reference(q, kv, k_pe, case.mask[tokens], case.softmax_scale)
            found[0].backward(case.dout[tokens, part].double())
            assert q.grad is not None
            out[tokens, part], lse[tokens, part] = (x.detach() for x in found[:2])
            p_sum[tokens] += found[2].detach()
            dq[tokens, part] = q.grad
        if kv.grad is not None and k_pe.grad is not None:
            dkv[:, part] = kv.grad
            dk_pe += k_pe.grad
    return ExpectedMasked(out, lse, p_sum, dq, dkv, dk_pe)


def check_parts(
    found: Comparison, case: MaskedCase, parts: int, probabilities: Callable, width: int
) -> None:
    """Compare head sums where each of ``parts`` slices of queries has a slice of heads."""
    count, some = len(case.q) // parts, case.q.shape[1] // parts
    cases = []
    for i in range(parts):
        tokens, heads = (slice(i * n, (i + 1) * n) for n in (count, some))
        cases.append(
            replace(
                case, q=case.q[tokens, heads], kv=case.kv[:, heads], lists=case.lists.take(tokens),
                dout=case.dout[tokens, heads],
            )
        )  # fmt: skip
    references = [MaskedReference(each) for each in cases]
    q = torch.cat([each.q for each in cases])
    lse = torch.cat([each.expected.lse for each in references])
    inputs = replace(case.inputs(), q=q, part=count)
    sums = probabilities(inputs, lse.to(accumulation_dtype(q.dtype)), width, slice(None))
    for i, expected in enumerate(references):
        of_part = (x[i * count : (i + 1) * count] for x in sums)
        expected.listed_keys(found, ListedProbabilities(*of_part))


def compact(p_sum: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """Move entries of ``p_sum [Sq, Skv]`` under ``mask`` to the front of ``[Sq, width]``."""
    column = torch.where(mask, mask.cumsum(1) - 1, width)
    result = p_sum.new_zeros(len(p_sum), width + 1)
    return result.scatter_(1, column, p_sum.where(mask, 0))[:, :width]


class MaskedReference:
    def __init__(self, case: MaskedCase):
        self.case = case
        self.expected = expected_masked(case)

    def forward(self, found: Comparison, out: torch.Tensor, lse: torch.Tensor) -> None:
        case, expected = self.case, self.expected
        found.compare_forward(out, lse, expected.out, expected.lse, case.lists.empty, case.q.dtype)

    def backward(
        self, found: Comparison, dq: torch.Tensor, dkv: torch.Tensor, dk_pe: torch.Tensor
    ) -> None:
        lists = self.case.lists
        found.compare("dq", dq, self.expected.dq)
        found.compare("dkv", dkv, self.expected.dkv)
        found.compare("dk_pe", dk_pe, self.expected.dk_pe)
        found.require((dq[lists.empty] == 0).all(), "dq of a query without keys is not 0")
        for name, gradient in (("dkv", dkv), ("dk_pe", dk_pe)):
            rule = f"{name} of an unselected key is not 0"
            found.require((gradient[lists.unselected] == 0).all(), rule)

    def compact_teacher(self, found: Comparison, p_sum: torch.Tensor) -> None:
        mask, width = self.case.mask, p_sum.shape[1]
        found.compare("p_sum", p_sum, compact(self.expected.p_sum, mask, width))
        behind = torch.arange(width, device=mask.device) >= mask.sum(1, keepdim=True)
        found.require((p_sum[behind] == 0).all(), "p_sum behind the selected keys is not 0")

    def listed_keys(
        self, found: Comparison, sums: ListedProbabilities, listed: slice = slice(None)
    ) -> None:
        self.compact_teacher(found, sums.p_sum)
        mask, width = self.case.mask[listed], sums.indices.shape[1]
        keys = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
        expected = compact(torch.where(mask, keys, 0), mask, width) - 1
        found.require(torch.equal(sums.indices, expected), "indices are not the ascending keys")
        length = mask.sum(1, dtype=torch.int32)
        found.require(torch.equal(sums.length, length), "length is not the number of keys")
