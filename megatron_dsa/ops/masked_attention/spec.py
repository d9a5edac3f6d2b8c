"""Masked dense attention: key bits, inputs, implementations, fake kernels, reference.

*Key bits* have one bit per query and key for all heads: int32 ``[Sq, G, 4]`` with ``G = ceil(Skv /
128)``. Bit ``2 n + e`` of word ``l`` of group ``g`` is key ``128 g + 8 n + 2 l + e`` (``n`` =
0..15, ``e`` = 0..1): a word has the columns that a thread of a tensor-core product holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import HOPPER, PORTABLE
from megatron_dsa.ops.dispatch.packages import TILELANG, TRITON
from megatron_dsa.ops.dispatch.support import ATOMIC_SUMS
from megatron_dsa.ops.meta import empty_sums, take_workspace

GROUP, WORDS = 128, 4


def groups(count: int) -> int:
    return -(-count // GROUP)


def pack(mask: torch.Tensor) -> torch.Tensor:
    queries, keys = mask.shape
    count = groups(keys)
    padded = torch.nn.functional.pad(mask, (0, count * GROUP - keys))
    # [Sq, G, n, l, e] -> [Sq, G, l, (n, e)].
    flags = padded.view(queries, count, 16, WORDS, 2).transpose(2, 3).flatten(3)
    # The sum of disjoint bits may wrap to set bit 31.
    return (flags.int() << _positions(mask)).sum(-1, dtype=torch.int32)


def unpack(bits: torch.Tensor, num_keys: int) -> torch.Tensor:
    flags = (bits[..., None] >> _positions(bits)) & 1
    flags = flags.bool().unflatten(3, (16, 2)).transpose(2, 3)
    return flags.flatten(1)[:, :num_keys]


def _positions(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(32, dtype=torch.int32, device=like.device)


@dataclass(frozen=True)
class KeyBitsInputs:
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    num_keys: int
    workspace_bytes: int


class ListedProbabilities(NamedTuple):
    """Probabilities of selected keys, summed over heads.

    Attributes:
        p_sum: ``[Sq, K]`` fp32 (fp64), ascending by key, then 0.
        indices: int32 ``[n, K]``, selected keys of ``n`` queries, ascending, then -1.
        length: int32 ``[n]``, number of selected keys.
    """

    p_sum: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True)
class VisibleBitsInputs:
    """Ranges ``[start[i], end[i])`` of visible slots, and the slot of each key."""

    start: torch.Tensor
    end: torch.Tensor
    slots: torch.Tensor | None
    num_keys: int
    workspace_bytes: int


@dataclass(frozen=True)
class MaskedAttentionInputs:
    """Inputs of masked attention, with key bits for all queries.

    Attributes:
        part: queries per part; part ``i`` has the ``i``-th ``q.shape[1]`` heads of ``kv``, or all
            heads if ``None``.
        kept: cached results for the next operation on the same inputs.
    """

    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    bits: torch.Tensor
    v_dim: int
    softmax_scale: float
    workspace_bytes: int
    part: int | None = None
    kept: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def nope_dim(self) -> int:
        return self.kv.shape[2] - self.v_dim

    def of_queries(self, tokens: slice) -> MaskedAttentionInputs:
        return replace(self, q=self.q[tokens], bits=self.bits[tokens], kept={})

    def by_part(self) -> Iterator[tuple[slice, MaskedAttentionInputs]]:
        part, heads = self.part or max(1, len(self.q)), self.q.shape[1]
        for i, some in enumerate(slices(len(self.q), part)):
            kv = self.kv[:, i * heads : (i + 1) * heads]
            yield some, replace(self.of_queries(some), kv=kv, part=None)

    def head_parts(self) -> list[slice]:
        """Split the heads into equal parts whose fp32 ``dq`` fits the workspace."""
        queries, heads, dim = self.q.shape
        most = max(1, self.workspace_bytes // (4 * max(1, queries) * dim))
        count = -(-heads // -(-heads // most))
        return [slice(first, min(first + count, heads)) for first in range(0, heads, count)]


_HERE = __package__
#: The TileLang kernels support plain MLA of V3.2, GLM-5 and, without rope, GLM-5.3.
_TILELANG: dict[str, Any] = {
    "package": TILELANG,
    "capabilities": (HOPPER,),
    "dtypes": (torch.bfloat16,),
    "dims": ((192, 128, 64), (256, 256, 64), (256, 256, 0)),
    "sink": False,
}


def _ours(name: str, **support: Any) -> Candidate:
    return Candidate("tilelang", f"{_HERE}.tilelang.launch:{name}", Support(**support, **_TILELANG))


def _triton(name: str, covers: str) -> Candidate:
    support = Support(covers=covers, package=TRITON, **PORTABLE)
    return Candidate("triton", f"{_HERE}.triton.bits:{name}", support)


def _torch(name: str, **support: Any) -> Candidate:
    support = {"covers": "any shape", **support}
    return Candidate("torch", f"{_HERE}.torch:{name}", Support(**support), fused=False)


KEY_BITS = Operation(
    "key_bits",
    "bits of listed keys",
    (_triton("key_bits", "one launch for any K"), _torch("key_bits")),
    fake=f"{_HERE}.spec:fake_bits",
)

VISIBLE_BITS = Operation(
    "visible_bits",
    "bits of visible keys",
    (_triton("visible_bits", "one launch for any layout"), _torch("visible_bits")),
    fake=f"{_HERE}.spec:fake_bits",
)

FORWARD = Operation(
    "masked_attention_forward",
    "masked dense attention forward",
    (_ours("forward", covers="out, lse"), _torch("forward", sink=False)),
    fake=f"{_HERE}.spec:fake_forward",
)

BACKWARD = Operation(
    "masked_attention_backward",
    "masked dense attention backward",
    (_ours("backward", covers="dq, dkv, dk_pe", **ATOMIC_SUMS), _torch("backward", sink=False)),
    fake=f"{_HERE}.spec:fake_backward",
)

PROBABILITIES = Operation(
    "masked_attention_probabilities",
    "head sum of the probabilities of masked dense attention",
    (
        _ours("probabilities", covers="p_sum and its keys from q, kv, k_pe, lse"),
        _torch("probabilities", sink=False),
    ),
    fake=f"{_HERE}.spec:fake_probabilities",
)


def fake_bits(candidate: Candidate, inputs: KeyBitsInputs | VisibleBitsInputs) -> torch.Tensor:
    per_query = inputs.indices if isinstance(inputs, KeyBitsInputs) else inputs.start
    bits = per_query.new_empty(len(per_query), groups(inputs.num_keys), WORDS)
    if not candidate.fused:
        take_workspace(bits, inputs.workspace_bytes)
    return bits


def fake_forward(candidate: Candidate, inputs: MaskedAttentionInputs):
    q = inputs.q.contiguous()
    out, lse = q.new_empty(*q.shape[:2], inputs.v_dim), empty_sums(q, *q.shape[:2])
    if not candidate.fused:
        take_workspace(q, inputs.workspace_bytes)
    return out, lse


def fake_backward(candidate: Candidate, inputs: MaskedAttentionInputs, out, lse, dout):
    q, kv = inputs.q.contiguous(), inputs.kv.contiguous()
    dq, dkv = torch.empty_like(q), torch.empty_like(kv)
    dk_pe = empty_sums(inputs.k_pe, *inputs.k_pe.shape)
    if not candidate.fused:
        take_workspace(q, inputs.workspace_bytes)
        return dq, dkv, dk_pe
    numbers, bits_t = _numbers(q), inputs.bits.new_empty(groups(len(kv)) * GROUP, groups(len(q)), 4)
    for part in inputs.head_parts():
        count = part.stop - part.start
        sums = q.new_empty(len(q), count, q.shape[2], dtype=torch.float32)
        dk_rope = inputs.k_pe.new_empty(len(kv), count, inputs.k_pe.shape[1])
        total = empty_sums(inputs.k_pe, *inputs.k_pe.shape)
        del sums, dk_rope, total
    inputs.kept["numbers"] = numbers
    del bits_t
    return dq, dkv, dk_pe


def fake_probabilities(
    candidate: Candidate, inputs: MaskedAttentionInputs, lse, width: int, listed: slice
):
    queries, bits = len(inputs.q), inputs.bits
    count = len(range(*listed.indices(queries)))
    found = ListedProbabilities(
        empty_sums(inputs.q, queries, width), bits.new_empty(count, width), bits.new_empty(count)
    )
    if not candidate.fused:
        take_workspace(inputs.q, inputs.workspace_bytes)
        return found
    numbers = inputs.kept.pop("numbers", None)
    numbers = _numbers(inputs.q) if numbers is None else numbers
    before = bits.new_empty(bits.shape[:2])
    del numbers, before
    return found


def _numbers(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[1], 2, groups(len(q)) * GROUP, dtype=torch.float32)


def reference(
    q: torch.Tensor, kv: torch.Tensor, k_pe: torch.Tensor, mask: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nope = q.shape[2] - k_pe.shape[1]
    logits = torch.einsum("qhd,khd->qhk", q[..., :nope], kv[..., :nope])
    logits = logits + torch.einsum("qhr,kr->qhk", q[..., nope:], k_pe)
    logits = (logits * softmax_scale).masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    # Queries without keys give 0 instead of 0/0.
    p = torch.exp(logits - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("qhk,khd->qhd", p, kv[..., nope:]), lse, p.sum(1)
