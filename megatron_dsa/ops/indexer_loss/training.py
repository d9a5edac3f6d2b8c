"""Indexer training inside an attention's backward, which has the sparse loss's teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from megatron_dsa.ops.common.arithmetic import rows_in_budget, slices, sum_mm
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.common.scaling import Factor, scaled, scaled_together
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss.api import SelectedKeysLoss, query_gradient_dtype
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, check_indexer
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.rope.api import rotate_index


@dataclass(frozen=True)
class LatentQueries:
    """Index queries as a product of latents and a weight, rotated: any tokens on request.

    Attributes:
        latent: ``[Sq, L]``, without gradient.
        weight: ``[HI * DI, L]``, in its dtype.
        heads: ``HI``.
        policy: which implementations may run.
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
        """``DI``."""
        return self.weight.shape[0] // self.heads

    @torch.no_grad()
    def formed(self, tokens: slice = slice(None)) -> torch.Tensor:
        """Compute the queries ``[tokens, HI, DI]`` of some tokens, without gradient."""
        product = torch.nn.functional.linear(self.latent[tokens], self.weight)
        return self._rotated(product.view(len(product), self.heads, self.dim), tokens)

    def product_gradient(self, dq: torch.Tensor, tokens: slice) -> torch.Tensor:
        """Return the gradient ``[tokens, HI * DI]`` of the product, given that of the queries."""
        return self._rotated(dq, tokens, transposed=True).flatten(1)

    def _rotated(self, x: torch.Tensor, tokens: slice, transposed: bool = False) -> torch.Tensor:
        return rotate_index(
            x, self.cos[tokens], self.sin[tokens], neighbours=self.neighbours,
            transform=self.transform, rounded=self.rounded, transposed=transposed,
            policy=self.policy,
        )  # fmt: skip


@dataclass(frozen=True)
class LatentIndexerInputs:
    """:class:`IndexerInputs` whose queries are computed twice, in the selection and in the loss.

    An indexer has as many heads as its model says, however few the attention of a rank has: 64 of
    128 dims in DeepSeek-V3.2, 16 KiB per token. The latents are kept anyway, for the attention's
    queries. So the selection drops the index queries, and the backward of the sparse loss computes
    them again block by block.

    Attributes:
        queries: the source of the queries.
        k, weights, relu, fp32_weights, checked: see ``IndexerInputs``.
        ready: queries already computed for the selection, at most one entry; consumed once.
    """

    queries: LatentQueries
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True
    fp32_weights: torch.Tensor | None = None
    checked: bool = False
    ready: list[IndexerInputs] = field(default_factory=list, repr=False, compare=False)

    @torch.no_grad()
    def formed(self) -> IndexerInputs:
        """Return the inputs with the queries of all tokens, the same bits each time, no gradient.

        Takes those that are ``ready``.
        """
        if self.ready:
            return self.ready.pop()
        return IndexerInputs(
            self.queries.formed(), self.k.detach(), self.weights.detach(), self.relu,
            fp32_weights=self.fp32_weights, checked=self.checked,
        )  # fmt: skip

    def shaped(self) -> IndexerInputs:
        """Return inputs with the shapes and dtypes of these, whose queries take no memory.

        Raises:
            ConfigError: latents and weight do not fit.
        """
        x = self.queries
        fix = "flatten sequence and batch to tokens"
        require_tensor("inputs.latent", x.latent, ("Sq", "L"), FLOATS, fix=fix)
        shape, fix = ("HI * DI", x.latent.shape[1]), "give the weight that projects the latents"
        require_tensor("inputs.weight", x.weight, shape, (x.latent.dtype,), x.latent, fix)
        q = x.latent.new_empty(()).expand(len(x.latent), x.heads, x.dim)
        return IndexerInputs(q, self.k, self.weights, self.relu)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the weight of the queries, k and weights, which get gradients, then the rest."""
        x = self.queries
        return x.weight, self.k, self.weights, x.latent, x.cos, x.sin

    def with_tensors(self, tensors: Sequence[Any]) -> LatentIndexerInputs:
        """Return the same with other :meth:`tensors`; ``ready`` is shared."""
        weight, k, weights, latent, cos, sin = tensors
        queries = replace(self.queries, weight=weight, latent=latent, cos=cos, sin=sin)
        return replace(self, queries=queries, k=k, weights=weights)

    def without_tensors(self) -> LatentIndexerInputs:
        return replace(self.with_tensors((None,) * 6), fp32_weights=None, ready=[])


#: What an indexer returns.
TrainedIndexer = IndexerInputs | LatentIndexerInputs


class TeacherPart(NamedTuple):
    """Teacher of some query tokens; see :class:`SparseLossInputs`, but of local heads only."""

    tokens: slice
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    teacher: torch.Tensor

    def of(self, some: slice) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return indices, lengths and teacher of some of the tokens."""
        length = None if self.topk_length is None else self.topk_length[some]
        return self.indices[some], length, self.teacher[some]


@dataclass(frozen=True)
class IndexerTraining:
    """What :func:`megatron_dsa.dsa_kernels.sparse_attention` needs to train the indexer.

    The teacher is the head sum of the attention probabilities, which the backward recomputes
    anyway. So the loss gets its exact value there, and the indexer's tensors get their gradients
    from the attention's backward; the forward computes nothing for it.

    Attributes:
        inputs: the indexer's tensors; gradients flow to q, k and weights, or with
            :class:`LatentIndexerInputs` to the weight of the queries in place of q.
        layout: the layout that the selection was made with.
        weight: called in the backward; returns the factor on the gradient of the KL *sum* over
            query tokens (coefficient, mean over tokens, scale of auxiliary losses): a number, a
            scalar tensor on the device, or a :class:`Factor`.
        record: called in the backward with the KL sum (detached scalar), for the log.
        head_group: process group over which heads are sharded; the teacher is summed over it.
        selected_only: the teacher is a softmax over the selected keys only, without window and
            sink of V4's attention.
    """

    inputs: TrainedIndexer
    layout: Layout
    weight: Callable[[], Factor | torch.Tensor | float]
    record: Callable[[torch.Tensor], None] = lambda kl_sum: None
    head_group: object | None = None
    selected_only: bool = False

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of ``inputs``; the first three get gradients."""
        return self.inputs.tensors()

    def gradients(
        self, tensors, parts: Iterable[TeacherPart], policy: Policy
    ) -> tuple[torch.Tensor | None, ...]:
        """Record the loss and return the weighted gradients of ``tensors``, in their dtypes.

        Args:
            tensors: the result of :meth:`tensors`, as saved for the backward.
            parts: the teacher of all query tokens, part by part. A part is computed after the loss
                of the one before, and dropped with it.
            policy: which implementations may run.
        """
        trained, (_, k, weights) = tensors[:3], tensors[:3]
        factor = self.weight()
        queries = _queries(self.inputs.with_tensors(tensors), factor, policy)
        dk, value, dweights = None, None, []
        for part in parts:
            for tokens, some, q, dq in queries.blocks(part.tokens):
                inputs = IndexerInputs(q, k, weights[tokens], self.inputs.relu)
                loss = SelectedKeysLoss(self.layout, *part.of(some), policy, self.head_group)
                kl_sum, gradients = loss.with_gradients(inputs, dq)
                assert gradients is not None
                value = kl_sum if value is None else value + kl_sum
                dweights.append(gradients.weights)
                dk = gradients.k if dk is None else dk.add_(gradients.k)
                del q, dq, inputs, loss, gradients  # before the next block takes memory
            del part
        assert dk is not None and value is not None
        self.record(value)
        dq, is_scaled = queries.gradient()
        rest = dk, dweights[0] if len(dweights) == 1 else torch.cat(dweights)
        dtypes = [x.dtype for x in trained]
        if is_scaled:
            found = dq.to(dtypes[0]), *scaled_together(rest, factor, dtypes[1:], in_place=True)
        else:
            found = scaled_together((dq, *rest), factor, dtypes, in_place=True)
        return *found, *(None for _ in tensors[3:])


def separate_tensors(
    indexer: IndexerTraining | None, **queries: torch.Tensor
) -> tuple[IndexerTraining | None, tuple[torch.Tensor, ...]]:
    """Return ``indexer`` without its tensors, and these, for an attention that autograd saves.

    Args:
        indexer: of a call, or ``None``, which has no tensors.
        queries: tensors with one entry per query token of ``indexer.layout``, by argument name.

    Raises:
        ConfigError: the indexer's tensors, its layout and ``queries`` do not fit.
    """
    if indexer is None:
        return None, ()
    check_indexer(indexer.inputs.shaped(), indexer.layout, **queries)
    return replace(indexer, inputs=indexer.inputs.without_tensors()), indexer.tensors()


#: Tokens of a block, the same counted from the first of its part, their queries, and a buffer that
#: the loss writes their gradient to.
QueryBlock = tuple[slice, slice, torch.Tensor, torch.Tensor]


class _KeptQueries:
    """Queries that the forward kept: one block per part; their gradient."""

    def __init__(self, q: torch.Tensor):
        self._q = q
        self._dq = torch.empty(q.shape, dtype=query_gradient_dtype(q.dtype), device=q.device)

    def blocks(self, tokens: slice) -> Iterator[QueryBlock]:
        yield tokens, slice(None), self._q[tokens], self._dq[tokens]

    def gradient(self) -> tuple[torch.Tensor, bool]:
        """Return the gradient of the queries; it still lacks the factor."""
        return self._dq, False


class _RecomputedQueries:
    """Queries computed again for a block of tokens; the gradient of their weight."""

    def __init__(self, queries: LatentQueries, factor: Factor | torch.Tensor | float, budget: int):
        self._queries, self._factor = queries, factor
        weight = queries.weight
        self._dtype = query_gradient_dtype(weight.dtype)
        # A query and its gradient.
        per_token = weight.shape[0] * (weight.dtype.itemsize + self._dtype.itemsize)
        self._longest = rows_in_budget(budget, per_token)
        self._dweight: torch.Tensor | None = None

    def blocks(self, tokens: slice) -> Iterator[QueryBlock]:
        """Yield blocks of about equal length within the budget, and take up their gradient."""
        first, last, _ = tokens.indices(len(self._queries.latent))
        count = max(1, -(-(last - first) // self._longest))
        size = max(1, -(-(last - first) // count))
        for some in slices(last - first, size) if last > first else [slice(0, 0)]:
            block = slice(first + some.start, first + some.stop)
            q = self._queries.formed(block)
            dq = torch.empty(q.shape, dtype=self._dtype, device=q.device)
            yield block, some, q, dq
            del q
            self._add(block, dq)
            del dq  # before the next block takes memory

    def _add(self, tokens: slice, dq: torch.Tensor) -> None:
        x = self._queries
        if dq.dtype != x.weight.dtype:  # it could underflow without the factor
            dq = scaled(dq, self._factor, x.weight.dtype)
        dq = x.product_gradient(dq, tokens)
        self._dweight = sum_mm(self._dweight, dq.t(), x.latent[tokens])

    def gradient(self) -> tuple[torch.Tensor, bool]:
        """Return the gradient of the weight, and whether it has the factor."""
        assert self._dweight is not None
        return self._dweight, self._dtype != self._queries.weight.dtype


def _queries(
    inputs: TrainedIndexer, factor: Factor | torch.Tensor | float, policy: Policy
) -> _KeptQueries | _RecomputedQueries:
    if isinstance(inputs, IndexerInputs):
        return _KeptQueries(inputs.q)
    # Recomputed queries and their gradient take half of the workspace.
    return _RecomputedQueries(inputs.queries, factor, policy.workspace_bytes // 2)
