"""Sparse attention forward through DeepSeek's FlashMLA (Hopper and Blackwell, bf16).

Differences from this package's contract that are bridged here: 64 or 128 heads only, widths in
multiples of 128, no clamping of ``topk_length``, and ``+inf`` instead of ``-inf`` as the lse of
rows without keys. Its lse is the natural log over the keys without the sink, as ours.
"""

from __future__ import annotations

import torch

from megatron_dsa.dispatch import Problem
from megatron_dsa.ops.packages import package_problem
from megatron_dsa.ops.sparse_attention import SparseProblem

_INSTALL = "build it from github.com/deepseek-ai/FlashMLA (it is not on PyPI)"
_WIDTH = 128


def unsupported(problem: Problem) -> str | None:
    """Return why FlashMLA cannot run this, or ``None``."""
    reason = package_problem(
        problem, module="flash_mla", install=_INSTALL, capabilities=((9, 0), (10, 0))
    )
    if reason is not None:
        return reason
    if problem.dtype != torch.bfloat16:
        return f"needs bf16, got {problem.dtype}"
    if problem.qk_dim not in (512, 576) or problem.v_dim != 512:
        return (
            f"needs key dim 576 or 512 and value dim 512, got {problem.qk_dim} and {problem.v_dim}"
        )
    if problem.heads > 128:
        return f"takes at most 128 heads, got {problem.heads}"
    return _missing_function()


def _missing_function() -> str | None:
    import flash_mla

    if not hasattr(flash_mla, "flash_mla_sparse_fwd"):
        return f"too old: this flash_mla has no flash_mla_sparse_fwd; {_INSTALL}"
    return None


def forward(problem: SparseProblem):
    """Return ``out``, ``lse`` and ``None`` (FlashMLA does not give the probabilities)."""
    from flash_mla import flash_mla_sparse_fwd

    q, indices, length = problem.q, problem.indices, problem.topk_length
    heads, width = q.shape[1], indices.shape[1]
    padded_heads = 64 if heads <= 64 else 128
    if heads < padded_heads:
        q = torch.nn.functional.pad(q, (0, 0, 0, padded_heads - heads))
    sink = problem.sink
    if sink is not None:
        sink = torch.nn.functional.pad(sink.float(), (0, padded_heads - heads))
    if width % _WIDTH:
        indices = torch.nn.functional.pad(indices, (0, -width % _WIDTH), value=-1)
    if length is not None:
        length = length.clamp(0, width)
    out, _, lse = flash_mla_sparse_fwd(
        q.contiguous(),
        problem.kv.contiguous().unsqueeze(1),
        indices.contiguous().unsqueeze(1),
        problem.softmax_scale,
        d_v=problem.v_dim,
        attn_sink=sink,
        topk_length=length,
    )
    out, lse = out[:, :heads], lse[:, :heads]
    return out.contiguous(), torch.where(lse == float("inf"), float("-inf"), lse), None
