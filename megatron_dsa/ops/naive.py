"""One DSA, one CSA and one KDA layer in plain torch: the first file to read.

``x [s, hidden]`` is one causal sequence, ``w`` the weights by checkpoint name, ``rope`` the result
of :func:`rope_tables`. This file stores all scores at once; the package computes the same numbers
block by block, over ranks and in fused kernels. This file omits YaRN and the indexer's Hadamard
rotation, which changes no product.

Symbols: ``H`` heads, ``HI`` index heads of ``DI`` dims, ``R`` latent dims, ``P`` rope dims; ``N``
query dims without rope and ``V`` value dims of V3.2; ``D`` head dims of V4.
"""

import torch
from torch.nn.functional import layer_norm, pad, rms_norm, silu

EPS = 1e-6


def linear(x, w, name) -> torch.Tensor:
    """Multiply ``x [..., inputs]`` by the weight ``[outputs, inputs]``."""
    return x @ w[name + ".weight"].T


def norm(x, w, name) -> torch.Tensor:
    """Divide ``x [..., d]`` by its root mean square and multiply by a weight ``[d]``."""
    return rms_norm(x, x.shape[-1:], w[name + ".weight"], EPS)


def rope_tables(s, dim, base) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``cos, sin [s, dim / 2]`` of ``position * base^(-2i / dim)``."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    angles = torch.arange(s)[:, None] * base ** (-2 * pair / dim)
    return angles.cos(), angles.sin()


def rotate(x, rope, interleaved=True) -> torch.Tensor:
    """Rotate the last ``P`` dims of ``x [s, ..., d]`` by ``rope``, a pair of ``[s, P / 2]``.

    Dims ``(2i, 2i + 1)`` rotate together, or without ``interleaved`` dims ``(i, i + P / 2)``.
    """
    cos, sin = (t.view(len(x), *[1] * (x.dim() - 2), -1) for t in rope)
    plain, x = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    x = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([plain, x], -1)


def index_scores(q, k, weights) -> torch.Tensor:
    """Return ``I[t, j] = sum_h w[t, h] relu(q[t, h] . k[j])``, scaled.

    Shapes: ``q [s, HI, DI]``, ``k [keys, DI]``, ``weights [s, HI]``.
    """
    weights = weights * (q.shape[1] * q.shape[2]) ** -0.5
    return torch.einsum("th,thj->tj", weights, torch.einsum("thd,jd->thj", q, k).relu())


def indexer_topk(scores, visible, topk) -> torch.Tensor:
    """Select the visible keys with the best ``scores [s, keys]``; masks are bool ``[s, keys]``.

    Ties, such as zeros from the relu, go to the first key.
    """
    order = scores.masked_fill(~visible, -torch.inf).sort(descending=True, stable=True).indices
    return torch.zeros_like(visible).scatter(1, order[:, :topk], True) & visible


def sparse_attention(
    q, kv, seen, softmax_scale, v_dim, attn_sink=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from ``q [s, H, d]`` to ``kv [keys, d]`` under the mask ``seen``, bool ``[s, keys]``.

    The first ``v_dim`` dims of a key are its value; ``attn_sink [H]`` is a logit without a value.
    Returns ``out [s, H, v_dim]`` and ``p_sum [s, keys]``, the probabilities summed over heads.
    """
    logits = softmax_scale * torch.einsum("thd,jd->thj", q, kv)
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    if attn_sink is not None:
        logits = torch.cat([logits, attn_sink[:, None].expand(len(q), -1, 1)], -1)
    p = logits.softmax(-1)[..., : len(kv)]
    return torch.einsum("thj,jd->thd", p, kv[:, :v_dim]), p.sum(1)


def indexer_loss(scores, p_sum, keys) -> torch.Tensor:
    """Return the mean over queries of ``KL(p || softmax(scores))`` over the given ``keys``.

    All tensors are ``[s, keys]``; the teacher ``p`` is normalised ``p_sum``. Queries without keys
    add 0.
    """
    some = keys.any(-1)
    outside = ~keys[some]
    p = p_sum.detach()[some].masked_fill(outside, 0.0)
    p = p / p.sum(-1, keepdim=True)
    student = scores[some].masked_fill(outside, -torch.inf).log_softmax(-1)
    return (torch.xlogy(p, p) - p * student.masked_fill(outside, 0.0)).sum() / len(scores)


def dsa_layer(x, w, rope, heads, topk, stage="sparse") -> tuple[torch.Tensor, torch.Tensor | None]:
    """DeepSeek-V3.2: attend to the keys that the indexer selects, in the latent space.

    Returns the output ``[s, hidden]`` and the indexer's loss. The stages ``warmup`` and ``dense``
    attend to all past keys; ``dense`` has no indexer, so its loss is None. Hy4 also has a sink per
    head and an output gate.
    """
    rope_dim, rank = 2 * rope[0].shape[1], len(w["kv_layernorm.weight"])
    q_latent = norm(linear(x, w, "linear_q_down_proj"), w, "q_layernorm")
    kv_latent, k_pe = linear(x, w, "linear_kv_down_proj").split([rank, rope_dim], -1)
    # One key [R + P] for all heads; the first R dims are the value.
    kv = torch.cat([norm(kv_latent, w, "kv_layernorm"), rotate(k_pe, rope)], -1)

    q = linear(q_latent, w, "linear_q_up_proj").unflatten(-1, (heads, -1))  # [s, H, N + P]
    softmax_scale = q.shape[2] ** -0.5  # dims before absorption, not R + P
    q_nope, q_pe = q.split([q.shape[2] - rope_dim, rope_dim], -1)
    # Absorption: q_nope . (W_uk c) = (q_nope W_uk) . c; W_uv is applied to the output.
    up = w["linear_kv_up_proj.weight"].view(heads, -1, rank)  # [H, N + V, R]
    w_uk, w_uv = up[:, : q_nope.shape[2]], up[:, q_nope.shape[2] :]
    q = torch.cat([torch.einsum("thn,hnr->thr", q_nope, w_uk), rotate(q_pe, rope)], -1)

    seen, scores = torch.ones(len(x), len(x), dtype=torch.bool).tril(), None
    if stage != "dense":
        scores = dsa_index_scores(x.detach(), q_latent.detach(), w, rope)
    if stage == "sparse":
        seen = indexer_topk(scores, seen, topk)
    sink = w.get("core_attention.attn_sink")
    out, p_sum = sparse_attention(q, kv, seen, softmax_scale, rank, sink)  # [s, H, R]
    out = torch.einsum("thr,hvr->thv", out, w_uv).flatten(1)
    if "linear_gate.weight" in w:
        out = out * linear(x, w, "linear_gate").sigmoid()
    loss = None if scores is None else indexer_loss(scores, p_sum, seen)
    return linear(out, w, "linear_proj"), loss


def dsa_index_scores(x, q_latent, w, rope, indexer="core_attention.indexer.") -> torch.Tensor:
    """Return V3.2's index scores ``[s, s]``; detached inputs confine the loss to the indexer."""
    q = linear(q_latent, w, indexer + "linear_wq_b")
    k = linear(x, w, indexer + "linear_wk")
    k_norm = w[indexer + "k_norm.weight"], w[indexer + "k_norm.bias"]
    k = layer_norm(k, k.shape[1:], *k_norm, EPS)
    q = q.unflatten(-1, (-1, k.shape[1]))
    # The indexer's rope dims come first; rolling by P moves them to the end.
    q, k = (rotate(t.roll(-2 * rope[0].shape[1], -1), rope, interleaved=False) for t in (q, k))
    return index_scores(q, k, linear(x, w, indexer + "linear_weights_proj"))


def csa_layer(
    x, w, rope, heads, topk, window, ratio, o_groups, stage="sparse"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """DeepSeek-V4: attend to a window and to compressed keys, which an indexer selects at ratio 4.

    Returns the output ``[s, hidden]`` and the loss, None without an indexer. Layers of ratio 0 have
    only the window; ratios above 4 and the stages ``warmup`` and ``dense`` attend to all past
    compressed keys.
    """
    q_latent = norm(linear(x, w, "linear_q_down_proj"), w, "q_layernorm")
    q = linear(q_latent, w, "linear_q_up_proj").unflatten(-1, (heads, -1))  # [s, H, D]
    q = rotate(rms_norm(q, q.shape[2:], None, EPS), rope)
    kv = rotate(norm(linear(x, w, "linear_kv_proj"), w, "kv_layernorm"), rope)  # [s, D]
    position = torch.arange(len(x))
    age = position[:, None] - position
    seen, scores, groups = (age >= 0) & (age < window), None, 0

    if ratio > 0:
        compressed = compress(x, w, rope, ratio, "core_attention.compressor.")  # [groups, D]
        groups = len(compressed)
        # A query attends to a group from the group's last position on.
        visible = torch.arange(groups) < ((position + 1) // ratio)[:, None]
        if ratio == 4 and stage != "dense":
            scores = csa_index_scores(x.detach(), q_latent.detach(), w, rope)
        if scores is not None and stage == "sparse":
            visible = indexer_topk(scores, visible, topk)
        kv, seen = torch.cat([compressed, kv]), torch.cat([visible, seen], 1)
    sink = w["core_attention.attn_sink"]
    out, p_sum = sparse_attention(q, kv, seen, q.shape[2] ** -0.5, q.shape[2], sink)
    # Values are rotated by their position; rotating back leaves the rotation by the distance.
    out = rotate(out, (rope[0], -rope[1])).reshape(len(x), o_groups, -1)
    o_weight = w["linear_o_group_proj.weight"].view(o_groups, -1, out.shape[2])
    out = torch.einsum("tgi,goi->tgo", out, o_weight).flatten(1)
    # The teacher's softmax includes window and sink; the loss includes only compressed keys.
    loss = None if scores is None else indexer_loss(scores, p_sum[:, :groups], seen[:, :groups])
    return linear(out, w, "linear_proj"), loss


def csa_index_scores(x, q_latent, w, rope, indexer="core_attention.indexer.") -> torch.Tensor:
    """Return V4's index scores ``[s, s // 4]``; the indexer has its own compressor."""
    k = compress(x, w, rope, 4, indexer + "compressor.")
    q = linear(q_latent, w, indexer + "linear_wq_b").unflatten(-1, (-1, k.shape[1]))
    return index_scores(rotate(q, rope), k, linear(x, w, indexer + "linear_weights_proj"))


def compress(x, w, rope, ratio, name) -> torch.Tensor:
    """Pool every ``ratio`` positions of ``x [s, hidden]`` per channel to ``[s // ratio, d]``.

    With ratio 4 a group also pools the previous group, from the first ``d`` of ``2d`` channels; its
    positions use the last ``d``.
    """
    groups = len(x) // ratio
    # An incomplete last group is not compressed.
    x = x[: groups * ratio].unflatten(0, (groups, ratio))
    values = linear(x, w, name + "linear_wkv")
    scores = linear(x, w, name + "linear_wgate") + w[name + "ape"]
    if ratio == 4:
        values, scores = join_previous(values, 0.0), join_previous(scores, -torch.inf)
    pooled = norm((scores.softmax(1) * values).sum(1), w, name + "norm")
    # A group is rotated by its first position.
    return rotate(pooled, [table[::ratio][:groups] for table in rope])


def join_previous(x, nothing) -> torch.Tensor:
    """Join each group of ``x [groups, 4, 2d]`` with the previous group: ``[groups, 8, d]``."""
    previous, current = x.chunk(2, -1)
    first = torch.full_like(previous[:1], nothing)
    return torch.cat([torch.cat([first, previous[:-1]]), current], 1)


def kda_layer(x, w, heads, lower_bound=-5.0) -> torch.Tensor:
    """Kimi Delta Attention: a state ``[D, D]`` per head replaces the keys.

    Returns ``[s, hidden]``. ``D`` is the head dim; queries, keys and values pass through a short
    convolution.
    """
    by_head = heads, -1
    q, k, v = (
        kda_convolution(linear(x, w, f"linear_{n}_proj"), w[f"{n}_conv1d.weight"]) for n in "qkv"
    )
    g = linear(linear(x, w, "linear_f_a_proj"), w, "linear_f_b_proj")
    gate = linear(linear(x, w, "linear_g_a_proj"), w, "linear_g_b_proj")
    q, k, v, g, gate = (t.unflatten(-1, by_head) for t in (q, k, v, g, gate))  # [s, H, D]
    beta = linear(x, w, "linear_b_proj")  # [s, H]
    out = kda_attention(q, k, v, g, beta, w["A_log"], w["dt_bias"], lower_bound)
    out = kda_norm(out, gate, w["o_norm.weight"], EPS)
    return linear(out.flatten(1), w, "linear_proj")


def kda_convolution(x, weight) -> torch.Tensor:
    """Apply a causal convolution by ``weight [channels, 1, K]`` and SiLU to ``x [s, channels]``."""
    width = weight.shape[2]
    windows = pad(x, (0, 0, width - 1, 0)).unfold(0, width, 1)  # [s, channels, K]
    return silu((windows * weight[:, 0]).sum(-1))


def kda_attention(q, k, v, g, beta, A_log, dt_bias, lower_bound) -> torch.Tensor:
    """Decay the state per key channel, write ``v`` under ``k``, read the state with ``q``.

    ``q, k, v, g [s, H, D]`` and ``beta [s, H]`` are projections; this function applies gates, norms
    of queries and keys, and the scale ``D^-0.5``. Returns ``[s, H, D]``.
    """
    heads, dim = q.shape[1:]
    rate = A_log.exp()[:, None]
    decay = (lower_bound * torch.sigmoid(rate * (g + dt_bias.view(heads, dim)))).exp()
    q, k = (t / (t.square().sum(-1, keepdim=True) + EPS).sqrt() for t in (q, k))
    beta, outputs = beta.sigmoid(), []
    state = v.new_zeros(heads, dim, dim)  # [H, key dim, value dim]
    for t in range(len(q)):
        state = decay[t][..., None] * state
        error = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        outputs.append(torch.einsum("hk,hkv->hv", q[t] * dim**-0.5, state))
    return torch.stack(outputs)


def kda_norm(x, gate, weight, eps) -> torch.Tensor:
    """Normalise heads of ``x [..., H, D]``, then multiply by ``weight [D]`` and sigmoid(gate)."""
    return rms_norm(x, x.shape[-1:], weight, eps) * gate.sigmoid()
