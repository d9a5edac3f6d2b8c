"""The float64 reference against scalar loops, Megatron's rope and published numbers."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tests.reference import dsa_float64 as ref
from tests.reference.csa_float64 import inverse_frequencies

SHAPE = ref.Shape(
    heads=3,
    hidden=24,
    q_lora=16,
    kv_lora=12,
    nope=8,
    rope=4,
    v=6,
    index_heads=4,
    index_dim=8,
    topk=5,
    eps=1e-6,
)
YARN = {
    "scaling_factor": 40.0,
    "original_max_position": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,  # unlike mscale, so that the concentration factor is not 1
}
V32_ROPE = dataclasses.replace(SHAPE, rope=64, index_dim=128, nope=128, yarn=YARN)
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def frequencies(shape: ref.Shape) -> Tensor:
    return torch.tensor(
        inverse_frequencies(shape.rope, shape.rotary_base, shape.yarn), dtype=torch.float64
    )


def random(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def random_params(shape: ref.Shape, seed: int = 0) -> dict[str, Tensor]:
    """Draw a layer's parameters with softmaxes neither flat nor one-hot."""
    q_in = shape.hidden if shape.q_lora is None else shape.q_lora
    q_out = shape.heads * (shape.nope + shape.rope)
    sizes = {
        "linear_kv_down_proj": (shape.kv_lora + shape.rope, shape.hidden),
        "linear_kv_up_proj": (shape.heads * (shape.nope + shape.v), shape.kv_lora),
        "linear_proj": (shape.hidden, shape.heads * shape.v),
        ref.INDEXER + "linear_wq_b": (shape.index_heads * shape.index_dim, q_in),
        ref.INDEXER + "linear_wk": (shape.index_dim, shape.hidden),
        ref.INDEXER + "linear_weights_proj": (shape.index_heads, shape.hidden),
    }
    if shape.q_lora is None:
        sizes["linear_q_proj"] = (q_out, q_in)
    else:
        sizes["linear_q_down_proj"] = (shape.q_lora, shape.hidden)
        sizes["linear_q_up_proj"] = (q_out, q_in)
    params = {}
    for i, (name, (rows, columns)) in enumerate(sizes.items()):
        weight = random(rows, columns, seed=seed + 100 + i) * 1.5 / math.sqrt(columns)
        params[name + ".weight"] = weight
    norms = {"kv_layernorm": shape.kv_lora, ref.INDEXER + "k_norm": shape.index_dim}
    if shape.q_lora is not None:
        norms["q_layernorm"] = shape.q_lora
    for i, (name, size) in enumerate(norms.items()):
        params[name + ".weight"] = 1.0 + 0.2 * random(size, seed=seed + 200 + i)
    params[ref.INDEXER + "k_norm.bias"] = 0.2 * random(shape.index_dim, seed=seed + 300)
    return params


def test_layer_by_scalar_loops() -> None:
    params, x = random_params(SHAPE), random(9, 1, SHAPE.hidden)
    result = ref.attention_layer(params, x, SHAPE, mode="dense")
    heads, nope, rope, v, rank = SHAPE.heads, SHAPE.nope, SHAPE.rope, SHAPE.v, SHAPE.kv_lora
    weights = {name: value.tolist() for name, value in params.items()}

    def dot(left: list[float], right: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(left, right, strict=True))

    def linear(name: str, vector: list[float]) -> list[float]:
        return [dot(row, vector) for row in weights[name + ".weight"]]

    def rms(name: str, vector: list[float]) -> list[float]:
        root = math.sqrt(dot(vector, vector) / len(vector) + SHAPE.eps)
        return [a / root * b for a, b in zip(vector, weights[name + ".weight"], strict=True)]

    def turn(a: float, b: float, pair: int, position: int) -> tuple[float, float]:
        angle = position * SHAPE.rotary_base ** (-2.0 * pair / rope)
        z = complex(a, b) * complex(math.cos(angle), math.sin(angle))
        return z.real, z.imag

    def rope_pairs(vector: list[float], position: int) -> list[float]:
        pairs = [turn(vector[2 * i], vector[2 * i + 1], i, position) for i in range(rope // 2)]
        return [part for pair in pairs for part in pair]

    tokens = x[:, 0].tolist()
    t = 8
    qr = rms("q_layernorm", linear("linear_q_down_proj", tokens[t]))
    q = linear("linear_q_up_proj", qr)
    concatenated = []
    for h in range(heads):
        q_h = q[h * (nope + rope) : (h + 1) * (nope + rope)]
        logits, values = [], []
        for s in range(t + 1):
            down = linear("linear_kv_down_proj", tokens[s])
            up = linear("linear_kv_up_proj", rms("kv_layernorm", down[:rank]))
            up = up[h * (nope + v) : (h + 1) * (nope + v)]
            score = dot(q_h[:nope], up[:nope])
            score += dot(rope_pairs(q_h[nope:], t), rope_pairs(down[rank:], s))
            logits.append(score / math.sqrt(nope + rope))
            values.append(up[nope:])
        weight = [math.exp(logit) for logit in logits]
        for d in range(v):
            concatenated.append(dot(weight, [value[d] for value in values]) / sum(weight))
    assert result.out[t, 0].tolist() == pytest.approx(linear("linear_proj", concatenated))

    s, dim = 3, SHAPE.index_dim
    k = linear(ref.INDEXER + "linear_wk", tokens[s])
    mean = sum(k) / dim
    root = math.sqrt(sum((a - mean) ** 2 for a in k) / dim + SHAPE.eps)
    gain, bias = weights[ref.INDEXER + "k_norm.weight"], weights[ref.INDEXER + "k_norm.bias"]
    k = [(a - mean) / root * g + b for a, g, b in zip(k, gain, bias, strict=True)]
    q = linear(ref.INDEXER + "linear_wq_b", qr)
    w = linear(ref.INDEXER + "linear_weights_proj", tokens[t])
    score = 0.0
    for h in range(SHAPE.index_heads):
        q_h = q[h * dim : (h + 1) * dim]
        match = dot(q_h[rope:], k[rope:])
        for i in range(rope // 2):
            a = turn(q_h[i], q_h[i + rope // 2], i, t)
            b = turn(k[i], k[i + rope // 2], i, s)
            match += a[0] * b[0] + a[1] * b[1]
        # The Hadamard rotation changes no dot product, so it is omitted here.
        score += w[h] * max(match, 0.0) / math.sqrt(SHAPE.index_heads * dim)
    assert float(result.index_scores[0][t, s]) == pytest.approx(score)


def test_hadamard_is_invisible_and_rope_order_is_not() -> None:
    """The wrong rope pairing must change the selection once S > K."""
    params, x = random_params(SHAPE), random(32, 1, SHAPE.hidden)
    base = ref.attention_layer(params, x, SHAPE, mode="sparse")
    plain = dataclasses.replace(SHAPE, index_hadamard=False)
    other = dataclasses.replace(SHAPE, index_rope_interleaved=True)
    no_rotation = ref.attention_layer(params, x, plain, mode="sparse")
    torch.testing.assert_close(no_rotation.index_scores[0], base.index_scores[0], **EXACT)
    wrong = ref.attention_layer(params, x, other, mode="sparse")
    assert torch.equal(wrong.selected[0][: SHAPE.topk], base.selected[0][: SHAPE.topk])
    assert not torch.equal(wrong.selected[0], base.selected[0])


def test_topk_ties_and_window() -> None:
    row = torch.tensor([0.0, 3.0, -0.0, 1.0, 0.0, 1.0, 9.0], dtype=torch.float64)
    assert ref.topk(row, 0, 7, 2) == [1, 6]
    assert ref.topk(row, 0, 6, 2) == [1, 3]
    assert ref.topk(row, 0, 6, 4) == [0, 1, 3, 5]
    assert ref.topk(row, 2, 5, 2) == [2, 3]
    assert ref.topk(row, 4, 6, 9) == [4, 5]
    assert ref.topk(row, 3, 3, 2) == []


@pytest.mark.parametrize("shape", [dataclasses.replace(V32_ROPE, yarn=None), V32_ROPE])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_agrees_with_megatron(shape: ref.Shape, interleaved: bool) -> None:
    rope_utils = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    yarn = pytest.importorskip("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    length, dim = 50, shape.rope
    inverse = 1.0 / shape.rotary_base ** (torch.arange(0, dim, 2) / dim)
    factor = 1.0
    if shape.yarn is not None:
        options = shape.yarn
        low, high = yarn._yarn_find_correction_range(
            options["beta_fast"],
            options["beta_slow"],
            dim,
            shape.rotary_base,
            options["original_max_position"],
        )
        ramp = yarn._yarn_linear_ramp_mask(low, high, dim // 2, device=torch.device("cpu"))
        inverse = inverse / options["scaling_factor"] * ramp + inverse * (1.0 - ramp)
        factor = yarn._yarn_get_concentration_factor(
            options["scaling_factor"], options["mscale"], options["mscale_all_dim"]
        )
        assert factor > 1.1
    torch.testing.assert_close(frequencies(shape).float(), inverse)
    angle = torch.outer(torch.arange(length).float(), inverse)
    angle = torch.cat([angle, angle], dim=-1)[:, None, None, :]
    x = random(length, 1, 3, dim)
    theirs = rope_utils._apply_rotary_pos_emb_bshd(
        x, angle, mla_rotary_interleaved=interleaved, mscale=factor
    )
    ours = ref.rotate(x, *ref.rope_tables(length, shape), interleaved=interleaved)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_yarn_numbers_of_v32() -> None:
    shape = dataclasses.replace(V32_ROPE, yarn={**YARN, "mscale_all_dim": 1.0})
    plain = frequencies(dataclasses.replace(shape, yarn=None))
    ratio = frequencies(shape) / plain
    expected = [1.0 - min(max((i - 10) / 13, 0.0), 1.0) * (1.0 - 1.0 / 40.0) for i in range(32)]
    assert ratio.tolist() == pytest.approx(expected)
    assert shape.rope_concentration == 1.0
    assert shape.softmax_scale == pytest.approx((0.1 * math.log(40.0) + 1.0) ** 2 / 192**0.5)
