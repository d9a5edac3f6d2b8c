"""Float64 reference for DSA (DeepSeek-V3.2): naive, materialises S x S, plain autograd.

Shares no code with the package. MLA is not absorbed (explicit keys and values per head), unlike the
package's.
"""

import dataclasses
import math

import torch
from torch import Tensor

from tests.reference.csa_float64 import hadamard, inverse_frequencies, rms_norm

INDEXER = "core_attention.indexer."


@dataclasses.dataclass
class Shape:
    """Sizes and options of one attention layer."""

    heads: int
    hidden: int
    q_lora: int | None  # None: the query latent is x itself and linear_q_proj is used
    kv_lora: int
    nope: int
    rope: int
    v: int
    index_heads: int
    index_dim: int
    topk: int
    rotary_base: float = 10000.0
    eps: float = 1e-5
    k_norm_eps: float | None = None  # None: eps
    index_rope_interleaved: bool = False
    index_hadamard: bool = True
    index_relu: bool = True
    pool: int = 1  # tokens per index key (GLM-5.3)
    # Keys: scaling_factor, original_max_position, beta_fast, beta_slow, mscale, mscale_all_dim.
    yarn: dict | None = None

    @property
    def softmax_scale(self) -> float:
        """get_mscale(factor, mscale_all_dim)^2 / sqrt(nope + rope)."""
        mscale = 1.0
        if self.yarn is not None:
            mscale = get_mscale(self.yarn["scaling_factor"], self.yarn["mscale_all_dim"])
        return mscale**2 / math.sqrt(self.nope + self.rope)

    @property
    def rope_concentration(self) -> float:
        """get_mscale(factor, mscale) / get_mscale(factor, mscale_all_dim): on cos and sin."""
        if self.yarn is None:
            return 1.0
        factor = self.yarn["scaling_factor"]
        numerator = get_mscale(factor, self.yarn["mscale"])
        return numerator / get_mscale(factor, self.yarn["mscale_all_dim"])


@dataclasses.dataclass
class Result:
    """Results of a layer; lists have one entry per sequence."""

    out: Tensor  # [S, B, hidden]
    loss: Tensor | None  # loss_sum / number of query tokens; without the coefficient
    loss_sum: Tensor | None
    index_scores: list[Tensor]  # [S, S], -inf above the diagonal; empty without an indexer
    # bool [S, S]: the given indices, else the indexer's top-k. In dense mode only `captured` and
    # the sparse loss use it.
    selected: list[Tensor]
    captured: Tensor  # mean over queries and heads of the dense probability on the selected keys


# ----------------------------------------------------------------------------- rope


def get_mscale(scale: float, mscale: float) -> float:
    """YaRN: 0.1 * mscale * ln(scale) + 1 for scale > 1, else 1."""
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1.0 else 1.0


def rope_tables(length: int, shape: Shape, first: int = 0) -> tuple[Tensor, Tensor]:
    """Cos and sin of position * theta, [length, rope/2], times the concentration factor."""
    position = torch.arange(first, first + length, dtype=torch.float64)
    theta = inverse_frequencies(shape.rope, shape.rotary_base, shape.yarn)
    angle = torch.outer(position, torch.tensor(theta, dtype=torch.float64))
    return angle.cos() * shape.rope_concentration, angle.sin() * shape.rope_concentration


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [S, ..., rope]; pair i is (i, i + rope/2), or (2i, 2i+1) when interleaved.

    The output is half-split in both cases, like Megatron's (`mla_rotary_interleaved`): query and
    key are permuted alike, so scores do not change.
    """
    half = x.shape[-1] // 2
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    # Positions are dim 0; put singleton dims between them and the channels.
    table = (cos.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    cos, sin = cos.to(x.device).view(table), sin.to(x.device).view(table)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# ------------------------------------------------------------------ norms, Hadamard, softmax


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)  # a norm may be missing


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance."""
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight + bias


def masked_log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Log-softmax over each query's True keys; 0 outside the mask and without keys."""
    scores = scores.masked_fill(~mask, -math.inf)
    # All -inf would give NaN, even in the gradient of unused values.
    scores = scores.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return torch.log_softmax(scores, dim=-1).masked_fill(~mask, 0.0)


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over each query's True keys; 0 outside the mask and without keys."""
    return torch.exp(masked_log_softmax(scores, mask)).masked_fill(~mask, 0.0)


# --------------------------------------------------------------------- pieces of the indexer


def indexer_scores(q_idx: Tensor, k_idx: Tensor, w: Tensor, relu: bool = True) -> Tensor:
    """I[t,s] = sum_h w[t,h] relu(q_I[t,h] . k_I[s]); w already holds HI^-1/2 DI^-1/2.

    q_idx [Sq, HI, DI], k_idx [Skv, DI], w [Sq, HI] -> [Sq, Skv], not masked.
    """
    dots = torch.einsum("thd,sd->ths", q_idx, k_idx)
    if relu:
        dots = torch.relu(dots)
    return torch.einsum("th,ths->ts", w, dots)


def topk(scores_row: Tensor, visible_lo: int, visible_hi: int, k: int) -> list[int]:
    """Ids of the min(k, visible) largest scores in [lo, hi), ascending; ties: smallest id.

    A score of -inf marks an invisible key and is never selected; -0.0 ties with 0.0.
    """
    row = scores_row.tolist()
    visible = [s for s in range(visible_lo, visible_hi) if row[s] != -math.inf]
    if any(math.isnan(row[s]) for s in visible):
        raise ValueError("NaN index score")
    best = sorted(visible, key=lambda s: (-row[s], s))[:k]
    return sorted(best)


def kl_loss_rows(student_scores: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return KL(p || softmax(I)) of each query over the keys in `mask`: [..., S, Skv] -> [..., S].

    `teacher` is non-negative, not necessarily normalised: masked, L1-normalised and detached here.
    Keys with student score -inf are outside the mask. Queries without key or teacher mass give
    exactly 0.
    """
    mask = mask & (student_scores.detach() != -math.inf)
    p = teacher.detach().masked_fill(~mask, 0.0)
    total = p.sum(dim=-1, keepdim=True)
    p = p / total.masked_fill(total == 0.0, 1.0)
    log_student = masked_log_softmax(student_scores, mask)
    # xlogy: 0 log 0 = 0 exactly.
    return (torch.special.xlogy(p, p) - p * log_student).sum(dim=-1)


def indexer_inputs(
    params: dict[str, Tensor], x: Tensor, qr: Tensor, shape: Shape, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q_I [S, HI, DI], k_I [S // pool, DI] and the scaled w [S, HI] of one sequence, of x and qr.

    q_I = W_qb qr, k_I = LayerNorm(W_k x), rope on the first dims, Hadamard;
    w = W_w x * HI^-1/2 * DI^-1/2. x and qr are detached: the loss trains the indexer only.
    Positions count from `first`.
    """
    x, qr = x.detach(), qr.detach()
    length, rope = x.shape[0], shape.rope
    q = qr @ params[INDEXER + "linear_wq_b.weight"].T
    q = q.view(length, shape.index_heads, shape.index_dim)
    k = layer_norm(
        x @ params[INDEXER + "linear_wk.weight"].T,
        params[INDEXER + "k_norm.weight"],
        params[INDEXER + "k_norm.bias"],
        shape.eps if shape.k_norm_eps is None else shape.k_norm_eps,
    )
    cos, sin = rope_tables(length, shape, first)
    pairs = shape.index_rope_interleaved
    q = torch.cat([rotate(q[..., :rope], cos, sin, interleaved=pairs), q[..., rope:]], dim=-1)
    k = torch.cat([rotate(k[..., :rope], cos, sin, interleaved=pairs), k[..., rope:]], dim=-1)
    if shape.index_hadamard:
        # Orthogonal: exact scores do not change, quantisation does.
        q, k = hadamard(q), hadamard(k)
    if shape.pool > 1:
        k = pooled_keys(params, x, k, shape.pool)
    w = x @ params[INDEXER + "linear_weights_proj.weight"].T
    return q, k, w * shape.index_heads**-0.5 * shape.index_dim**-0.5


def pooled_keys(params: dict[str, Tensor], x: Tensor, k: Tensor, pool: int) -> Tensor:
    """Weigh keys per channel by a softmax of W_gate x + APE over the tokens of a complete pool."""
    gate = x @ params[INDEXER + "linear_pool_gate.weight"].T
    rows = []
    for first in range(0, len(x) - pool + 1, pool):
        part = slice(first, first + pool)
        weights = torch.softmax(gate[part] + params[INDEXER + "pool_ape"], dim=0)
        rows.append((weights * k[part]).sum(dim=0))
    return torch.stack(rows) if rows else k[:0]


def select_pools(index_scores: Tensor, k: int, pool: int) -> tuple[Tensor, Tensor]:
    """Bool masks of the best k // pool visible pools [S, P] and of their tokens and tail [S, S]."""
    length, pools = index_scores.shape
    chosen = torch.zeros(length, pools, dtype=torch.bool)
    tokens = torch.zeros(length, length, dtype=torch.bool)
    for t in range(length):
        whole = (t + 1) // pool
        for p in topk(index_scores[t].detach(), 0, whole, k // pool):
            chosen[t, p] = True
            tokens[t, p * pool : (p + 1) * pool] = True
        tokens[t, whole * pool : t + 1] = True
    return chosen, tokens


# ------------------------------------------------------------------------------- the layer


def mla_inputs(
    params: dict[str, Tensor], x: Tensor, shape: Shape, first: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return qr, q_nope, rope(q_pe), c_kv and rope(k_pe) of x [S, hidden], positions from `first`.

    qr = RMSNorm(W_dq x) [S, q_lora]; q = W_uq qr -> q_nope [S, H, nope], q_pe [S, H, rope]; c_kv =
    RMSNorm(W_dkv x) [S, kv_lora]; k_pe = W_kpe x [S, rope], one for all heads.
    """
    length = x.shape[0]
    if shape.q_lora is None:
        qr, q = x, x @ params["linear_q_proj.weight"].T
    else:
        qr = x @ params["linear_q_down_proj.weight"].T
        qr = _normed(qr, params.get("q_layernorm.weight"), shape.eps)
        q = qr @ params["linear_q_up_proj.weight"].T
    q = q.view(length, shape.heads, shape.nope + shape.rope)
    down = x @ params["linear_kv_down_proj.weight"].T
    c_kv = _normed(down[:, : shape.kv_lora], params.get("kv_layernorm.weight"), shape.eps)
    cos, sin = rope_tables(length, shape, first)
    # Checkpoints store the main path's rope dims as adjacent pairs, independent of the indexer.
    q_pe = rotate(q[..., shape.nope :], cos, sin, interleaved=True)
    k_pe = rotate(down[:, shape.kv_lora :], cos, sin, interleaved=True)
    return qr, q[..., : shape.nope], q_pe, c_kv, k_pe


def causal_mask(length: int) -> Tensor:
    """Causal bool [length, length]: key s is visible to query t iff s <= t."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def attention_probabilities(params: dict[str, Tensor], scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax of [H, S, Skv] over the mask, with a column without a value for each head's sink."""
    sink = params.get("core_attention.attn_sink")
    if sink is None:
        return masked_softmax(scores, mask)
    column = sink[:, None, None].expand(-1, scores.shape[1], 1)
    seen = torch.nn.functional.pad(mask, (0, 1), value=True)
    return masked_softmax(torch.cat([scores, column], dim=-1), seen)[..., :-1]


def select(index_scores: Tensor, k: int) -> Tensor:
    """T_t = top-min(k, t + 1) of I[t, :t + 1], as a bool mask [S, S]."""
    length = index_scores.shape[0]
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(length):
        mask[t, topk(index_scores[t].detach(), 0, t + 1, k)] = True
    return mask


@dataclasses.dataclass
class _Sequence:
    """One sequence's share of a Result, not reduced."""

    out: Tensor  # [S, hidden]
    loss_rows: Tensor | None  # [S]
    index_scores: Tensor | None  # [S, S]
    selected: Tensor  # [S, S]
    captured: Tensor  # [heads, S]


def _attend(
    params: dict[str, Tensor],
    x: Tensor,
    shape: Shape,
    mode: str,
    loss: str | None,
    given: Tensor | None,
) -> _Sequence:
    """One sequence [S, hidden] with positions 0 .. S-1."""
    length = x.shape[0]
    causal = causal_mask(length).to(x.device)
    qr, q_nope, q_pe, c_kv, k_pe = mla_inputs(params, x, shape)

    # Not absorbed: a 128-dim key and value per head.
    up = c_kv @ params["linear_kv_up_proj.weight"].T
    up = up.view(length, shape.heads, shape.nope + shape.v)
    k_nope, value = up[..., : shape.nope], up[..., shape.nope :]
    scores = torch.einsum("thd,shd->hts", q_nope, k_nope)
    scores = (scores + torch.einsum("thd,sd->hts", q_pe, k_pe)) * shape.softmax_scale

    index_scores = None
    if INDEXER + "linear_wk.weight" in params:
        q_idx, k_idx, w = indexer_inputs(params, x, qr, shape)
        index_scores = indexer_scores(q_idx, k_idx, w, shape.index_relu)
        last = torch.arange(1, len(k_idx) + 1) * shape.pool - 1  # token of each index key
        visible = last <= torch.arange(length)[:, None]
        index_scores = index_scores.masked_fill(~visible.to(x.device), -math.inf)

    if given is not None:
        if given.dtype != torch.bool or given.shape != causal.shape or (given & ~causal).any():
            raise ValueError("indices must be causal bool masks [S, S], one per sequence")
        selected = given
    elif index_scores is not None and shape.pool > 1:
        chosen, selected = select_pools(index_scores, shape.topk, shape.pool)
    elif index_scores is not None:
        selected = select(index_scores, shape.topk).to(x.device)
    elif mode == "dense":
        selected = causal
    else:
        raise ValueError("sparse mode needs an indexer in params, or indices")

    attended = causal if mode == "dense" else selected
    probs = attention_probabilities(params, scores, attended)
    heads_out = torch.einsum("hts,shd->thd", probs, value)
    heads_out = heads_out.reshape(length, shape.heads * shape.v)
    if "linear_gate.weight" in params:
        heads_out = heads_out / (1 + torch.exp(-x @ params["linear_gate.weight"].T))
    out = heads_out @ params["linear_proj.weight"].T

    dense_probs = masked_softmax(scores.detach(), causal)
    captured = (dense_probs * selected).sum(dim=-1)

    loss_rows = None
    if loss is not None:
        if index_scores is None:
            raise ValueError("the indexer loss needs an indexer in params")
        loss_keys = causal if loss == "dense" else selected
        if shape.pool > 1 and loss == "dense":
            whole = visible.repeat_interleave(shape.pool, dim=1)  # tokens of pools
            loss_keys = torch.nn.functional.pad(whole, (0, length - whole.shape[1]))
        teacher = attention_probabilities(params, scores, loss_keys).detach().sum(dim=0)
        if shape.pool > 1:
            teacher = teacher[:, : visible.shape[1] * shape.pool]
            teacher = teacher.unflatten(1, (visible.shape[1], shape.pool)).sum(dim=-1)
            loss_keys = visible if loss == "dense" else chosen
        loss_rows = kl_loss_rows(index_scores, teacher, loss_keys)
    return _Sequence(out, loss_rows, index_scores, selected, captured)


def attention_layer(
    params: dict[str, Tensor],
    x: Tensor,
    shape: Shape,
    *,
    mode: str,
    loss: str | None = None,
    seq_lengths: list[int] | None = None,
    indices: list[Tensor] | None = None,
) -> Result:
    """Compute DSA on x [S, B, hidden], or on packed x [T, 1, hidden] with `seq_lengths`.

    mode: "dense" (all causal keys) or "sparse" (the selected keys). loss: None, "dense" or "sparse"
    (A_t = all causal keys or the selected ones), independent of mode. indices: one bool mask [S, S]
    per sequence, instead of the indexer's top-k.
    """
    if mode not in ("dense", "sparse") or loss not in (None, "dense", "sparse"):
        raise ValueError(f"unknown mode {mode!r} or loss {loss!r}")
    if x.dtype != torch.float64 or any(p.dtype != torch.float64 for p in params.values()):
        raise TypeError("the reference takes float64 only")
    if seq_lengths is None:
        sequences = list(x.unbind(dim=1))
    else:
        if x.shape[1] != 1 or sum(seq_lengths) != x.shape[0]:
            raise ValueError("packed input is [sum(seq_lengths), 1, hidden]")
        sequences = list(x[:, 0].split(list(seq_lengths), dim=0))
    given = [None] * len(sequences) if indices is None else indices
    if len(given) != len(sequences):
        raise ValueError("indices needs one mask per sequence")

    runs = [
        _attend(params, sequence, shape, mode, loss, mask)
        for sequence, mask in zip(sequences, given, strict=True)
    ]
    outs = [run.out for run in runs]
    out = torch.stack(outs, dim=1) if seq_lengths is None else torch.cat(outs)[:, None]
    loss_rows = [run.loss_rows for run in runs if run.loss_rows is not None]
    loss_sum = torch.cat(loss_rows).sum() if loss is not None else None
    rows = sum(sequence.shape[0] for sequence in sequences)
    return Result(
        out=out,
        loss=None if loss_sum is None else loss_sum / rows,
        loss_sum=loss_sum,
        index_scores=[run.index_scores for run in runs if run.index_scores is not None],
        selected=[run.selected for run in runs],
        captured=torch.cat([run.captured for run in runs], dim=1).mean(),
    )
