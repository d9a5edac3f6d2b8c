"""Sparse indexer loss in torch."""

import dataclasses
from collections.abc import Iterator

import torch

from megatron_dsa.ops.common.arithmetic import (
    accumulation_dtype,
    bmm,
    items_within,
    valid_entries,
)
from megatron_dsa.ops.indexer_loss.spec import IndexerGradients, IndexerLoss, SparseLossInputs
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Layout


class Gradients:
    def __init__(self, inputs: IndexerInputs, dq: torch.Tensor | None = None):
        acc = accumulation_dtype(inputs.q.dtype)
        self.q = torch.zeros_like(inputs.q) if dq is None else dq.zero_()
        # The spare key collects gradients of invalid indices.
        self.k_with_spare = inputs.k.new_zeros(len(inputs.k) + 1, inputs.k.shape[1], dtype=acc)
        self.k = self.k_with_spare[:-1]
        self.weights = torch.zeros_like(inputs.weights, dtype=acc)

    def add_to_slots(self, layout: Layout, slots: slice, dk: torch.Tensor) -> None:
        if layout.key_indices is None:
            self.k[slots].add_(dk)
        else:
            self.k.index_add_(0, layout.key_indices[slots], dk)

    def result(self) -> IndexerGradients:
        return IndexerGradients(self.q, self.k, self.weights)


def sparse(inputs: SparseLossInputs) -> IndexerLoss:
    x = inputs.indexer
    acc = accumulation_dtype(x.q.dtype)
    value = x.q.new_zeros((), dtype=acc)
    grads = Gradients(x, inputs.dq) if inputs.want_gradients else None
    for chunk in _sparse_chunks(inputs):
        teacher = inputs.teacher[chunk.tokens]
        part, student = _kl_sum(chunk.logits(), teacher, chunk.mask)
        value += part
        if grads is not None:
            chunk.backward(student.sub_(teacher), grads)
    return IndexerLoss(value, None if grads is None else grads.result())


def _kl_sum(logits: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor):
    """Return the KL sum and the student; normalise ``teacher`` in place."""
    teacher.masked_fill_(~mask, 0.0)
    mass = teacher.sum(-1, keepdim=True)
    has_mass = mass > 0
    teacher.div_(torch.where(has_mass, mass, 1.0))
    logits = logits.masked_fill_(~mask, float("-inf"))
    # If all scores are -inf, replace softmax's NaN by 0.
    logits = logits.masked_fill_(~mask.any(-1, keepdim=True), 0.0)
    log_student = torch.log_softmax(logits, dim=-1)
    # Subtract per key: a difference of two large sums would lose digits.
    kl = torch.xlogy(teacher, teacher)
    kl.addcmul_(teacher, log_student.masked_fill(~mask, 0.0), value=-1)
    student = log_student.exp_().masked_fill_(~(mask & has_mass), 0.0)
    return kl.sum(), student


@dataclasses.dataclass
class _SparseChunk:
    inputs: IndexerInputs
    tokens: slice
    index: torch.Tensor  # [r, K] int64; invalid entries index the spare key
    mask: torch.Tensor  # [r, K]
    keys: torch.Tensor  # [r, K, DI]
    products: torch.Tensor  # [r, HI, K], after the relu

    def weights(self) -> torch.Tensor:
        return self.inputs.weights[self.tokens].to(self.products.dtype)

    def logits(self) -> torch.Tensor:
        return torch.bmm(self.weights()[:, None], self.products).squeeze(1)

    def backward(self, dlogits: torch.Tensor, grads: Gradients) -> None:
        x = self.inputs
        grads.weights[self.tokens] = torch.bmm(self.products, dlogits[..., None]).squeeze(-1)
        dproducts = _through_relu(self.products, dlogits, self.weights(), x.relu).to(x.q.dtype)
        grads.q[self.tokens] = bmm(dproducts, self.keys).to(x.q.dtype)
        dkeys = bmm(dproducts.transpose(1, 2), x.q[self.tokens])
        grads.k_with_spare.index_add_(0, self.index.flatten(), dkeys.flatten(0, 1))


def _sparse_chunks(inputs: SparseLossInputs) -> Iterator[_SparseChunk]:
    x, width = inputs.indexer, inputs.indices.shape[1]
    heads, dim = x.q.shape[1], x.q.shape[2]
    num_keys = x.k.shape[0]
    table = torch.cat([x.k, x.k.new_zeros(1, dim)])
    acc = accumulation_dtype(x.q.dtype)
    per_token = width * ((3 * dim + 3 * heads + 6) * acc.itemsize + 24)
    tokens_at_once = items_within(inputs.workspace_bytes, per_token)
    for first in range(0, x.q.shape[0], tokens_at_once):
        tokens = slice(first, first + tokens_at_once)
        index = inputs.indices[tokens]
        length = None if inputs.topk_length is None else inputs.topk_length[tokens]
        mask = valid_entries(index, length, num_keys)
        index = torch.where(mask, index, num_keys).long()
        keys = table[index]
        products = bmm(x.q[tokens], keys.transpose(1, 2))
        yield _SparseChunk(x, tokens, index, mask, keys, products.relu_() if x.relu else products)


def _through_relu(products, dlogits, weights, relu: bool) -> torch.Tensor:
    grad = dlogits[:, None] * weights[..., None]
    return grad.masked_fill_(products <= 0, 0.0) if relu else grad
