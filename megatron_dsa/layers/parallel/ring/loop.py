"""Attention over all blocks, one after the other, forward and backward.

The loop is the same for every way in which blocks come (:mod:`.exchange`) and for everything that
may be in them (:mod:`.payload`).
"""

from typing import Any

import torch

from megatron_dsa.layers.parallel.ring.combine import Combined
from megatron_dsa.ops.common.arithmetic import accumulation_dtype


def attend(q, payload, shard, blocks, kernel, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the blocks of all ranks.

    Args:
        q: ``[tokens, H, Dqk]``.
        payload: :class:`~megatron_dsa.layers.parallel.ring.payload.KeysAndValues` or ``Latent``.
        shard: the tokens of this rank, :mod:`megatron_dsa.layers.parallel.ring.shards`.
        blocks: :class:`~megatron_dsa.layers.parallel.ring.exchange.Ring` or ``Gathered``; the local
            block is first.
        kernel: attention to one block,
            :class:`~megatron_dsa.ops.dense_attention.blocks.BlockAttention`.
        scale: factor on ``q . k``.

    Returns:
        ``out [tokens, H, Dv]`` in the dtype of ``q`` and ``lse [tokens, H]`` in its accumulation
        dtype.
    """
    combined = Combined(q.dtype)
    left = sum(len(shard.parts(source)) for source in range(shard.cp))
    for source, block in blocks.blocks(payload.own, payload.disposable):
        for part in shard.parts(source):
            left -= 1
            k, v = payload.expand(block, part.keys)
            out, lse = kernel.forward(q[part.queries], k, v, part.causal, scale, part.sequences)
            combined.add(out, lse, part.queries, last=left == 0)
            # Freed before the next block's are made.
            del k, v, out, lse
    return combined.out, combined.lse


def gradients(dout, q, out, lse, payload, shard, blocks, kernel, scale) -> tuple[torch.Tensor, Any]:
    """Differentiate :func:`attend`.

    Args:
        dout: gradient of ``out``; out, lse: what :func:`attend` returned. Others as there.

    Returns:
        ``dq`` in the dtype of ``q`` and the gradient of ``payload.own`` in the accumulation dtype.
    """
    acc = accumulation_dtype(q.dtype)
    collected = blocks.gradients(payload.own.shape, acc, q.device)
    dq = None
    for source, block in blocks.blocks(payload.own, payload.disposable):
        collected.start()
        for part in shard.parts(source):
            k, v = payload.expand(block, part.keys)
            mine = part.queries
            dq_part, dk, dv = kernel.backward(
                dout[mine], q[mine], k, v, out[mine], lse[mine], part.causal, scale, part.sequences
            )
            del k, v
            if dq is None:
                dq = dq_part if shard.cp == 1 else dq_part.to(acc)
            else:
                dq[mine] += dq_part
            payload.add_gradients(block, part.keys, lambda s=source: collected.target(s), dk, dv)
            del dq_part, dk, dv
    assert dq is not None
    return dq.to(q.dtype), collected.home()
