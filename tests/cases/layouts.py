"""Layouts of sequences on one or several ranks, and inputs by position."""

import torch

from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.ops.layout.sharding import Sharding
from tests.helpers import leaf
from tests.host import packed, start

TOTAL = 48
LAYOUTS = {
    "one": (1, None),
    "two": (2, None),
    "packed": (1, ((14, 3, 0, 20), (16, 4, 0, 20))),
}
SPREADS = {
    "alone": (Sharding(),),
    "zigzag": tuple(Sharding(2, rank, "zigzag") for rank in range(2)),
    "zigzag_rows": tuple(Sharding(2, rank, "zigzag_rows") for rank in range(2)),
    "contiguous": tuple(Sharding(2, rank, "contiguous") for rank in range(2)),
    "by sequence": tuple(Sharding(2, rank // 2, "zigzag", 2, rank % 2) for rank in range(4)),
}


def layouts(name, sharding):
    batch, lengths = LAYOUTS[name]
    params = None if lengths is None else packed(*lengths[0], padded_lengths=lengths[1])
    rows = TOTAL // batch
    return [
        layout_from_megatron(rows // one.ranks, batch, start(), params, one)
        for one in SPREADS[sharding]
    ]


def sequence_places(layout):
    """Return ``(sequence, position, padding)`` of every query token."""
    real = [True] * layout.num_queries if layout.real is None else layout.real.tolist()
    return list(zip(layout.start.tolist(), layout.position.tolist(), real, strict=True))


def indexer_inputs(layout, num_keys, dtype=torch.float64, heads=3):
    """Draw inputs by position, independent of the number of ranks."""
    everywhere = layout.all_tokens
    rows = everywhere.num_queries
    q = leaf(rows, heads, 8, seed=1, dtype=torch.float64).detach()
    k = leaf(num_keys, 8, seed=2, dtype=torch.float64).detach()
    weights = leaf(rows, heads, seed=3, dtype=torch.float64).detach()
    own = (layout.start + layout.position).cpu()
    if layout.key_indices is not None and num_keys == layout.num_keys:  # of positions
        k = k[torch.argsort(layout.key_indices.cpu())]
    to = {"device": start(), "dtype": dtype}
    return IndexerInputs(q[own].to(**to), k.to(**to), weights[own].to(**to))


def shuffled(positions, seed=7):
    """Shuffle lists, with -1 anywhere."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(positions.shape, generator=generator).argsort(-1).to(positions.device)
    return positions.gather(1, order)
