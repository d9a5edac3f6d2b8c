"""Layers of DeepSeek-V3.2 and V4-Flash with 128k to 1024k tokens: the last tokens against float64.

No later token attends to these, so their input gradient needs no other query.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from benchmarks.megatron_layer import Layer, LayerSpec
from tests.helpers import relative_error
from tests.host import start
from tests.reference import csa_float64, dsa_float64
from tests.reference.csa_float64 import COMPRESSOR, INDEXER, hadamard, rms_norm, rope_last
from tests.reference.shapes import csa_shape, dsa_shape

pytestmark = pytest.mark.gpu

LAST = 8
CHUNK = 8192
#: Of bf16; wrong addresses give errors above 0.5.
TOLERANCE = 2e-2
HEADS = 128
#: At least the last tokens and their window, in whole groups.
TAIL = 256
#: Tokens -> recomputation and GiB of GPU memory.
CASES = {131072: ("nothing", 70), 262144: ("nothing", 125), 524288: ("latent_output", 135)}


@dataclass
class LastSelection:
    """Receives selections, keeps the last tokens'."""

    indices: torch.Tensor | None = None

    def put(self, _core, indices, _keys):
        self.indices = indices[-LAST:].long()


@dataclass
class Keys:
    """Float64 latents, rotated keys and index keys of all tokens."""

    latents: torch.Tensor
    rotated: torch.Tensor
    index: torch.Tensor


def keys_of(weights, x, shape) -> Keys:
    parts = []
    with torch.no_grad():
        for first in range(0, len(x), CHUNK):
            chunk = x[first : first + CHUNK].double()
            qr, _, _, *keys = dsa_float64.mla_inputs(weights, chunk, shape, first)
            _, index, _ = dsa_float64.indexer_inputs(weights, chunk, qr, shape, first)
            parts.append((*keys, index))
    return Keys(*map(torch.cat, zip(*parts, strict=True)))


def share_of_best(weights, x, qr, keys, selected, shape, first):
    """Return the share of the best float64 scores' keys that are selected."""
    q, last_keys, w = dsa_float64.indexer_inputs(weights, x, qr, shape, first)
    index = torch.cat([keys.index, last_keys])
    shares = []
    for token in range(len(x)):
        visible = index[: first + token + 1]
        part = slice(token, token + 1)
        scores = dsa_float64.indexer_scores(q[part], visible, w[part])[0]
        best = scores.topk(selected.shape[1]).indices
        shares.append(torch.isin(best, selected[token]).double().mean())
    return torch.stack(shares).mean().item()


def attend(weights, x, keys, selected, shape, first):
    """Return output and query latents of the last tokens ``x``, leaves with a gradient."""
    qr, q_nope, q_pe, latents, rotated = dsa_float64.mla_inputs(weights, x, shape, first)
    latents = torch.cat([keys.latents, latents])
    rotated = torch.cat([keys.rotated, rotated])
    heads = []
    for token, listed in enumerate(selected):
        up = latents[listed] @ weights["linear_kv_up_proj.weight"].T
        k, v = up.view(-1, shape.heads, shape.nope + shape.v).split([shape.nope, shape.v], -1)
        scores = torch.einsum("hd,shd->hs", q_nope[token], k) + q_pe[token] @ rotated[listed].T
        probabilities = torch.softmax(scores * shape.softmax_scale, 1)
        heads.append(torch.einsum("hs,shd->hd", probabilities, v).flatten())
    return torch.stack(heads) @ weights["linear_proj.weight"].T, qr


class Step:
    """A layer's step: output and input gradient of the last tokens, and their selection."""

    def __init__(self, spec: LayerSpec, gib: int):
        device = start()
        if torch.cuda.get_device_properties(device).total_memory < gib * 2**30:
            pytest.skip(f"needs {gib} GiB")
        layer, selection = Layer(spec, device), LastSelection()
        self.layer = layer
        layer.module.core_attention.selection_sink = selection
        self.out = layer.step()[-LAST:, 0].double()
        assert all(bool(p.grad.isfinite().all()) for p in layer.module.parameters())
        assert bool(layer.x.grad.isfinite().all())
        self.gradient = layer.x.grad[-LAST:, 0].double()
        layer.x.grad = None
        torch.cuda.empty_cache()
        self.selected = selection.indices
        self.first = spec.tokens - LAST
        self.weights = {name: p.detach().double() for name, p in layer.module.named_parameters()}
        self.x = layer.x.detach()[:, 0]

    def last(self) -> torch.Tensor:
        """Return the last tokens, a leaf with a gradient."""
        return self.x[self.first :].double().requires_grad_()

    def compare(self, x, expected, share: float | None) -> None:
        expected.backward(self.layer.gradient[self.first :, 0].double())
        pairs = {"out": (self.out, expected), "dx": (self.gradient, x.grad)}
        errors = {name: relative_error(*pair) for name, pair in pairs.items()}
        print(f"{len(self.x)} tokens: errors {errors}, share of the best keys {share}")
        assert share is None or share > 0.98
        assert max(errors.values()) < TOLERANCE


@pytest.mark.parametrize("length", CASES)
def test_last_tokens(length):
    recompute, gib = CASES[length]
    spec = LayerSpec("v3.2", length, heads=HEADS, sequence_length=length, recompute=recompute)
    step = Step(spec, gib)
    shape, weights, first = dsa_shape(step.layer.config), step.weights, step.first
    keys, x = keys_of(weights, step.x[:first], shape), step.last()
    expected, qr = attend(weights, x, keys, step.selected, shape, first)
    share = share_of_best(weights, x, qr, keys, step.selected, shape, first)
    step.compare(x, expected, share)


def compressed(weights, prefix, x, shape, first, interleaved=True):
    """Return the keys of whole groups of tokens; with overlap and ``first``, not of the first."""
    ape, norm = weights[prefix + "ape"], weights[prefix + "norm.weight"]
    m, d = shape.ratio, len(norm)
    u, s = (x @ weights[f"{prefix}linear_{part}.weight"].T for part in ("wkv", "wgate"))
    u, s = u.unflatten(0, (-1, m)), s.unflatten(0, (-1, m)) + ape
    if shape.overlap:
        before_u, before_s = u[:-1, :, :d], s[:-1, :, :d]
        u, s = u[..., d:], s[..., d:]
        if first:
            u, s, first = u[1:], s[1:], first + m
        else:  # the first group has no group before it
            before_u = torch.cat([torch.zeros_like(u[:1]), before_u])
            before_s = torch.cat([torch.full_like(s[:1], -torch.inf), before_s])
        u, s = torch.cat([u, before_u], 1), torch.cat([s, before_s], 1)
    keys = rms_norm((torch.softmax(s, 1) * u).sum(1), norm, shape.eps)
    positions = first + m * torch.arange(len(keys), device=x.device)
    return rope_last(keys, positions[:, None], shape, interleaved=interleaved)


def compressed_of_all(step: Step, prefix, x, shape, interleaved=True):
    """Return the keys of all groups, differentiable in the last tokens ``x``."""
    end, parts = len(step.x) - TAIL, []
    lead = shape.ratio if shape.overlap else 0
    with torch.no_grad():
        for first in range(0, end, CHUNK):
            begin = max(0, first - lead)
            chunk = step.x[begin : min(end, first + CHUNK)].double()
            parts.append(compressed(step.weights, prefix, chunk, shape, begin, interleaved))
    tail = torch.cat([step.x[end - lead : step.first].double(), x])
    parts.append(compressed(step.weights, prefix, tail, shape, end - lead, interleaved))
    return torch.cat(parts)


def share_of_best_groups(step: Step, x, qr, shape):
    """Return the share of the best float64 scores' groups that are selected."""
    pairs, w = shape.index_rope_interleaved, step.weights
    with torch.no_grad():
        keys = compressed_of_all(step, INDEXER + "compressor.", x, shape, pairs)
        q = (qr @ w[INDEXER + "linear_wq_b.weight"].T).view(LAST, shape.index_heads, -1)
        weights, shares = x @ w[INDEXER + "linear_weights_proj.weight"].T, []
        for token in range(LAST):
            query = rope_last(q[token], step.first + token, shape, interleaved=pairs)
            if shape.index_hadamard:
                query = hadamard(query)
            seen = keys[: (step.first + token + 1) // shape.ratio]
            dots = torch.relu(query @ (hadamard(seen) if shape.index_hadamard else seen).T)
            best = (weights[token] @ dots).topk(step.selected.shape[1]).indices
            shares.append(torch.isin(best, step.selected[token]).double().mean())
    return torch.stack(shares).mean().item()


def attend_csa(step: Step, x, shape):
    """Return output and query latents of the last tokens ``x``."""
    w, start_of_tail = step.weights, len(step.x) - TAIL
    tail = torch.cat([step.x[start_of_tail : step.first].double(), x])
    qr = rms_norm(x @ w["linear_q_down_proj.weight"].T, w["q_layernorm.weight"], shape.eps)
    q = (qr @ w["linear_q_up_proj.weight"].T).view(LAST, shape.heads, shape.head_dim)
    q = rms_norm(q, None, shape.eps)
    kv = rms_norm(tail @ w["linear_kv_proj.weight"].T, w["kv_layernorm.weight"], shape.eps)
    positions = start_of_tail + torch.arange(TAIL, device=x.device)
    kv, outs = rope_last(kv, positions[:, None], shape), []
    groups = compressed_of_all(step, COMPRESSOR, x, shape)
    sink = w["core_attention.attn_sink"][:, None]
    for token in range(LAST):
        position, end = step.first + token, TAIL - LAST + token + 1
        listed = slice((position + 1) // shape.ratio)
        keys = groups[listed if step.selected is None else step.selected[token]]
        keys = torch.cat([keys, kv[end - shape.window : end]])
        logits = rope_last(q[token], position, shape) @ keys.T * shape.head_dim**-0.5
        heads = torch.softmax(torch.cat([logits, sink], 1), 1)[:, :-1] @ keys
        heads = rope_last(heads, position, shape, inverse=True)
        outs.append(csa_float64.output_projection(w, heads, shape))
    return torch.stack(outs), qr.detach()


@pytest.mark.parametrize("ratio", [4, 128])
def test_last_tokens_of_v4(ratio):
    length = 2**20
    spec = LayerSpec("v4-flash", length, ratio, sequence_length=length, recompute="queries")
    step = Step(spec, 120)
    shape, x = replace(csa_shape(step.layer.config), ratio=ratio), step.last()
    expected, qr = attend_csa(step, x, shape)
    share = None if step.selected is None else share_of_best_groups(step, x, qr, shape)
    step.compare(x, expected, share)
