"""The public operations in float64, query by query, from the formulas, without package code.

``seen[t]`` lists the keys visible to query ``t``, in sequence order.
"""

import math

import torch


def packed_seen(lengths, padded, tokens):
    seen, first = [], 0
    for length, room in zip(lengths, padded, strict=True):
        seen += [list(range(first, first + t + 1)) if t < length else [] for t in range(room)]
        first += room
    return seen + [[] for _ in range(tokens - first)]


def batch_seen(length, batch):
    return [[s * batch + b for s in range(t + 1)] for t in range(length) for b in range(batch)]


def group_seen(seen, slot_of_first, ratio):
    """Compressed keys: group ``g`` is seen by ``t`` iff ``g < (t + 1) // ratio``."""
    groups = [len(keys) // ratio for keys in seen]
    return [
        [slot_of_first(keys[0]) + g for g in range(count)] if count else []
        for keys, count in zip(seen, groups, strict=True)
    ]


def attention(q, k, v, seen, scale, sink=None):
    """Return out ``[Sq, H, Dv]``, lse ``[Sq, H]`` of the keys, p ``[Sq, H, Skv]``.

    k ``[Skv, H, D]``, v ``[Skv, H, Dv]``; sink ``[Sq, H]``: a logit without a value.
    """
    outs, lses, ps = [], [], []
    for t, keys in enumerate(seen):
        p = q.new_zeros(q.shape[1], k.shape[0])
        lse = q.new_full((q.shape[1],), -math.inf)
        if keys:
            logits = scale * torch.stack([(q[t] * k[s]).sum(-1) for s in keys], -1)
            lse = logits.logsumexp(-1)
            total = lse if sink is None else torch.logaddexp(lse, sink[t])
            p = p.index_add(1, torch.tensor(keys), (logits - total[:, None]).exp())
        outs.append(torch.einsum("hs,shd->hd", p, v))
        lses.append(lse)
        ps.append(p)
    return torch.stack(outs), torch.stack(lses), torch.stack(ps)


def index_scores(q, k, weights, relu):
    """Return ``I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s])``."""
    dots = torch.einsum("thd,sd->ths", q, k)
    return torch.einsum("th,ths->ts", weights, dots.relu() if relu else dots)


def selected(scores, seen, topk):
    """Return per query the best keys in sequence order; ties go to the first."""
    lists = []
    for row, keys in zip(scores.tolist(), seen, strict=True):
        best = sorted(range(len(keys)), key=lambda i, row=row, keys=keys: (-row[keys[i]], i))[:topk]
        lists.append([keys[i] for i in sorted(best)])
    return lists


def kl(scores, teacher, seen):
    """Return the sum over queries of ``KL(teacher || softmax(scores))`` over the visible keys."""
    return sum((row.sum() for row in _kl_terms(scores, teacher, seen)), scores.new_zeros(()))


def kl_size(scores, teacher, seen):
    """Return the sum of the absolute terms of :func:`kl`, most of which cancel."""
    return sum((row.abs().sum() for row in _kl_terms(scores, teacher, seen)), scores.new_zeros(()))


def _kl_terms(scores, teacher, seen):
    for t, keys in enumerate(seen):
        if keys and (mass := teacher[t, keys].sum()) > 0:
            p = teacher[t, keys] / mass
            yield torch.cat([p.xlogy(p), -p * scores[t, keys].log_softmax(-1)])
