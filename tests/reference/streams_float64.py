"""Float64 reference of a whole small DeepSeek-V4: hyper-connections and multi-token prediction.

From the formulas, without package code, on the attention of ``csa_float64.py``. Tokens are a list
[S, C] per sequence; streams are [S, n, C].
"""

import dataclasses

import torch
from torch import Tensor

from tests.reference import csa_float64
from tests.reference.csa_float64 import Shape, rms_norm


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes and options of a model."""

    attention: tuple[Shape, ...]  # of all decoder layers, then of all prediction layers
    layers: int  # of the decoder
    streams: int
    iterations: int  # of Sinkhorn's algorithm
    hc_eps: float
    eps: float  # of every norm
    prediction_scale: float  # of the mean prediction loss
    indexer_scale: float  # of an indexer's loss


def sub(params: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the parameters below a prefix, without it."""
    return {n[len(prefix) :]: p for n, p in params.items() if n.startswith(prefix)}


# ------------------------------------------------------------------- hyper-connections


def logits_of(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Return fn @ flat(x) / rms(flat(x)) per token: [S, len(fn)]."""
    flat = x.flatten(1)
    return (flat @ fn.T) / torch.sqrt((flat * flat).mean(dim=1, keepdim=True) + eps)


def weights(params: dict[str, Tensor], prefix: str, x: Tensor, model: Model):
    """Return pre [S, n], post [S, n] and comb [S, n, n] of a sublayer."""
    n = model.streams
    fn, base, scale = (params[f"{prefix}_{part}"] for part in ("fn", "base", "scale"))
    m = logits_of(x, fn, model.eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + model.hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    square = m[:, 2 * n :].view(-1, n, n) * scale[2] + base[2 * n :].view(n, n)
    comb = torch.softmax(square, dim=2) + model.hc_eps
    comb = comb / (comb.sum(dim=1, keepdim=True) + model.hc_eps)
    for _ in range(model.iterations - 1):
        comb = comb / (comb.sum(dim=2, keepdim=True) + model.hc_eps)
        comb = comb / (comb.sum(dim=1, keepdim=True) + model.hc_eps)
    return pre, post, comb


def head(params: dict[str, Tensor], x: Tensor, model: Model) -> Tensor:
    """Return the output layer's input: the head's sum of the streams, normalised."""
    m = logits_of(x, params["hc_head_fn"], model.eps)
    w = torch.sigmoid(m * params["hc_head_scale"] + params["hc_head_base"]) + model.hc_eps
    return rms_norm(torch.einsum("si,sic->sc", w, x), params["weight"], model.eps)


def mlp(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return W2 (silu(W1 x) * (W3 x)); W1 and W3 are stacked."""
    gate, up = (x @ params["linear_fc1.weight"].T).chunk(2, dim=1)
    return (gate * torch.sigmoid(gate) * up) @ params["linear_fc2.weight"].T


def layer(params: dict[str, Tensor], xs: list[Tensor], shape: Shape, model: Model):
    """Run one layer on the streams of every sequence; also return its indexer's loss, 0 without
    one.
    """
    connected = [weights(params, "hc_attn", x, model) for x in xs]
    read = [torch.einsum("si,sic->sc", w[0], x) for w, x in zip(connected, xs, strict=True)]
    read = [rms_norm(u, params["input_layernorm.weight"], model.eps) for u in read]
    lengths = [len(u) for u in read]
    result = csa_float64.attention_layer(
        sub(params, "self_attention."),
        torch.cat(read)[:, None],
        shape,
        mode="sparse",
        loss="sparse" if shape.ratio == 4 else None,
        seq_lengths=lengths,
    )
    xs = write(result.out[:, 0].split(lengths), connected, xs)
    connected = [weights(params, "hc_ffn", x, model) for x in xs]
    read = [torch.einsum("si,sic->sc", w[0], x) for w, x in zip(connected, xs, strict=True)]
    read = [rms_norm(u, params["pre_mlp_layernorm.weight"], model.eps) for u in read]
    xs = write([mlp(sub(params, "mlp."), u) for u in read], connected, xs)
    return xs, 0.0 if result.loss is None else result.loss


def write(outs, connected, xs):
    """Return x'_j = post_j out + sum_i comb[i, j] x_i."""
    return [
        torch.einsum("sj,sc->sjc", post, out) + torch.einsum("sij,sic->sjc", comb, x)
        for out, (_, post, comb), x in zip(outs, connected, xs, strict=True)
    ]


# ------------------------------------------------------------------------- the model


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log softmax(logits)[label] per token."""
    chosen = logits.gather(1, labels[:, None])[:, 0]
    return torch.logsumexp(logits, dim=1) - chosen


def later(row: Tensor) -> Tensor:
    """Shift: entry t + 1 at t; 0 after the last one."""
    return torch.cat([row[1:], row.new_zeros(1)])


def losses(
    params: dict[str, Tensor],
    ids: list[Tensor],
    labels: list[Tensor],
    masks: list[Tensor],
    model: Model,
):
    """Return losses per token, the mean loss of every prediction layer, and their total.

    A prediction layer k (from 1) at t reads the embedding of token t + k and predicts label t + k.
    """
    embed = params["embedding.word_embeddings.weight"]
    xs = [embed[row][:, None].repeat(1, model.streams, 1) for row in ids]
    extra = 0.0
    for number, shape in enumerate(model.attention[: model.layers]):
        xs, loss = layer(sub(params, f"decoder.layers.{number}."), xs, shape, model)
        extra = extra + model.indexer_scale * loss

    def scores(prefix, xs, labels):
        out = params["output_layer.weight"]
        normed = [head(sub(params, prefix), x, model) for x in xs]
        return [cross_entropy(h @ out.T, row) for h, row in zip(normed, labels, strict=True)]

    main = scores("decoder.final_layernorm.", xs, labels)
    total = sum((m * x).sum() for m, x in zip(masks, main, strict=True)) / sum(map(len, ids))
    predicted = []
    for depth, shape in enumerate(model.attention[model.layers :]):
        own = sub(params, f"mtp.layers.{depth}.")
        ids, labels, masks = ([later(row) for row in rows] for rows in (ids, labels, masks))
        mixed = []
        for row, x in zip(ids, xs, strict=True):
            added = rms_norm(embed[row], own["enorm.weight"], model.eps) @ own["e_proj.weight"].T
            each = [
                rms_norm(x[:, i], own["hnorm.weight"], model.eps) @ own["h_proj.weight"].T + added
                for i in range(model.streams)
            ]
            mixed.append(torch.stack(each, dim=1))
        xs, loss = layer(sub(own, "mtp_model_layer."), mixed, shape, model)
        extra = extra + model.indexer_scale * loss
        each = scores(f"mtp.layers.{depth}.final_layernorm.", xs, labels)
        summed = sum((m * x).sum() for m, x in zip(masks, each, strict=True))
        predicted.append(summed / sum(m.sum() for m in masks))
    if predicted:
        extra = extra + model.prediction_scale * sum(predicted) / len(predicted)
    return torch.cat(main), predicted, total + extra
