"""Index queries that are made of latents again, some tokens at a time, where the loss needs them.

An indexer has as many heads of queries as its model says, however few the attention of a rank has:
64 of 128 dims in DeepSeek-V3.2, 16 KiB per token. What they are made of is kept anyway: the latent,
which the attention's queries are made of, and a weight. So the selection makes all queries and
drops them, and the backward makes them again for a block of tokens, whose gradient goes into the
gradient of the weight at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from megatron_dsa.ops.common.arithmetic import rows_in_budget, slices, sum_mm
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.common.scaling import Factor, scaled
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.rope.api import rotate_index


@dataclass(frozen=True)
class LatentQueries:
    """Index queries, to be made from latents some tokens at a time.

    Attributes:
        latent: ``[Sq, L]``, without gradient.
        weight: ``[HI * DI, L]``, in its dtype.
        cos, sin: ``[Sq, R / 2]``, as of :func:`~megatron_dsa.ops.rope.api.rotate_index`.
        heads: ``HI``.
        neighbours, transform, rounded: as of ``rotate_index``.
        policy: which implementations may run.
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

    def check(self) -> None:
        """Raise :class:`~megatron_dsa.errors.ConfigError` for tensors that do not fit."""
        fix = "flatten sequence and batch to tokens"
        require_tensor("inputs.latent", self.latent, ("Sq", "L"), FLOATS, fix=fix)
        shape, fix = ("HI * DI", self.latent.shape[1]), "give the weight that projects the latents"
        require_tensor("inputs.weight", self.weight, shape, (self.latent.dtype,), self.latent, fix)

    @property
    def dim(self) -> int:
        """``DI``."""
        return self.weight.shape[0] // self.heads

    @torch.no_grad()
    def formed(self, tokens: slice = slice(None)) -> torch.Tensor:
        """Return the queries of some tokens, ``[tokens, HI, DI]``, without gradient."""
        product = torch.nn.functional.linear(self.latent[tokens], self.weight)
        return self._rotated(product.view(len(product), self.heads, self.dim), tokens)

    def turned_back(self, dq: torch.Tensor, tokens: slice) -> torch.Tensor:
        """Return the gradient of the product of latents and weight, given that of the queries."""
        return self._rotated(dq, tokens, transposed=True)

    def _rotated(self, x: torch.Tensor, tokens: slice, transposed: bool = False) -> torch.Tensor:
        return rotate_index(
            x, self.cos[tokens], self.sin[tokens], neighbours=self.neighbours,
            transform=self.transform, rounded=self.rounded, transposed=transposed,
            policy=self.policy,
        )  # fmt: skip


@dataclass(frozen=True)
class LatentIndexerInputs:
    """:class:`~megatron_dsa.ops.indexer_topk.spec.IndexerInputs` with queries made of latents.

    Attributes:
        queries: what the queries are made of.
        k, weights, relu, fp32_weights, checked: as of ``IndexerInputs``.
    """

    queries: LatentQueries
    k: torch.Tensor
    weights: torch.Tensor
    relu: bool = True
    fp32_weights: torch.Tensor | None = None
    checked: bool = False
    #: At most one entry: what :meth:`formed` hands out once.
    ready: list[IndexerInputs] = field(default_factory=list, repr=False, compare=False)

    @torch.no_grad()
    def formed(self) -> IndexerInputs:
        """Return the inputs with the queries of all tokens, without gradient.

        They are made anew, bit for bit, unless they are ``ready``.
        """
        if self.ready:
            return self.ready.pop()
        return IndexerInputs(
            self.queries.formed(), self.k.detach(), self.weights.detach(), self.relu,
            fp32_weights=self.fp32_weights, checked=self.checked,
        )  # fmt: skip

    def shaped(self) -> IndexerInputs:
        """Return inputs with the shapes and dtypes of these, whose queries hold nothing.

        Raises:
            ConfigError: latents and weight do not fit.
        """
        x = self.queries
        x.check()
        q = x.latent.new_empty(()).expand(len(x.latent), x.heads, x.dim)
        return IndexerInputs(q, self.k, self.weights, self.relu)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the weight of the queries, k and weights, which get gradients, then the rest."""
        x = self.queries
        return x.weight, self.k, self.weights, x.latent, x.cos, x.sin

    def with_tensors(self, tensors) -> LatentIndexerInputs:
        """Return the same with other :meth:`tensors`; ``ready`` is shared."""
        weight, k, weights, latent, cos, sin = tensors
        queries = replace(self.queries, weight=weight, latent=latent, cos=cos, sin=sin)
        return replace(self, queries=queries, k=k, weights=weights)

    def without_tensors(self) -> LatentIndexerInputs:
        """Return the same without tensors."""
        return replace(self.with_tensors((None,) * 6), fp32_weights=None, ready=[])


#: What an indexer returns: its tensors, or with latents in place of its queries.
TrainedIndexer = IndexerInputs | LatentIndexerInputs


class QueryBlocks:
    """Index queries that exist, and their gradient.

    The loss takes them block by block, writes the gradient of each and hands it back.
    """

    def __init__(self, q: torch.Tensor):
        self._q = q
        self._dq = torch.empty(q.shape, dtype=summed_in(q.dtype), device=q.device)

    def cut(self, tokens: slice) -> Iterator[tuple[slice, slice]]:
        """Cut tokens into blocks; yield which they are, and which of the given ones."""
        yield tokens, slice(None)

    def take(self, tokens: slice) -> torch.Tensor:
        """Return the queries of a block."""
        return self._q[tokens]

    def gradient(self, tokens: slice) -> torch.Tensor:
        """Return the tensor that takes the gradient of a block; it may hold anything."""
        return self._dq[tokens]

    def add(self, tokens: slice, dq: torch.Tensor) -> None:
        """Take the gradient of a block."""

    def result(self) -> tuple[torch.Tensor, bool]:
        """Return the gradient of what is trained, and whether it still lacks the factor."""
        return self._dq, True


class _BlocksOfLatents(QueryBlocks):
    """Queries that are made when they are asked for; what is trained is their weight."""

    def __init__(self, queries: LatentQueries, factor: Factor | torch.Tensor | float, budget: int):
        self._queries, self._factor = queries, factor
        weight = queries.weight
        self._dtype = summed_in(weight.dtype)
        # A query and its gradient.
        per_token = weight.shape[0] * (weight.dtype.itemsize + self._dtype.itemsize)
        self._longest = rows_in_budget(budget, per_token)
        self._total: torch.Tensor | None = None

    def cut(self, tokens: slice) -> Iterator[tuple[slice, slice]]:
        first, last, _ = tokens.indices(len(self._queries.latent))
        count = max(1, -(-(last - first) // self._longest))
        size = max(1, -(-(last - first) // count))
        for own in slices(last - first, size) if last > first else [slice(0, 0)]:
            yield slice(first + own.start, first + own.stop), own

    def take(self, tokens: slice) -> torch.Tensor:
        return self._queries.formed(tokens)

    def gradient(self, tokens: slice) -> torch.Tensor:
        x = self._queries
        return x.latent.new_empty(tokens.stop - tokens.start, x.heads, x.dim, dtype=self._dtype)

    def add(self, tokens: slice, dq: torch.Tensor) -> None:
        x = self._queries
        if dq.dtype != x.weight.dtype:  # it could underflow without the factor
            dq = scaled(dq, self._factor, x.weight.dtype)
        dq = x.turned_back(dq, tokens).flatten(1)
        self._total = sum_mm(self._total, dq.t(), x.latent[tokens])

    def result(self) -> tuple[torch.Tensor, bool]:
        assert self._total is not None
        return self._total, self._dtype == self._queries.weight.dtype


def query_blocks(
    inputs: TrainedIndexer, factor: Factor | torch.Tensor | float, policy: Policy
) -> QueryBlocks:
    """Return the queries of ``inputs`` as the loss asks for them.

    Args:
        inputs: the indexer's tensors.
        factor: on the gradients of the loss, as of :func:`~megatron_dsa.ops.common.scaling.scaled`.
        policy: queries that are made again, with their gradient, take half of its workspace.
    """
    if isinstance(inputs, IndexerInputs):
        return QueryBlocks(inputs.q)
    return _BlocksOfLatents(inputs.queries, factor, policy.workspace_bytes // 2)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of queries exist before the loss scale is applied.

    In fp16 they would underflow.
    """
    return torch.float32 if dtype == torch.float16 else dtype
