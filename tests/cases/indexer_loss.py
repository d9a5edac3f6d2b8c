"""Layouts of the indexer losses, and their comparison with float64."""

import torch

from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.testing.comparison import Comparison

LAYOUTS = {
    "one sequence": lambda device: bshd_layout(48, 1, device),
    "batch of 3": lambda device: bshd_layout(16, 3, device),
    # a padded tail: tokens without visible keys
    "packed": lambda device: packed_layout(
        torch.tensor([0, 3, 20, 41], device=device, dtype=torch.int32), 48, 21
    ),
}


#: fp32 sums for all input dtypes.
OF_VALUE = 1e-5


def check(inputs, loss, expected, tolerance):
    """Compare a loss and its gradients with an ``ExpectedLoss``."""
    (loss * 1.7).backward()
    found = Comparison(tolerance, {"loss": min(tolerance, OF_VALUE)})
    gradients = [x.grad.double() / 1.7 for x in (inputs.q, inputs.k, inputs.weights)]
    expected.compare(found, loss, *gradients)
    assert not found.wrong()
