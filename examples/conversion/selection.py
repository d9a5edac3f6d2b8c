"""Quality of selected keys: captured mass, and recall of the best keys, by layer.

Measured like the package's training figures, on queries that see more keys than they select,
against the K keys with most of the dense attention's probability, summed over heads.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_dsa.layers.dsa_core import DSACoreAttention
from megatron_dsa.metrics.health import Attended, sampled_queries
from megatron_dsa.metrics.quality import chooses, recall, visible_keys
from megatron_dsa.ops.indexer_loss.torch_dense import teacher_lse, teacher_tile


@contextmanager
def measured(model: torch.nn.Module, record: Callable[[int, Attended], None]) -> Iterator[None]:
    """Make selecting layers call ``record`` with layer number (from 1) and attention inputs."""
    cores = [core for core in model.modules() if isinstance(core, DSACoreAttention)]
    cores = [core for core in cores if core.indexer is not None]
    for core in cores:
        core.measures_selection_now = lambda: True
        core.record_health = lambda attended, layer=core.layer_number: record(layer, attended)
    try:
        yield
    finally:
        for core in cores:
            del core.measures_selection_now, core.record_health


@torch.no_grad()
def quality(attended: Attended, count: int) -> dict[str, torch.Tensor]:
    """Return measures ``[r]`` of up to ``count`` evenly spaced queries.

    ``mass``: share of dense attention's probability on the selected keys, mean over heads;
    ``best mass``: share on the best K keys; ``recall``: selected share of the best keys.
    """
    layout, topk, q = attended.layout, attended.topk, attended.q
    queries = sampled_queries(layout, count)
    queries = queries[chooses(layout, queries, topk)]
    if not len(queries):
        return {}
    hidden, keys = ~visible_keys(layout, queries), attended.keys()
    lse = teacher_lse(q[queries], keys, hidden, attended.softmax_scale)
    p = teacher_tile(q[queries], keys, lse, attended.softmax_scale)
    p = p.masked_fill_(hidden, 0.0) / q.shape[1]
    selected, best = attended.indices[queries], p.topk(topk)
    mass = torch.where(selected >= 0, p.gather(1, selected.clamp_min(0).long()), 0.0).sum(-1)
    return {
        "mass": mass,
        "best mass": best.values.sum(-1),
        "recall": recall(selected, best.indices.int()),
    }
