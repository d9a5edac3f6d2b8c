"""The indexer loss, stated as plainly as possible. Differentiable; materialises everything."""

import torch


def kl_sum(student_scores, teacher, mask) -> torch.Tensor:
    """Sum over rows of ``KL(teacher / sum(teacher) || softmax(student_scores))`` over ``mask``.

    All arguments ``[rows, keys]``. Rows without any teacher mass contribute 0.
    """
    teacher = teacher.masked_fill(~mask, 0.0).detach()
    mass = teacher.sum(-1, keepdim=True)
    has_mass = mass > 0
    teacher = teacher / torch.where(has_mass, mass, 1.0)
    logits = student_scores.masked_fill(~mask, float("-inf"))
    logits = torch.where(has_mass, logits, 0.0)
    log_student = torch.log_softmax(logits, dim=-1).masked_fill(~(mask & has_mass), 0.0)
    return (torch.xlogy(teacher, teacher) - teacher * log_student).sum()


def dense_teacher(q, k, visible, softmax_scale) -> torch.Tensor:
    """Head sum of the attention probabilities ``[Sq, Skv]``; ``k`` is ``[Skv, 1 or H, D]``."""
    k = k.expand(-1, q.shape[1], -1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    logits = logits.masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1)
    p = torch.softmax(logits.masked_fill(empty[:, None], 0.0), dim=-1)
    return p.masked_fill(empty[:, None], 0.0).sum(0)
