"""Indexer training inside the attention backward, which computes the teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import items_within, part_of, slices, sum_mm
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.common.scaling import Factor, scaled, scaled_together
from megatron_dsa.ops.common.tokens import select_tokens
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss.api import query_gradient_dtype, selected_keys_loss
from megatron_dsa.ops.indexer_loss.sample import QuerySample, draw_sample
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, check_indexer
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.layout.pools import KeyPools
from megatron_dsa.ops.rope.api import rotate_index


@dataclass(frozen=True)
class LatentQueries:
    """Latents and weight from which index queries are computed.

    Attributes:
        latent: ``[Sq, L]``, without gradient.
        weight: ``[HI * DI, L]``, same dtype.
        cos, sin, neighbours, transform, rounded: see
            :func:`~megatron_dsa.ops.rope.api.rotate_index`.
    """

    latent: torch.Tensor
    weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
    neighbours: bool
    transform: bool
    policy: Policy
    rounded: bool = False

    @property
    def dim(self) -> int:
        return self.weight.shape[0] // self.heads

    @torch.no_grad()
    def compute(self, tokens: slice = slice(None)) -> torch.Tensor:
        """Compute index queries ``[tokens, HI, DI]``, bitwise repeatable."""
        product = torch.nn.functional.linear(part_of(self.latent, tokens), self.weight)
        return self._rotated(product.view(product.shape[0], self.heads, self.dim), tokens)

    def product_gradient(self, dq: torch.Tensor, tokens: slice) -> torch.Tensor:
        return self._rotated(dq, tokens, transposed=True).flatten(1)

    def _rotated(self, x: torch.Tensor, tokens: slice, transposed: bool = False) -> torch.Tensor:
        return rotate_index(
            x, part_of(self.cos, tokens), part_of(self.sin, tokens), neighbours=self.neighbours,
            transform=self.transform, rounded=self.rounded, transposed=transposed,
            policy=self.policy,
        )  # fmt: skip


@dataclass(frozen=True)
class LatentIndexerInputs:
    """:class:`IndexerInputs` whose queries the backward recomputes from latents.

    This saves 16 KiB per token with DeepSeek-V3.2's 64 index heads.
    """

    queries: LatentQueries
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True
    fp32_weights: torch.Tensor | None = None

    @torch.no_grad()
    def with_queries(self) -> IndexerInputs:
        return IndexerInputs(
            self.queries.compute(), self.k.detach(), self.weights.detach(), self.relu,
            fp32_weights=self.fp32_weights,
        )  # fmt: skip

    def check(self, layout: Layout, **queries: torch.Tensor) -> None:
        x = self.queries
        fix = "flatten sequence and batch to tokens"
        require_tensor("inputs.latent", x.latent, ("Sq", "L"), FLOATS, fix=fix)
        shape, fix = ("HI * DI", x.latent.shape[1]), "give the weight that projects the latents"
        require_tensor("inputs.weight", x.weight, shape, (x.latent.dtype,), x.latent, fix)
        q = x.latent.new_empty(()).expand(len(x.latent), x.heads, x.dim)
        check_indexer(IndexerInputs(q, self.k, self.weights, self.relu), layout, **queries)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        x = self.queries
        return x.weight, self.k, self.weights, x.latent, x.cos, x.sin

    def with_tensors(self, tensors: Sequence[Any]) -> LatentIndexerInputs:
        weight, k, weights, latent, cos, sin = tensors
        x = self.queries  # a constructor is twice as fast as ``replace``
        queries = LatentQueries(
            latent, weight, cos, sin, x.heads, x.neighbours, x.transform, x.policy, x.rounded
        )
        return LatentIndexerInputs(queries, k, weights, self.relu, self.fp32_weights)


TrainedIndexer = IndexerInputs | LatentIndexerInputs


class TeacherPart(NamedTuple):
    tokens: slice
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    teacher: torch.Tensor

    def blocks(self, longest: int) -> Iterator[TeacherPart]:
        total = self.teacher.shape[0]
        count = max(1, -(-total // longest))
        if count == 1:
            yield self
            return
        for some in slices(total, -(-total // count)) if total else [slice(0, 0)]:
            length = None if self.topk_length is None else self.topk_length[some]
            first = self.tokens.start or 0
            part = slice(first + some.start, first + some.stop)
            yield TeacherPart(part, self.indices[some], length, self.teacher[some])

    def of_pools(self, pools: KeyPools, sample: QuerySample | None) -> TeacherPart:
        tokens = self.tokens if sample is None else sample.tokens[self.tokens]
        found = pools.of_lists(self.indices, self.topk_length, self.teacher, tokens)
        return TeacherPart(self.tokens, *found)


class Taught(Protocol):
    """Consumer of the teacher in the attention backward."""

    @property
    def selected_only(self) -> bool: ...

    @property
    def head_group(self) -> Any: ...

    def separate(self, **queries: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, ...]]: ...

    def sample(self, total: int, device: torch.device) -> QuerySample | None: ...

    def gradients(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Iterable[TeacherPart],
        policy: Policy,
        sample: QuerySample | None = None,
    ) -> tuple[torch.Tensor | None, ...]: ...


@dataclass(frozen=True)
class IndexerTraining:
    """Sparse loss that runs in the backward of :func:`megatron_dsa.dsa_kernels.sparse_attention`.

    The teacher is the head sum of the attention probabilities.

    Attributes:
        inputs: the indexer's tensors; gradients flow to q (or the weight of
            :class:`LatentIndexerInputs`), k and weights.
        weight: called in the backward; returns the factor on the gradient of the KL *sum*: a
            number, a scalar tensor on the device, or a :class:`Factor`.
        record: called in the backward with the KL sum (detached scalar).
        head_group: process group over which heads are sharded; the teacher is summed over it.
        selected_only: the teacher is a softmax over the selected keys, without V4's window and
            sink.
        share: share of the query tokens in the loss; every backward draws a sample
            (:mod:`megatron_dsa.ops.indexer_loss.sample`).
        head_parts: number of head groups, a multiple of the ranks that split the heads. One group
            teaches each sampled token, so ranks exchange no head sums.
        pools: pools that the keys of ``inputs`` represent; the teacher is summed per pool.
    """

    inputs: TrainedIndexer
    layout: Layout
    weight: Callable[[], Factor | torch.Tensor | float]
    record: Callable[[torch.Tensor], None] = lambda kl_sum: None
    head_group: object | None = None
    selected_only: bool = False
    share: float = 1.0
    head_parts: int = 1
    pools: KeyPools | None = None

    def check_parts(self, heads: int, group: Any) -> None:
        ranks = 1 if group is None else group.size()
        parts, rest = divmod(self.head_parts, ranks)
        require(
            self.head_parts == 1 or (rest == 0 and heads % parts == 0),
            f"indexer.head_parts must divide the {heads} heads on each of {ranks} ranks, got "
            f"{self.head_parts} on all: give a multiple of the ranks that divides all heads",
        )

    def separate(self, **queries: torch.Tensor) -> tuple[IndexerTraining, tuple[torch.Tensor, ...]]:
        inputs, tensors = self.inputs, self.inputs.tensors()
        if isinstance(inputs, LatentIndexerInputs):
            inputs.check(self.layout, **queries)
        else:
            check_indexer(inputs, self.layout, **queries)
        inputs = replace(inputs.with_tensors([None] * len(tensors)), fp32_weights=None)
        return replace(self, inputs=inputs), tensors

    def sample(self, total: int, device: torch.device) -> QuerySample | None:
        return draw_sample(total, self.share, device, self.head_group, self.head_parts)

    def gradients(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Iterable[TeacherPart],
        policy: Policy,
        sample: QuerySample | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Record the loss; return the weighted gradients of ``tensors`` in their dtypes.

        Args:
            tensors: from :func:`separate_tensors`; the first three get gradients.
            parts: parts of the teacher; each is computed after the previous part's loss.
            sample: query tokens of ``parts``; ``None``: all.
        """
        inputs, factor = self.inputs.with_tensors(tensors), Factor.of(self.weight())
        group = self.head_group
        if sample is not None:
            group = group if sample.parts == 1 else None
            factor = replace(factor, number=factor.number * sample.factor)
            inputs = _of_tokens(inputs, sample.tokens)
        queries: _KeptQueries | _RecomputedQueries
        if isinstance(inputs, IndexerInputs):
            queries = _KeptQueries(inputs.q)
        else:
            queries = _RecomputedQueries(inputs.queries, factor, policy.workspace_bytes // 2)
        dk, value, dweights = None, None, []
        for part in parts:
            if self.pools is not None:
                part = part.of_pools(self.pools, sample)
            for tokens, indices, length, teacher in queries.blocks(part):
                q, dq = queries.load(tokens)
                weights = part_of(inputs.weights, tokens)
                block = IndexerInputs(q, inputs.k, weights, inputs.relu)
                kl_sum, gradients = selected_keys_loss(
                    block, self.layout, indices, length, teacher, policy, group,
                    want_gradients=True, dq=dq,
                )  # fmt: skip
                assert gradients is not None
                value = kl_sum if value is None else value + kl_sum
                dweights.append(gradients.weights)
                dk = gradients.k if dk is None else dk.add_(gradients.k)
                del q, block, gradients, indices, length, teacher
                queries.add(tokens, dq)
                del dq
            del part
        assert dk is not None and value is not None
        self.record(value if sample is None else value * sample.factor)
        dq, is_scaled = queries.gradient()
        of_weights = dweights[0] if len(dweights) == 1 else torch.cat(dweights)
        rest = dk, of_weights
        dtypes = [x.dtype for x in tensors[:3]]
        if is_scaled:
            found = dq.to(dtypes[0]), *scaled_together(rest, factor, dtypes[1:], in_place=True)
        else:
            found = scaled_together((dq, *rest), factor, dtypes, in_place=True)
        dq, dk, of_weights = found
        if sample is not None:
            if isinstance(inputs, IndexerInputs):
                dq, of_weights = sample.spread(dq, of_weights)
            else:
                (of_weights,) = sample.spread(of_weights)
        return dq, dk, of_weights, *(None for _ in tensors[3:])


def separate_tensors(
    taught: Taught | None, **queries: torch.Tensor
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return ``taught`` without its tensors, and the tensors for autograd to save.

    ``queries`` maps argument names to tensors with one entry per query token.

    Raises:
        ConfigError: the tensors, the layout and ``queries`` do not fit.
    """
    return (None, ()) if taught is None else taught.separate(**queries)


def _of_tokens(inputs: TrainedIndexer, tokens: torch.Tensor) -> TrainedIndexer:
    if isinstance(inputs, IndexerInputs):
        q, weights = select_tokens(tokens, inputs.q, inputs.weights)
        return replace(inputs, q=q, weights=weights)
    x = inputs.queries
    latent, cos, sin, weights = select_tokens(tokens, x.latent, x.cos, x.sin, inputs.weights)
    queries = replace(x, latent=latent, cos=cos, sin=sin)
    return replace(inputs, queries=queries, weights=weights)


class _KeptQueries:
    def __init__(self, q: torch.Tensor):
        self._q = q
        self._dq = q.new_empty(*q.shape, dtype=query_gradient_dtype(q.dtype))

    def blocks(self, part: TeacherPart) -> Iterator[TeacherPart]:
        yield part

    def load(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return part_of(self._q, tokens), part_of(self._dq, tokens)

    def add(self, tokens: slice, dq: torch.Tensor) -> None:
        """Do nothing, since ``dq`` is a view of the whole gradient."""

    def gradient(self) -> tuple[torch.Tensor, bool]:
        return self._dq, False


class _RecomputedQueries:
    def __init__(self, queries: LatentQueries, factor: Factor | torch.Tensor | float, budget: int):
        self._queries, self._factor = queries, factor
        self._dtype = query_gradient_dtype(queries.weight.dtype)
        per_token = len(queries.weight) * (queries.weight.dtype.itemsize + self._dtype.itemsize)
        self._longest = items_within(budget, per_token)
        self._dweight: torch.Tensor | None = None

    def blocks(self, part: TeacherPart) -> Iterator[TeacherPart]:
        return part.blocks(self._longest)

    def load(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        q = self._queries.compute(tokens)
        return q, q.new_empty(*q.shape, dtype=self._dtype)

    def add(self, tokens: slice, dq: torch.Tensor) -> None:
        x = self._queries
        if dq.dtype != x.weight.dtype:  # unscaled fp16 gradients would underflow
            dq = scaled(dq, self._factor, x.weight.dtype)
        dq = x.product_gradient(dq, tokens)
        self._dweight = sum_mm(self._dweight, dq.t(), part_of(x.latent, tokens))

    def gradient(self) -> tuple[torch.Tensor, bool]:
        assert self._dweight is not None
        return self._dweight, self._dtype != self._queries.weight.dtype
