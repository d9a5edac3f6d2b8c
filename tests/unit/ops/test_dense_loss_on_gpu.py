"""The Triton kernels of the dense indexer loss on a GPU: errors, NaN, repeats, memory.

Numbers in docstrings are rows of the list of bugs that other systems shipped.
"""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.dispatch import describe_call
from megatron_dsa.dsa_kernels import IndexerInputs, dense_indexer_loss
from megatron_dsa.ops.indexer_loss.declaration import DENSE_LOSS
from megatron_dsa.ops.indexer_loss.inputs import DenseLossInputs
from megatron_dsa.sequence.compressed import compressed_keys
from megatron_dsa.sequence.layout import bshd_layout, packed_layout
from megatron_dsa.tools.verify.indexer_loss import expected_dense_loss
from tests.cases.dense_loss import (
    MODULE,
    SCALE,
    Shape,
    check,
    computed,
    make,
    with_lse,
    with_nan,
    with_others,
    without_relu,
)
from tests.helpers import peak_bytes, relative_error


def packed(device, padded=True):
    """Sequences of uneven lengths with padding, and a padded tail: rows that see nothing."""
    real = torch.tensor([0, 5, 5, 170, 171, 270, 540], device=device, dtype=torch.int32)
    apart = torch.tensor([0, 8, 16, 184, 192, 301, 600], device=device, dtype=torch.int32)
    return packed_layout(real, 650, 300, apart if padded else None)


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(333, 1, device),
    "batch of 3": lambda device: bshd_layout(150, 3, device),
    "packed": packed,
    "compressed": lambda device: compressed_keys(bshd_layout(700, 1, device), 4, True).layout,
    "compressed, packed": lambda device: compressed_keys(packed(device), 4, True).layout,
}


V32 = Shape(64, 128, 16, 192, 128, 512)
FEW = Shape(5, 128, 3, 100, 36, 40)
ABSORBED = Shape(32, 128, 16, 576)
CASES = {
    "latent": (V32, "latent"),
    "absorbed": (ABSORBED, "one"),
    "every head": (dataclasses.replace(V32, dim=64), "all"),
    "odd dims": (FEW, "latent"),
}


@pytest.fixture
def ours():
    """Skips where the kernels cannot run."""
    (candidate,) = (c for c in DENSE_LOSS.candidates if c.name == "triton")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0}
    reason = candidate.reason(describe_call("cuda", dtype=torch.bfloat16, **shape))
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_against_float64(ours, case, name):
    """1, 4, 5, 7, 8, 10: in one tile, and in the smallest tiles."""
    shape, keys = CASES[case]
    inputs = make(LAYOUTS[name](ours), shape, torch.bfloat16, keys)
    want = expected_dense_loss(inputs)
    for workspace in (2**28, 1):
        part = dataclasses.replace(inputs, workspace_bytes=workspace)
        check(computed(part), want, 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [with_others, with_lse, without_relu])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", ["latent", "absorbed"])
def test_options(ours, case, name, change):
    shape, keys = CASES[case]
    inputs = change(make(LAYOUTS[name](ours), shape, torch.bfloat16, keys))
    want, got = expected_dense_loss(dataclasses.replace(inputs, lse=None)), computed(inputs)
    check(got, want, 1e-3, 1e-2)
    with torch.no_grad():
        value = dense_indexer_loss(
            inputs.indexer, inputs.q, inputs.k, inputs.layout, softmax_scale=SCALE,
            other_lse=inputs.other_lse, lse=inputs.lse,
        )  # fmt: skip
    assert torch.equal(value, got[0])


@pytest.mark.gpu
def test_all_heads_of_the_model(ours):
    """128 heads from latents, 64 index heads, several tiles each way."""
    shape = dataclasses.replace(V32, heads=128)
    inputs = make(bshd_layout(1100, 1, ours), shape, torch.bfloat16, "latent")
    inputs = dataclasses.replace(inputs, workspace_bytes=2**25)
    assert importlib.import_module(MODULE).tile_shape(inputs)[1] < 128
    check(computed(inputs), expected_dense_loss(inputs), 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["packed", "compressed, packed"])
@pytest.mark.parametrize("case", ["latent", "absorbed"])
def test_nan_that_nobody_sees(ours, case, name):
    """2, 3: the same bits as without it."""
    shape, keys = CASES[case]
    inputs = make(LAYOUTS[name](ours), shape, torch.bfloat16, keys)
    for got, want in zip(computed(with_nan(inputs)), computed(inputs), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_nan_that_somebody_sees(ours):
    """It shows in the loss: in a query, a latent. Those of index scores are refused."""
    inputs = make(bshd_layout(200, 1, ours), V32, torch.bfloat16, "latent")
    for tensor in (inputs.q, inputs.k.latents):
        before = tensor.detach()[100].clone()
        tensor.detach()[100] = float("nan")
        assert computed(inputs)[0].isnan()
        tensor.detach()[100] = before
    assert computed(inputs)[0].isfinite()


@pytest.mark.gpu
def test_bitwise_repeatable(ours):
    """17: 20 repeats."""
    inputs = make(packed(ours), V32, torch.bfloat16, "latent")
    first = computed(inputs)
    for _ in range(20):
        assert all(map(torch.equal, computed(inputs), first))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "index_heads", "heads", "dim"), [(2**18 + 5, 64, 1, 64), (70_000, 2, 128, 256)]
)
def test_many_rows(ours, rows, index_heads, heads, dim):
    """25: grids, elements of queries beyond 2^31; the last sequences are as they are alone."""
    length = 100
    ends = torch.arange(0, rows, length, device=ours, dtype=torch.int32)
    last = int(ends[-6])
    generator = torch.Generator(ours).manual_seed(1)

    def draw(*shape):
        out = torch.empty(*shape, device=ours, dtype=torch.bfloat16)
        return out.normal_(generator=generator)

    inputs = IndexerInputs(
        draw(rows, index_heads, 128), draw(rows, 128), draw(rows, index_heads) * 0.05
    )
    q, k = draw(rows, heads, dim), draw(rows, 1, dim)
    assert max(q.numel(), inputs.q.numel()) > 2**31
    arguments = DenseLossInputs(inputs, packed_layout(ends, rows, length), q, k, SCALE, None, 2**28)
    ours_alone = IndexerInputs(inputs.q[last:], inputs.k[last:], inputs.weights[last:])
    layout = packed_layout(ends[-6:] - last, rows - last, length)
    alone = DenseLossInputs(ours_alone, layout, q[last:], k[last:], SCALE, None, 2**28)
    got, want = computed(arguments), computed(alone)
    for x, y in zip(got[1:], want[1:], strict=True):
        assert y.abs().sum() > 0 and relative_error(x[last:], y) < 1e-3
    assert got[0].isfinite()


@pytest.mark.gpu
def test_no_host_synchronisation(ours):
    """24: packed batches included."""
    several = [
        make(layout(ours), shape, torch.bfloat16, keys)
        for layout in LAYOUTS.values()
        for shape, keys in (CASES["latent"], CASES["absorbed"])
    ]
    computed(several[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for inputs in several:
            computed(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [64, 256])
def test_temporaries_fit_the_workspace(ours, mib):
    """Above results and saved gradients there is no more than the workspace, for any length."""
    triton_dense = importlib.import_module(MODULE)
    shape = dataclasses.replace(V32, heads=128)
    for length in (3000, 5000):
        inputs = make(bshd_layout(length, 1, ours), shape, torch.bfloat16, "latent")
        inputs = dataclasses.replace(inputs, workspace_bytes=mib * 2**20)
        x, kept = inputs.indexer, []
        peak = peak_bytes(ours, lambda p=inputs, kept=kept: kept.append(triton_dense.dense(p)))
        accumulated = (x.k.numel() + x.k.shape[1] + x.weights.numel()) * 4
        saved = sum(t.numel() * t.element_size() for t in (x.q, x.k, x.weights))
        assert 0 < peak < mib * 2**20 + accumulated + saved
