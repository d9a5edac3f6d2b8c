"""Accumulators of the gradients that the torch implementations form along with a loss."""

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.indexer_loss.inputs import IndexerGradients
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout


class Gradients:
    """Accumulators for dq, dk and dweights: fp32 (fp64 for fp64 inputs), dq in q's dtype."""

    def __init__(self, inputs: IndexerInputs, dq: torch.Tensor | None = None):
        acc = accumulation_dtype(inputs.q.dtype)
        # Each query row is written once, by its own block, so dq needs no wider accumulator.
        self.q = torch.zeros_like(inputs.q) if dq is None else dq.zero_()
        # One spare row takes the contributions of invalid indices.
        self._k = inputs.k.new_zeros(inputs.k.shape[0] + 1, inputs.k.shape[1], dtype=acc)
        self.weights = torch.zeros_like(inputs.weights, dtype=acc)

    @property
    def k(self) -> torch.Tensor:
        return self._k[:-1]

    @property
    def k_with_spare(self) -> torch.Tensor:
        return self._k

    def add_to_slots(self, layout: Layout, slots: slice, dk: torch.Tensor) -> None:
        """Add ``dk [slots, DI]`` to the rows of the key buffer that these slots are."""
        if layout.key_rows is None:
            self.k[slots].add_(dk)
        else:
            self.k.index_add_(0, layout.key_rows[slots], dk)

    def result(self) -> IndexerGradients:
        return IndexerGradients(self.q, self.k, self.weights)
