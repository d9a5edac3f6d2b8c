"""Float64 reference for DeepSeek-V4's hybrid attention (CSA, HCA, window): plain loops, autograd.

Shares no code with the package; norm, transform and angles with the DSA reference. Loops over
sequences, queries, groups and output groups, with positions relative to the sequence.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

COMPRESSOR = "core_attention.compressor."
INDEXER = "core_attention.indexer."


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes and options of one attention layer."""

    heads: int
    hidden: int
    q_lora: int
    head_dim: int  # nope dims first, then the rope dims
    rope: int
    window: int  # query t sees the positions t - window + 1 .. t
    ratio: int  # m; 0: window only, 4: CSA (overlap and indexer), else HCA (neither)
    o_groups: int
    o_lora: int
    index_heads: int = 0
    index_dim: int = 0
    topk: int = 0
    rotary_base: float = 10000.0  # ratio 0
    compress_rotary_base: float = 160000.0  # ratio > 0
    # Keys: scaling_factor, original_max_position, beta_fast, beta_slow. Only with ratio > 0.
    yarn: dict | None = None
    eps: float = 1e-6  # of every RMS norm
    index_hadamard: bool = True
    index_relu: bool = True
    index_rope_interleaved: bool = False

    @property
    def overlap(self) -> bool:
        """Return whether a group also pools the previous group's positions."""
        return self.ratio == 4


class Result(NamedTuple):
    """Results of a layer."""

    out: Tensor  # [S, B, hidden]
    loss: Tensor | None  # mean over the real query tokens; without the coefficient
    # Per sequence and token the groups T_t, ascending: the indexer's top-k if computed, else all
    # visible ones. Unused by dense mode's attention.
    selected: list[list[list[int]]]


# ----------------------------------------------------------------------------- rope


def inverse_frequencies(dim: int, base: float, yarn: dict | None) -> list[float]:
    """theta_i = base^(-2i/dim), i < dim/2; under YaRN blended with theta_i / factor."""
    theta = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return theta

    def pair_with_rotations(rotations: float) -> float:
        # The (real-valued) i whose pair turns `rotations` times within the original context:
        # original * theta_i = 2 pi rotations.
        turns = yarn["original_max_position"] / (rotations * 2.0 * math.pi)
        return dim * math.log(turns) / (2.0 * math.log(base))

    low = min(max(math.floor(pair_with_rotations(yarn["beta_fast"])), 0), dim - 1)
    high = min(max(math.ceil(pair_with_rotations(yarn["beta_slow"])), 0), dim - 1)
    width = (high - low) if high != low else 0.001  # DeepSeek's guard against 0/0
    blended = []
    for i, value in enumerate(theta):
        ramp = min(max((i - low) / width, 0.0), 1.0)  # 0: keep (fast pair), 1: interpolate
        blended.append(value * (1.0 - ramp) + value / yarn["scaling_factor"] * ramp)
    return blended


def rope_last(
    x: Tensor, position: int, shape: Shape, *, interleaved: bool = True, inverse: bool = False
) -> Tensor:
    """Rotate the last `rope` dims of x [..., d], all at one position; dims keep their order.

    Pair i is (2i, 2i+1) when interleaved, else (i, i + rope/2); its angle is position * theta_i.
    """
    half = shape.rope // 2
    base = shape.rotary_base if shape.ratio == 0 else shape.compress_rotary_base
    yarn = None if shape.ratio == 0 else shape.yarn
    theta = inverse_frequencies(shape.rope, base, yarn)
    theta = torch.tensor(theta, dtype=torch.float64, device=x.device)
    angle = (-position if inverse else position) * theta
    cos, sin = angle.cos(), angle.sin()
    plain, turned = x[..., : x.shape[-1] - shape.rope], x[..., x.shape[-1] - shape.rope :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    a, b = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        turned = torch.stack([a, b], dim=-1).flatten(-2)
    else:
        turned = torch.cat([a, b], dim=-1)
    return torch.cat([plain, turned], dim=-1)


# ---------------------------------------------------------------------- norms and Hadamard


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times the weight if there is one."""
    normed = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def hadamard(x: Tensor) -> Tensor:
    """Normalised Walsh-Hadamard transform of the last dim: H[i, j] = (-1)^popcount(i & j)."""
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"a Hadamard rotation needs a power of two, got {size}")
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return x @ torch.tensor(signs, dtype=torch.float64, device=x.device) / math.sqrt(size)


# ------------------------------------------------------------------------- compressed keys


def visible_groups(t: int, ratio: int) -> int:
    """Return the number of groups visible at position t: floor((t + 1) / m)."""
    return 0 if ratio == 0 else (t + 1) // ratio


def compress(
    params: dict[str, Tensor], prefix: str, x: Tensor, shape: Shape, *, interleaved: bool = True
) -> Tensor:
    """Pool one sequence x [S, hidden] into its complete groups: [floor(S / m), d].

    u = W_wkv x, s = W_wgate x + APE[i mod m]. Group g takes, per channel, the mean of u under
    softmax(s) over positions gm .. gm + m - 1 (with overlap: the second d channels) and, with
    overlap, over the previous group's positions (the first d channels), which group 0 lacks. Then
    RMSNorm and rope at position gm.
    """
    m, ape, norm = shape.ratio, params[prefix + "ape"], params[prefix + "norm.weight"]
    d = norm.shape[0]
    own = d if shape.overlap else 0  # first channel of the group's positions
    u = x @ params[prefix + "linear_wkv.weight"].T
    s = x @ params[prefix + "linear_wgate.weight"].T
    if u.shape[1] != own + d or ape.shape != (m, own + d):
        raise ValueError(f"{prefix}: wrong number of channels for ratio {m}")
    keys = []
    for g in range(x.shape[0] // m):
        values = [u[i, own:] for i in range(g * m, g * m + m)]
        scores = [s[i, own:] + ape[i % m, own:] for i in range(g * m, g * m + m)]
        if shape.overlap and g > 0:
            previous = range((g - 1) * m, g * m)
            values += [u[i, :d] for i in previous]
            scores += [s[i, :d] + ape[i % m, :d] for i in previous]
        weights = torch.softmax(torch.stack(scores), dim=0)  # [m or 2m, d]
        pooled = rms_norm((weights * torch.stack(values)).sum(dim=0), norm, shape.eps)
        keys.append(rope_last(pooled, g * m, shape, interleaved=interleaved))
    return torch.stack(keys) if keys else x.new_zeros(0, d)


# ------------------------------------------------------------------------------ the indexer


def index_scores(params: dict[str, Tensor], x: Tensor, qr: Tensor, shape: Shape) -> list[Tensor]:
    """Return I[t, g] = sum_h w[t, h] relu(q_I[t, h] . k_I[g]) over t's visible groups.

    q_I = W_qb qr, rope on the last dims, Hadamard; k_I from the indexer's compressor, then
    Hadamard; w = W_w x * HI^-1/2 * DI^-1/2. x and qr are detached: the loss trains only the
    indexer.
    """
    x, qr = x.detach(), qr.detach()
    pairs = shape.index_rope_interleaved
    keys = compress(params, INDEXER + "compressor.", x, shape, interleaved=pairs)
    if shape.index_hadamard:
        keys = hadamard(keys)
    scores = []
    for t in range(x.shape[0]):
        q = params[INDEXER + "linear_wq_b.weight"] @ qr[t]
        q = q.view(shape.index_heads, shape.index_dim)
        q = rope_last(q, t, shape, interleaved=pairs)
        if shape.index_hadamard:
            q = hadamard(q)
        w = params[INDEXER + "linear_weights_proj.weight"] @ x[t]
        w = w * shape.index_heads**-0.5 * shape.index_dim**-0.5
        dots = q @ keys[: visible_groups(t, shape.ratio)].T  # [HI, visible]
        scores.append(w @ (torch.relu(dots) if shape.index_relu else dots))
    return scores


def topk(scores: Tensor, k: int) -> list[int]:
    """Return ids of the min(k, all) largest scores, ascending; ties (-0.0 == 0.0): smallest id."""
    row = scores.detach().tolist()
    if not all(math.isfinite(score) for score in row):
        raise ValueError("an index score is not finite")
    return sorted(sorted(range(len(row)), key=lambda g: (-row[g], g))[:k])


def kl_row(
    student_scores: Tensor, compressed: Tensor, window: Tensor, sink: Tensor, teacher: str
) -> Tensor:
    """Return KL(p || softmax(student_scores)) of one query over the groups A_t; n >= 1 of them.

    p ~ sum_h exp(l_h - LSE_h) with LSE_h over the compressed logits, and under teacher "all" also
    over the window's and the sink. Logits are scaled: compressed [H, n], window [H, W], sink [H]; p
    is detached.
    """
    compressed, window, sink = compressed.detach(), window.detach(), sink.detach()
    mass = compressed
    if teacher == "all":
        mass = torch.cat([compressed, window, sink[:, None]], dim=1)
    log_p = compressed - torch.logsumexp(mass, dim=1, keepdim=True)
    log_p = torch.log_softmax(torch.logsumexp(log_p, dim=0), dim=0)  # head sum, L1-normalised
    return (log_p.exp() * (log_p - torch.log_softmax(student_scores, dim=0))).sum()


# ------------------------------------------------------------------------------- the layer


class _Sequence(NamedTuple):
    """One sequence's share of a Result, not reduced."""

    out: Tensor  # [S, hidden]
    loss_rows: list[Tensor]  # queries without a visible group are omitted: their loss is 0
    selected: list[list[int]]


def output_projection(params: dict[str, Tensor], heads_out: Tensor, shape: Shape) -> Tensor:
    """Map one token [H, head_dim] to [hidden]: each group of consecutive heads has a matrix."""
    width, rank = shape.heads // shape.o_groups, shape.o_lora
    latents = []
    for j in range(shape.o_groups):
        matrix = params["linear_o_group_proj.weight"][j * rank : (j + 1) * rank]
        latents.append(matrix @ heads_out[j * width : (j + 1) * width].flatten())
    return params["linear_proj.weight"] @ torch.cat(latents)


def _attend(
    params: dict[str, Tensor], x: Tensor, shape: Shape, mode: str, loss: str | None, teacher: str
) -> _Sequence:
    """One sequence [S, hidden] with positions 0 .. S-1."""
    length, scale = x.shape[0], shape.head_dim**-0.5
    if length == 0:
        return _Sequence(x.new_zeros(0, shape.hidden), [], [])
    qr = x @ params["linear_q_down_proj.weight"].T
    qr = rms_norm(qr, params["q_layernorm.weight"], shape.eps)
    q = (qr @ params["linear_q_up_proj.weight"].T).view(length, shape.heads, shape.head_dim)
    q = rms_norm(q, None, shape.eps)
    kv = x @ params["linear_kv_proj.weight"].T
    kv = rms_norm(kv, params["kv_layernorm.weight"], shape.eps)
    kv = torch.stack([rope_last(kv[t], t, shape) for t in range(length)])
    sink = params["core_attention.attn_sink"]
    compressed = x.new_zeros(0, shape.head_dim)
    if shape.ratio > 0:
        compressed = compress(params, COMPRESSOR, x, shape)
    scores = None
    if loss is not None or (mode == "sparse" and shape.ratio == 4):
        scores = index_scores(params, x, qr, shape)

    outs, loss_rows, selections = [], [], []
    for t in range(length):
        visible = list(range(visible_groups(t, shape.ratio)))
        selected = visible if scores is None else topk(scores[t], shape.topk)
        selections.append(selected)
        window = kv[max(0, t - shape.window + 1) : t + 1]
        attended = compressed[visible if mode == "dense" else selected]

        query = rope_last(q[t], t, shape)
        keys = torch.cat([window, attended])  # also the values
        # The sink is one more logit, without a value.
        logits = torch.cat([scale * query @ keys.T, sink[:, None]], dim=1)
        heads_out = torch.softmax(logits, dim=1)[:, :-1] @ keys
        heads_out = rope_last(heads_out, t, shape, inverse=True)
        outs.append(output_projection(params, heads_out, shape))

        groups = visible if loss == "dense" else selected  # A_t
        if loss is not None and groups:
            on_groups, on_window = scale * query @ compressed[groups].T, scale * query @ window.T
            loss_rows.append(kl_row(scores[t][groups], on_groups, on_window, sink, teacher))
    return _Sequence(torch.stack(outs), loss_rows, selections)


def attention_layer(
    params: dict[str, Tensor],
    x: Tensor,
    shape: Shape,
    *,
    mode: str,
    loss: str | None = None,
    teacher: str = "all",
    seq_lengths: list[int] | None = None,
) -> Result:
    """Compute one layer on x [S, B, hidden], or on packed x [S, 1, hidden] with `seq_lengths`.

    mode: "sparse" (window and, in a ratio-4 layer, the indexer's top-k) or "dense" (window and all
    visible groups). loss: None, "sparse" or "dense" (A_t = the top-k or all visible groups),
    independent of mode. teacher: "all" or "compressed", the keys in the teacher's denominator.
    Packed tokens after the last sequence are padding: their output is 0.
    """
    if mode not in ("dense", "sparse") or loss not in (None, "dense", "sparse"):
        raise ValueError(f"unknown mode {mode!r} or loss {loss!r}")
    if teacher not in ("all", "compressed"):
        raise ValueError(f"unknown teacher {teacher!r}")
    if loss is not None and shape.ratio != 4:
        raise ValueError(f"a layer of ratio {shape.ratio} has no indexer, so no loss")
    if x.dtype != torch.float64 or any(p.dtype != torch.float64 for p in params.values()):
        raise TypeError("the reference takes float64 only")
    if seq_lengths is None:
        sequences, padding = [x[:, b] for b in range(x.shape[1])], 0
    else:
        padding = x.shape[0] - sum(seq_lengths)
        if x.shape[1] != 1 or padding < 0:
            raise ValueError("packed input is [at least sum(seq_lengths), 1, hidden]")
        sequences = list(x[:, 0].split([*seq_lengths, padding]))[:-1]

    runs = [_attend(params, sequence, shape, mode, loss, teacher) for sequence in sequences]
    outs = [run.out for run in runs]
    if seq_lengths is None:
        out = torch.stack(outs, dim=1)
    else:
        out = torch.cat([*outs, x.new_zeros(padding, shape.hidden)])[:, None]
    mean = None
    if loss is not None:
        rows = sum(sequence.shape[0] for sequence in sequences)
        total = sum((row for run in runs for row in run.loss_rows), x.new_zeros(()))
        mean = total / max(rows, 1)
    return Result(out, mean, [run.selected for run in runs])
