"""Layouts of the indexer losses, and their comparison with a float64 reference."""

import torch

from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.ops.indexer_topk.reference import index_scores
from megatron_dsa.sequence.layout import bshd_layout, packed_layout
from tests.helpers import double_leaf, relative_error

LAYOUTS = {
    "one sequence": lambda device: bshd_layout(48, 1, device),
    "batch of 3": lambda device: bshd_layout(16, 3, device),
    # a padded tail: rows without any visible key (trap 8)
    "packed": lambda device: packed_layout(
        torch.tensor([0, 3, 20, 41], device=device, dtype=torch.int32), 48, 21
    ),
}


def visible_rows(layout):
    """bool [Sq, Skv] over key *rows*."""
    slots = torch.arange(layout.num_keys, device=layout.start.device)
    by_slot = (slots >= layout.start[:, None]) & (slots < layout.end[:, None])
    if layout.key_rows is None:
        return by_slot
    return torch.zeros_like(by_slot).index_copy_(1, layout.key_rows, by_slot)


def reference_scores(inputs):
    """Return float64 leaves with the values of the inputs, and their scores."""
    copies = IndexerInputs(*map(double_leaf, (inputs.q, inputs.k, inputs.weights)), inputs.relu)
    return copies, index_scores(copies.q, copies.k, copies.weights, copies.relu)


def check(inputs, copies, loss, expected, tolerance):
    """Compare a loss and its gradients with those of the float64 copies."""
    assert relative_error(loss, expected) < tolerance
    (loss * 1.7).backward()
    (expected * 1.7).backward()
    for name in ("q", "k", "weights"):
        got, want = getattr(inputs, name).grad, getattr(copies, name).grad
        assert torch.isfinite(got).all(), name
        assert relative_error(got, want) < tolerance, name
