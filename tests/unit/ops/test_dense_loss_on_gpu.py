"""Kernels of the dense indexer loss on a GPU, Triton's and ours: errors, NaN, repeats, memory."""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, dense_indexer_loss
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.indexer_loss.spec import DENSE_LOSS, DenseLossInputs
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.testing.indexer_loss import expected_dense_loss
from tests.cases.dense_loss import (
    HOPPER,
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
from tests.helpers import no_synchronisation, peak_bytes, relative_error


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
GLM = Shape(32, 128, 8, 256, 192, 512, 256)
WIDE = dataclasses.replace(V32, value=128)
CASES = {
    "latent": (V32, "latent", "triton"),
    "absorbed": (ABSORBED, "one", "triton"),
    "every head": (dataclasses.replace(V32, dim=64), "all", "triton"),
    "odd dims": (FEW, "latent", "triton"),
    "expanded": (WIDE, "expanded", "triton"),
    "odd dims, expanded": (FEW, "expanded", "triton"),
    "ours, latent": (V32, "latent", "tilelang"),
    "ours, expanded": (WIDE, "expanded", "tilelang"),
    "ours, every head": (V32, "all", "tilelang"),
    "ours, one key head": (V32, "one", "tilelang"),
    "ours, GLM-5's latent": (GLM, "latent", "tilelang"),
    "ours, GLM-5's expanded": (GLM, "expanded", "tilelang"),
}


@pytest.fixture
def ours():
    """Skips where the kernels cannot run."""
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "teacher_dim": 192}
    for candidate in DENSE_LOSS.candidates:
        if candidate.name in ("tilelang", "triton"):
            reason = candidate.reason(describe_call("cuda", dtype=torch.bfloat16, **shape))
            if reason is not None:
                pytest.skip(reason)
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_against_float64(ours, case, name):
    """In one tile, and in the smallest tiles."""
    shape, keys, implementation = CASES[case]
    inputs = make(LAYOUTS[name](ours), shape, torch.bfloat16, keys)
    want = expected_dense_loss(inputs)
    for workspace in (2**28, 1):
        part = dataclasses.replace(inputs, workspace_bytes=workspace)
        check(computed(part, name=implementation), want, 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [with_others, with_lse, without_relu])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", ["latent", "absorbed", "ours, latent", "ours, expanded"])
def test_options(ours, case, name, change):
    shape, keys, implementation = CASES[case]
    inputs = change(make(LAYOUTS[name](ours), shape, torch.bfloat16, keys))
    want = expected_dense_loss(dataclasses.replace(inputs, lse=None))
    got = computed(inputs, name=implementation)
    check(got, want, 1e-3, 1e-2)
    with torch.no_grad():
        value = dense_indexer_loss(
            inputs.indexer, inputs.q, inputs.k, inputs.layout, softmax_scale=SCALE,
            other_lse=inputs.other_lse, lse=inputs.lse,
            policy=Policy(named=(("dense_indexer_loss", implementation),)),
        )  # fmt: skip
    assert torch.equal(value, got[0])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "tilelang"])
def test_all_heads_of_the_model(ours, implementation):
    """128 heads from latents, 64 index heads, several tiles each way."""
    shape = dataclasses.replace(V32, heads=128)
    inputs = make(bshd_layout(1100, 1, ours), shape, torch.bfloat16, "latent")
    inputs = dataclasses.replace(inputs, workspace_bytes=2**25)
    assert importlib.import_module(MODULE).tile_shape(inputs)[1] < 128
    check(computed(inputs, name=implementation), expected_dense_loss(inputs), 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["packed", "compressed, packed"])
@pytest.mark.parametrize("case", ["latent", "absorbed", "ours, latent", "ours, expanded"])
def test_nan_that_nobody_sees(ours, case, name):
    """The same bits as without it."""
    shape, keys, implementation = CASES[case]
    inputs = make(LAYOUTS[name](ours), shape, torch.bfloat16, keys)
    both = (computed(x, name=implementation) for x in (with_nan(inputs), inputs))
    for got, want in zip(*both, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "tilelang"])
def test_nan_that_somebody_sees(ours, implementation):
    """It shows in the loss: in a query, a latent. Those of index scores are refused."""
    inputs = make(bshd_layout(200, 1, ours), V32, torch.bfloat16, "latent")
    for tensor in (inputs.q, inputs.k.latents):
        before = tensor.detach()[100].clone()
        tensor.detach()[100] = float("nan")
        assert computed(inputs, name=implementation)[0].isnan()
        tensor.detach()[100] = before
    assert computed(inputs, name=implementation)[0].isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["latent", "ours, latent", "ours, expanded"])
def test_bitwise_repeatable(ours, case):
    shape, keys, implementation = CASES[case]
    inputs = make(packed(ours), shape, torch.bfloat16, keys)
    first = computed(inputs, name=implementation)
    for _ in range(20):
        assert all(map(torch.equal, computed(inputs, name=implementation), first))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "index_heads", "heads", "dim"), [(2**18 + 5, 64, 1, 64), (70_000, 2, 128, 256)]
)
def test_many_rows(ours, rows, index_heads, heads, dim):
    """Elements of queries beyond 2^31; the last sequences are as they are alone."""
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
    several = [
        (make(layout(ours), shape, torch.bfloat16, keys), name)
        for layout in LAYOUTS.values()
        for shape, keys, name in CASES.values()
    ]
    for inputs, name in several[: len(CASES)]:
        computed(inputs, name=name)
    with no_synchronisation():
        for inputs, name in several:
            computed(inputs, name=name)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("keys", ["latent", "expanded"])
@pytest.mark.parametrize("module", [MODULE, HOPPER])
@pytest.mark.parametrize("mib", [64, 256])
def test_temporaries_fit_the_workspace(ours, mib, module, keys, batch):
    """Above results and saved gradients there is no more than the workspace, for any length."""
    run = importlib.import_module(module).dense
    shape = dataclasses.replace(WIDE, heads=128)
    for length in (3000, 5000):
        layout = bshd_layout(length // batch, batch, ours)
        inputs = make(layout, shape, torch.bfloat16, keys)
        inputs = dataclasses.replace(inputs, workspace_bytes=mib * 2**20)
        x, kept = inputs.indexer, []
        peak = peak_bytes(ours, lambda p=inputs, kept=kept: kept.append(run(p)))
        accumulated = (x.k.numel() + x.k.shape[1] + x.weights.numel()) * 4
        saved = sum(t.numel() * t.element_size() for t in (x.q, x.k, x.weights))
        assert 0 < peak < mib * 2**20 + accumulated + saved
