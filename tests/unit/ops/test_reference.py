"""Checks that the float64 reference itself is right."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tests.reference import dsa_float64 as ref

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


def random(*size: int, seed: int = 0) -> Tensor:
    """Draw normal float64 numbers from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def random_params(shape: ref.Shape, seed: int = 0) -> dict[str, Tensor]:
    """Draw a layer's parameters, scaled so that the softmaxes are neither flat nor one-hot."""
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


def ids_of(mask: Tensor, width: int) -> Tensor:
    """Turn a bool mask [S, S] into contract indices [S, width], padded with -1."""
    rows = [row.nonzero()[:, 0].tolist() for row in mask]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32)


# ------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("q_lora", [16, None])
def test_sparse_with_all_keys_is_dense(q_lora: int | None) -> None:
    """K >= S selects every causal key: same output, same loss, all mass captured."""
    shape = dataclasses.replace(SHAPE, q_lora=q_lora, topk=20)
    params, x = random_params(shape), random(20, 2, shape.hidden)
    dense = ref.attention_layer(params, x, shape, mode="dense", loss="dense")
    sparse = ref.attention_layer(params, x, shape, mode="sparse", loss="sparse")
    torch.testing.assert_close(sparse.out, dense.out, **EXACT)
    torch.testing.assert_close(sparse.loss, dense.loss, **EXACT)
    assert all(torch.equal(mask, ref.causal_mask(20)) for mask in sparse.selected)
    assert float(sparse.captured) == pytest.approx(1.0, abs=1e-12)


def test_sparse_differs_and_selects_min_k_visible() -> None:
    """With K < S the layer really drops keys; row t selects min(K, t + 1) causal ones."""
    params, x = random_params(SHAPE), random(20, 1, SHAPE.hidden)
    dense = ref.attention_layer(params, x, SHAPE, mode="dense")
    sparse = ref.attention_layer(params, x, SHAPE, mode="sparse")
    mask = sparse.selected[0]
    assert mask.sum(dim=1).tolist() == [min(SHAPE.topk, t + 1) for t in range(20)]
    assert not (mask & ~ref.causal_mask(20)).any()
    # Exact although the sums have other lengths: the first K rows see every key either way.
    torch.testing.assert_close(sparse.out[:5], dense.out[:5], **EXACT)
    assert (sparse.out[5:] - dense.out[5:]).norm() > 1e-2 * dense.out[5:].norm()
    assert 0.0 < float(sparse.captured) < 1.0
    given = ref.attention_layer(params, x, SHAPE, mode="sparse", indices=[mask])
    assert torch.equal(given.out, sparse.out)


@pytest.mark.parametrize("yarn", [None, YARN])
def test_absorbed_equals_not_absorbed(yarn: dict | None) -> None:
    """[q_nope W_uk ; q_pe] . [c_kv ; k_pe] with value c_kv and W_uv after, through the op."""
    shape = dataclasses.replace(SHAPE, yarn=yarn)
    params, x = random_params(shape), random(18, 1, shape.hidden)
    layer = ref.attention_layer(params, x, shape, mode="sparse", loss="sparse")
    _, q_nope, q_pe, c_kv, k_pe = ref.mla_inputs(params, x[:, 0], shape)
    w_up = params["linear_kv_up_proj.weight"].view(shape.heads, shape.nope + shape.v, -1)
    q = torch.cat([torch.einsum("thd,hdc->thc", q_nope, w_up[:, : shape.nope]), q_pe], dim=-1)
    kv = torch.cat([c_kv, k_pe], dim=-1)
    ids = ids_of(layer.selected[0], shape.topk)
    core, _, p_sum = ref.sparse_attention(q, kv, ids, shape.kv_lora, shape.softmax_scale)
    heads = torch.einsum("thc,hdc->thd", core, w_up[:, shape.nope :])
    out = heads.reshape(18, -1) @ params["linear_proj.weight"].T
    torch.testing.assert_close(out, layer.out[:, 0], **EXACT)

    # The op's p_sum is the sparse loss's teacher.
    teacher = torch.zeros(18, 18, dtype=torch.float64)
    for t in range(18):
        for slot, key in enumerate(ids[t].tolist()):
            if key >= 0:
                teacher[t, key] = p_sum[t, slot]
    rows = ref.kl_loss_rows(layer.index_scores[0], teacher, layer.selected[0])
    torch.testing.assert_close(rows.mean(), layer.loss, **EXACT)


def test_layer_by_scalar_loops() -> None:
    """One output row and one index score again, with Python floats and no tensor algebra."""
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
        # The Hadamard rotation of both sides changes no dot product, so it is left out here.
        score += w[h] * max(match, 0.0) / math.sqrt(SHAPE.index_heads * dim)
    assert float(result.index_scores[0][t, s]) == pytest.approx(score)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_packed_equals_separate(mode: str) -> None:
    """Packing changes nothing: each sequence alone, positions from 0, one mean over all rows."""
    params, lengths = random_params(SHAPE), [7, 1, 13, 2]
    x = random(sum(lengths), 1, SHAPE.hidden)
    packed = ref.attention_layer(params, x, SHAPE, mode=mode, loss=mode, seq_lengths=lengths)
    parts = [
        ref.attention_layer(params, part, SHAPE, mode=mode, loss=mode)
        for part in x.split(lengths, dim=0)
    ]
    torch.testing.assert_close(packed.out, torch.cat([p.out for p in parts]), **EXACT)
    total = sum(p.loss_sum for p in parts)
    torch.testing.assert_close(packed.loss_sum, total, **EXACT)
    torch.testing.assert_close(packed.loss, total / sum(lengths), **EXACT)
    mass = sum(p.captured * n for p, n in zip(parts, lengths, strict=True)) / sum(lengths)
    torch.testing.assert_close(packed.captured, mass, **EXACT)
    for i, part in enumerate(parts):
        assert torch.equal(packed.selected[i], part.selected[0])


def test_batch_equals_separate() -> None:
    """A batch element is a sequence of its own."""
    params, x = random_params(SHAPE), random(11, 3, SHAPE.hidden)
    batch = ref.attention_layer(params, x, SHAPE, mode="sparse", loss="sparse")
    losses = []
    for b in range(3):
        one = ref.attention_layer(params, x[:, b : b + 1], SHAPE, mode="sparse", loss="sparse")
        torch.testing.assert_close(batch.out[:, b], one.out[:, 0], **EXACT)
        losses.append(one.loss)
    torch.testing.assert_close(batch.loss, torch.stack(losses).mean(), **EXACT)


def test_hadamard_is_invisible_and_rope_order_is_not() -> None:
    """The rotation is orthogonal; the wrong rope pairing changes the selection once S > K."""
    params, x = random_params(SHAPE), random(32, 1, SHAPE.hidden)
    base = ref.attention_layer(params, x, SHAPE, mode="sparse")
    plain = dataclasses.replace(SHAPE, index_hadamard=False)
    other = dataclasses.replace(SHAPE, index_rope_interleaved=True)
    no_rotation = ref.attention_layer(params, x, plain, mode="sparse")
    torch.testing.assert_close(no_rotation.index_scores[0], base.index_scores[0], **EXACT)
    wrong = ref.attention_layer(params, x, other, mode="sparse")
    assert torch.equal(wrong.selected[0][: SHAPE.topk], base.selected[0][: SHAPE.topk])
    assert not torch.equal(wrong.selected[0], base.selected[0])
    matrix = ref.hadamard_matrix(8)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(8, dtype=torch.float64), **EXACT)
    # Sylvester order: entry (i, j) is (-1)^popcount(i & j).
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(8)] for i in range(8)]
    torch.testing.assert_close(matrix * 8**0.5, torch.tensor(signs, dtype=torch.float64), **EXACT)


def test_given_indices_with_an_empty_row() -> None:
    """A row without keys outputs 0, has loss 0 and finite gradients; its row still counts."""
    params = {k: v.requires_grad_() for k, v in random_params(SHAPE).items()}
    x = random(6, 1, SHAPE.hidden).requires_grad_()
    mask = ref.causal_mask(6)
    mask[2] = False
    result = ref.attention_layer(params, x, SHAPE, mode="sparse", loss="sparse", indices=[mask])
    assert torch.equal(result.out[2], torch.zeros_like(result.out[2]))
    torch.testing.assert_close(result.loss * 6, result.loss_sum, **EXACT)
    (result.out.square().sum() + result.loss).backward()
    assert all(torch.isfinite(p.grad).all() for p in [x, *params.values()])


# ----------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_loss_trains_the_indexer_only(mode: str) -> None:
    """The loss reaches every indexer parameter and nothing else; the output the reverse."""
    params = {k: v.requires_grad_() for k, v in random_params(SHAPE).items()}
    x = random(16, 1, SHAPE.hidden).requires_grad_()
    result = ref.attention_layer(params, x, SHAPE, mode=mode, loss=mode)
    result.loss.backward()
    assert x.grad is None
    for name, value in params.items():
        assert (value.grad is not None and value.grad.any()) == name.startswith(ref.INDEXER), name
        value.grad = None
    result.out.square().sum().backward()
    for name, value in params.items():
        assert (value.grad is None) == name.startswith(ref.INDEXER), name


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_layer_gradcheck(mode: str) -> None:
    """The whole layer against finite differences, with the selection held fixed."""
    shape = dataclasses.replace(SHAPE, heads=2, hidden=6, q_lora=5, kv_lora=4, nope=3, v=3)
    params = random_params(shape)
    x = random(5, 1, shape.hidden).requires_grad_()
    shape.topk = 3
    chosen = ref.attention_layer(params, x, shape, mode="sparse").selected
    names = [name for name in params if not name.startswith(ref.INDEXER)]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        merged = {**params, **dict(zip(names, values, strict=True))}
        return ref.attention_layer(merged, x, shape, mode=mode, indices=chosen).out

    leaves = [params[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, (x, *leaves))

    index_names = [name for name in params if name.startswith(ref.INDEXER)]

    def run_loss(*values: Tensor) -> Tensor:
        merged = {**params, **dict(zip(index_names, values, strict=True))}
        result = ref.attention_layer(
            merged, x.detach(), shape, mode=mode, loss=mode, indices=chosen
        )
        return result.loss

    leaves = [params[name].clone().requires_grad_() for name in index_names]
    assert torch.autograd.gradcheck(run_loss, leaves)


def test_kl_gradcheck_and_closed_form() -> None:
    """The gradient of KL is student - teacher on A_t and 0 elsewhere; empty rows are exactly 0."""
    mask = ref.causal_mask(6)
    mask[3] = False
    teacher = random(6, 6, seed=1).abs()
    teacher[5, 2] = 0.0  # 0 log 0
    scores = random(6, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ref.kl_loss_rows(s, teacher, mask), scores)
    rows = ref.kl_loss_rows(scores, teacher, mask)
    assert rows[3].item() == 0.0
    assert rows.min().item() >= 0.0
    (gradient,) = torch.autograd.grad(rows.sum(), scores)
    cut = teacher * mask
    cut = cut / cut.sum(dim=1, keepdim=True).clamp_min(1e-300)
    expected = ref.masked_softmax(scores.detach(), mask) - cut
    torch.testing.assert_close(gradient, expected, **EXACT)
    tracked = teacher.clone().requires_grad_()
    assert not ref.kl_loss_rows(scores.detach(), tracked, mask).requires_grad
    student = ref.masked_softmax(scores.detach(), mask)
    same = ref.kl_loss_rows(scores, 7.0 * student, mask)
    torch.testing.assert_close(same, torch.zeros(6, dtype=torch.float64), **EXACT)
    # Masking with -inf scores is the same as masking with the mask.
    hidden = scores.detach().masked_fill(~mask, -math.inf)
    torch.testing.assert_close(ref.kl_loss_rows(hidden, teacher, mask | True), rows, **EXACT)


# ------------------------------------------------------------------------- small pieces


def test_softmax_rows_sum_to_one() -> None:
    """Rows with a key sum to 1, rows without to exactly 0, masked entries are exactly 0."""
    mask = random(10, 10, seed=3) > 0.0
    mask[4] = False
    probs = ref.masked_softmax(random(10, 10) * 30.0, mask)
    expected = mask.any(dim=1).double()
    torch.testing.assert_close(probs.sum(dim=1), expected, **EXACT)
    assert not probs[~mask].any()


def test_topk_ties_and_window() -> None:
    """Ties go to the smallest id, also between 0.0 and -0.0; the window is [lo, hi)."""
    row = torch.tensor([0.0, 3.0, -0.0, 1.0, 0.0, 1.0, 9.0], dtype=torch.float64)
    assert ref.topk(row, 0, 7, 2) == [1, 6]
    assert ref.topk(row, 0, 6, 2) == [1, 3]
    assert ref.topk(row, 0, 6, 4) == [0, 1, 3, 5]
    assert ref.topk(row, 2, 5, 2) == [2, 3]
    assert ref.topk(row, 4, 6, 9) == [4, 5]
    assert ref.topk(row, 3, 3, 2) == []


def test_indexer_scores_relu_switch() -> None:
    """relu(x) - relu(-x) = x ties the two settings together; relu gives exact zeros."""
    q, k, w = random(4, 3, 8), random(5, 8, seed=1), random(4, 3, seed=2)
    on = ref.indexer_scores(q, k, w)
    off = ref.indexer_scores(q, k, w, relu=False)
    torch.testing.assert_close(on - ref.indexer_scores(-q, k, w), off, **EXACT)
    positive = ref.indexer_scores(q[:, :1].abs(), -k.abs(), w[:, :1])
    assert torch.equal(positive, torch.zeros_like(positive))


@pytest.mark.parametrize("shape", [dataclasses.replace(V32_ROPE, yarn=None), V32_ROPE])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_agrees_with_megatron(shape: ref.Shape, interleaved: bool) -> None:
    """Frequencies, concentration factor and pairing are Megatron's (in its float32)."""
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
    torch.testing.assert_close(ref.inverse_frequencies(shape).float(), inverse)
    angle = torch.outer(torch.arange(length).float(), inverse)
    angle = torch.cat([angle, angle], dim=-1)[:, None, None, :]
    x = random(length, 1, 3, dim)
    theirs = rope_utils._apply_rotary_pos_emb_bshd(
        x, angle, mla_rotary_interleaved=interleaved, mscale=factor
    )
    ours = ref.rotate(x, *ref.rope_tables(length, shape), interleaved=interleaved)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_yarn_numbers_of_v32() -> None:
    """V3.2's published settings: correction range 10 .. 23, mscale 1.3689, scale^2 / sqrt(192)."""
    shape = dataclasses.replace(V32_ROPE, yarn={**YARN, "mscale_all_dim": 1.0})
    plain = ref.inverse_frequencies(dataclasses.replace(shape, yarn=None))
    ratio = ref.inverse_frequencies(shape) / plain
    expected = [1.0 - min(max((i - 10) / 13, 0.0), 1.0) * (1.0 - 1.0 / 40.0) for i in range(32)]
    assert ratio.tolist() == pytest.approx(expected)
    assert shape.rope_concentration == 1.0
    assert shape.softmax_scale == pytest.approx((0.1 * math.log(40.0) + 1.0) ** 2 / 192**0.5)


# ----------------------------------------------------------------------- sparse_attention


@pytest.mark.parametrize("dv", [10, 6])
def test_sparse_attention_with_all_keys_is_sdpa(dv: int) -> None:
    """All keys in any order: torch's SDPA, torch's lse, and gradients to q and kv."""
    q, kv = random(7, 3, 10).requires_grad_(), random(9, 10, seed=1).requires_grad_()
    ids = torch.stack([torch.randperm(9) for _ in range(7)]).int()
    out, lse, p_sum = ref.sparse_attention(q, kv, ids, dv, 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), kv.expand(3, 9, 10), kv[:, :dv].expand(3, 9, dv), scale=0.3
    ).transpose(0, 1)
    torch.testing.assert_close(out, expected, **EXACT)
    logits = 0.3 * torch.einsum("thd,sd->ths", q, kv)
    torch.testing.assert_close(lse, torch.logsumexp(logits, dim=-1), **EXACT)
    torch.testing.assert_close(p_sum.sum(dim=1), torch.full((7,), 3.0).double(), **EXACT)
    weight = random(7, 3, dv, seed=2)
    ours = torch.autograd.grad((out * weight).sum(), (q, kv))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, kv))
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, their, **EXACT)


def test_sparse_attention_ignores_invalid_ids() -> None:
    """-1, ids past the end and slots past topk_length: no weight, no gradient, no p_sum."""
    q, kv = random(4, 2, 6).requires_grad_(), random(5, 6, seed=1).requires_grad_()
    ids = torch.tensor([[3, -1, 1, 5], [2, 4, 0, 1], [-1, 9, -7, 5], [0, 1, 2, 3]])
    length = torch.tensor([4, 2, 4, 0])
    out, lse, p_sum = ref.sparse_attention(q, kv, ids, 4, 0.5, topk_length=length)
    compact, compact_lse, _ = ref.sparse_attention(
        q[:2], kv, torch.tensor([[3, 1], [2, 4]]), 4, 0.5
    )
    torch.testing.assert_close(out[:2], compact, **EXACT)
    torch.testing.assert_close(lse[:2], compact_lse, **EXACT)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert torch.equal(lse[2:], torch.full_like(lse[2:], -math.inf))
    used = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0] * 4, [0] * 4], dtype=torch.bool)
    assert torch.equal(p_sum != 0.0, used)
    dq, dkv = torch.autograd.grad(out.square().sum(), (q, kv))
    assert not dq[2:].any() and not dkv[0].any()
    assert torch.isfinite(dq).all() and torch.isfinite(dkv).all()


def test_sink_identity_and_gradcheck() -> None:
    """Sink: out = out_keys * sigmoid(lse - sink), lse without the sink, p_sum with it."""
    q, kv, sink = random(3, 2, 5), random(6, 5, seed=1), random(2, seed=2)
    ids = torch.tensor([[0, 4, 5], [2, -1, 3], [-1, -1, -1]])
    keys_only, lse_keys, p_keys = ref.sparse_attention(q, kv, ids, 3, 0.7)
    out, lse, p_sum = ref.sparse_attention(q, kv, ids, 3, 0.7, sink=sink)
    torch.testing.assert_close(out, keys_only * torch.sigmoid(lse - sink)[..., None], **EXACT)
    assert torch.equal(lse, lse_keys)
    assert (p_sum <= p_keys).all()
    mass = torch.sigmoid(lse - sink).sum(dim=1)
    torch.testing.assert_close(p_sum.sum(dim=1), mass, **EXACT)
    leaves = [value.clone().requires_grad_() for value in (q, kv, sink)]

    def run(*values: Tensor) -> Tensor:
        return ref.sparse_attention(values[0], values[1], ids, 3, 0.7, sink=values[2])[0]

    assert torch.autograd.gradcheck(run, leaves)
    absent = torch.full((2,), -math.inf, dtype=torch.float64)
    torch.testing.assert_close(
        ref.sparse_attention(q, kv, ids, 3, 0.7, sink=absent)[0], keys_only, **EXACT
    )
