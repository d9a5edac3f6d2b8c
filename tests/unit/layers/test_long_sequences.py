"""Layers of DeepSeek-V3.2 with 128k to 512k tokens: the last tokens against float64.

No later token attends to these, so their input gradient needs no other query.
"""

from dataclasses import dataclass

import pytest
import torch

from benchmarks.megatron_layer import Layer, LayerSpec
from tests.helpers import relative_error
from tests.host import start
from tests.reference import dsa_float64
from tests.reference.shapes import dsa_shape

pytestmark = pytest.mark.gpu

LAST = 8
CHUNK = 8192
#: Of bf16; wrong addresses give errors above 0.5.
TOLERANCE = 2e-2
HEADS = 128
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


@pytest.mark.parametrize("length", CASES)
def test_last_tokens(length):
    recompute, gib = CASES[length]
    device = start()
    if torch.cuda.get_device_properties(device).total_memory < gib * 2**30:
        pytest.skip(f"needs {gib} GiB")
    spec = LayerSpec("v3.2", length, heads=HEADS, sequence_length=length, recompute=recompute)
    layer, selection = Layer(spec, device), LastSelection()
    layer.module.core_attention.selection_sink = selection
    out = layer.step()[-LAST:, 0].double()
    assert all(bool(p.grad.isfinite().all()) for p in layer.module.parameters())
    assert bool(layer.x.grad.isfinite().all())
    gradient = layer.x.grad[-LAST:, 0].double()
    layer.x.grad = None
    torch.cuda.empty_cache()

    shape, first = dsa_shape(layer.config), length - LAST
    weights = {name: p.detach().double() for name, p in layer.module.named_parameters()}
    keys = keys_of(weights, layer.x.detach()[:first, 0], shape)
    x = layer.x.detach()[first:, 0].double().requires_grad_()
    expected, qr = attend(weights, x, keys, selection.indices, shape, first)
    share = share_of_best(weights, x, qr, keys, selection.indices, shape, first)
    expected.backward(layer.gradient[first:, 0].double())
    errors = {"out": relative_error(out, expected), "dx": relative_error(gradient, x.grad)}
    print(f"{length} tokens: errors {errors}, share of the best keys {share:.4f}")
    assert share > 0.98
    assert max(errors.values()) < TOLERANCE
