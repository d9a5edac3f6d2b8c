"""Index scores that could be NaN or infinite are refused before anything is selected."""

from __future__ import annotations

import dataclasses

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import require_on_device
from megatron_dsa.ops.common.scaling import has_triton
from megatron_dsa.ops.dispatch import on_meta
from megatron_dsa.ops.indexer_topk.inputs import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout

ADVICE = (
    "check the indexer's parameters (checkpoint, learning rate) and the hidden states that enter "
    "the layer"
)


@torch.no_grad()
def require_finite_scores(inputs: IndexerInputs, layout: Layout, where: str) -> IndexerInputs:
    """Return ``inputs``, marked as checked, if every score between tokens of ``layout`` is finite.

    Comparisons with NaN are false: a selection would leave out a key, or all keys of a query,
    without a word. Scores are finite if the inputs are and no sum of products can overflow, so the
    inputs are checked, of which there are far fewer.

    Queries that see no key and keys that no query sees may hold anything in packed batches, where
    they are padding. Inputs that are marked are not checked again. Three small kernels on a GPU
    and no synchronisation.

    Args:
        inputs: the indexer's tensors, in 16 bits or more.
        layout: which keys each query sees.
        where: what the message calls the place, a layer or an operation.

    Raises:
        ConfigError: an input is NaN or infinite, or a score could be. On a GPU a device assert.
    """
    tensors = (inputs.q, inputs.k, inputs.weights)
    if inputs.checked or on_meta() or any(x.numel() == 0 for x in tensors):
        return inputs
    unseen = _Unseen.of(layout)
    heads, dim = inputs.q.shape[1:]
    limit = torch.finfo(accumulation_dtype(inputs.q.dtype)).max / (2 * heads * dim)
    hidden = unseen.queries, unseen.keys, unseen.queries
    if inputs.q.is_cuda and has_triton() and all(x.dtype != torch.float64 for x in tensors):
        from megatron_dsa.ops.indexer_topk.finite_triton import sums_fit  # needs Triton

        holds = sums_fit(tensors, hidden, limit)
    else:
        q, k, weights = map(_largest, tensors, hidden)
        products = q * k
        # The products of a head are summed before they are weighted: both sums have to fit.
        holds = torch.addcmul(products, products, weights) < limit
    require_on_device(
        holds, f"{where}: index scores are NaN or infinite: {ADVICE}",
        lambda: _explain(inputs, unseen, where),
    )  # fmt: skip
    return dataclasses.replace(inputs, checked=True)


@dataclasses.dataclass(frozen=True)
class _Unseen:
    """Padding: bool ``[num_queries]`` and ``[num_keys]``, ``None`` if there is none."""

    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None

    @classmethod
    def of(cls, layout: Layout) -> _Unseen:
        if not layout.packed:
            return cls()
        return layout.derive("unseen queries and keys", lambda: cls._find(layout))

    @classmethod
    def _find(cls, layout: Layout) -> _Unseen:
        sees = (layout.end > layout.start).int()
        # Ranges begin and end: their sum up to a slot is how many of them cover it.
        changes = sees.new_zeros(layout.num_keys + 1)
        changes.index_add_(0, layout.start, sees).index_add_(0, layout.end, -sees)
        slots = changes.cumsum(0)[:-1] == 0
        if layout.key_rows is not None:
            slots = torch.empty_like(slots).index_copy_(0, layout.key_rows, slots)
        return cls(sees == 0, slots)


def _largest(x: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
    """Return the largest magnitude, a scalar in the accumulation dtype; NaN if there is one."""
    dtype, inf = accumulation_dtype(x.dtype), float("inf")
    if unseen is None:
        return torch.linalg.vector_norm(x, inf, dtype=dtype)
    tokens = torch.linalg.vector_norm(x, inf, dim=tuple(range(1, x.dim())), dtype=dtype)
    return tokens.masked_fill_(unseen, 0.0).amax()


def _explain(inputs: IndexerInputs, unseen: _Unseen, where: str) -> str:
    """Say how many tokens are concerned; waits for the device."""

    def wrong(x: torch.Tensor, unseen: torch.Tensor | None) -> torch.Tensor:
        found = ~x.isfinite().flatten(1).all(1)
        return found if unseen is None else found & ~unseen

    q, weights = wrong(inputs.q, unseen.queries), wrong(inputs.weights, unseen.queries)
    keys = wrong(inputs.k, unseen.keys)
    if not (q | weights).any() and not keys.any():
        largest = ", ".join(
            f"{name} {_largest(x, hidden):.1e}"
            for name, x, hidden in (
                ("q", inputs.q, unseen.queries),
                ("k", inputs.k, unseen.keys),
                ("weights", inputs.weights, unseen.queries),
            )
        )
        return (
            f"{where}: index scores must be finite, but sums of products of these inputs can "
            f"overflow {accumulation_dtype(inputs.q.dtype)} (largest magnitudes: {largest}): "
            f"{ADVICE}"
        )
    return (
        f"{where}: index scores must be finite, but inputs of the indexer are NaN or infinite: "
        f"queries of {int(q.sum())} and weights of {int(weights.sum())} of {len(q)} query tokens, "
        f"keys of {int(keys.sum())} of {len(keys)} key tokens: {ADVICE}"
    )
