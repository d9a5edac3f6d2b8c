"""The indexer's dense (warm-up) loss, ours and Megatron's bundled one.

The teacher is plain MLA: 192-dim keys of all heads, which ours expands from latents tile by tile
and the bundled function takes whole. Both compute value and gradients from given projections; the
bundled mean over tokens is scaled to the sum.
"""

from types import SimpleNamespace

import torch

from megatron_dsa.dsa_kernels import IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.metrics.flops import Keys
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss.spec import DenseLossInputs
from megatron_dsa.ops.layout.layout import Layout


def draw(inputs: IndexerInputs, layout: Layout, heads: int) -> DenseLossInputs:
    """Draw MLA queries and latents whose scores have a deviation of about 1."""
    rows, device = layout.num_queries, inputs.q.device
    generator = torch.Generator(device).manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    w_uk = normal(heads, 128, 512) * 512**-0.5
    q, keys = normal(rows, heads, 192), LatentKeys(normal(rows, 576), w_uk)
    return DenseLossInputs(inputs, layout, q, keys, 192**-0.5, None, 0)


def flops(inputs: DenseLossInputs) -> int:
    """Return the FLOP of visible pairs: scores, their two gradients, and the teacher's scores."""
    rows, heads, dim = inputs.indexer.q.shape
    return 2 * Keys().pairs(rows) * (3 * heads * dim + inputs.q.shape[1] * inputs.q.shape[2])


def ours(inputs: DenseLossInputs, policy: Policy):
    x = inputs.indexer
    value = dense_indexer_loss(
        x, inputs.q, inputs.k, inputs.layout, softmax_scale=inputs.softmax_scale, policy=policy
    )
    return torch.autograd.grad(value, (x.q, x.k, x.weights))


def bundled(inputs: DenseLossInputs):
    from megatron.core.transformer.experimental_attention_variant import dsa

    x = inputs.indexer
    rows, heads, device = inputs.q.shape[0], inputs.q.shape[1], inputs.q.device
    scores = dsa._compute_index_scores(x.q[:, None], x.weights[:, None], x.k[:, None])
    keys = torch.cat([inputs.k.expanded(slice(first, min(first + 8, heads)))
                      for first in range(0, heads, 8)], 1)  # fmt: skip
    mask = torch.full((rows, rows), float("-inf"), device=device).triu_(1)
    value = dsa.compute_dsa_indexer_loss(
        scores,
        torch.zeros(1, rows, 1, dtype=torch.int64, device=device),  # unused by the dense loss
        inputs.q[:, None],
        keys[:, None],
        inputs.softmax_scale,
        1.0,
        False,
        SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
        mask=mask,
    )
    return torch.autograd.grad(value * rows, (x.q, x.k, x.weights))
