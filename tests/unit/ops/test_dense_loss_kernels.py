"""The Triton kernels of the dense indexer loss: interpreted, compiled, and on a GPU."""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, LatentKeys
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_loss.spec import DENSE_LOSS, DenseLossInputs
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.testing.indexer_loss import expected_dense_loss
from tests.cases.dense_loss import (
    MODULE,
    Shape,
    check,
    computed,
    make,
    with_lse,
    with_nan,
    with_others,
    without_relu,
)
from tests.cases.triton_kernels import Recorder, assembly, interpret, prepare_interpreter

KERNELS = {
    "teacher": ("head_sums", "head_lse"),
    "student": ("student_lse", "student_loss"),
    "gradients": ("query_gradient", "key_gradient", "finish_rows"),
}
#: Bytes of shared memory that a thread block can have.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def test_triton_interpreted():
    """All kernels in fp32, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter: tiles of 64 x 64 pairs, programs of 32 x 32."""
    triton_dense = importlib.import_module(MODULE)
    prepare_interpreter()
    names = [name for names in KERNELS.values() for name in names]
    triton_dense.LAUNCHES = {0: dict.fromkeys(names, triton_dense.Launch(32, 32, 1))}
    triton_dense.BLOCK, triton_dense.LONGEST_EDGE, triton_dense.FEWEST_HEADS = 32, 64, 2
    cpu, small = torch.device("cpu"), Shape(dim=12, own=8, rank=6)
    lengths = torch.tensor([0, 3, 20, 20, 41, 73], dtype=torch.int32)
    apart = torch.tensor([0, 8, 32, 32, 56, 90], dtype=torch.int32)
    uneven = packed_layout(lengths, 96, 34, apart)
    group = _group_of_one()
    for layout, shape, keys, change in (
        (bshd_layout(90, 1, cpu), Shape(), "latent", with_others),
        (bshd_layout(41, 2, cpu), small, "latent", with_lse),
        (uneven, small, "all", lambda inputs: dataclasses.replace(inputs, head_group=group)),
        (uneven, Shape(), "latent", with_nan),
        (bshd_layout(41, 2, cpu), Shape(), "expanded", with_lse),
        (uneven, small, "expanded", with_nan),
        (compressed_keys(uneven, 4, True).layout, Shape(), "one", with_others),
        (compressed_keys(bshd_layout(96, 1, cpu), 4, True).layout, small, "one", without_relu),
    ):
        inputs = make(layout, shape, torch.float32, keys)
        want = expected_dense_loss(change(inputs) if change is not with_nan else inputs)
        inputs = change(inputs)
        # Two heads are expanded at a time.
        inputs = dataclasses.replace(inputs, workspace_bytes=2**15)
        assert triton_dense.tile_shape(inputs)[1] < 3
        got = computed(inputs, triton_dense.dense)
        check(got, want, 1e-5, 1e-5)
        without = triton_dense.dense(dataclasses.replace(inputs, want_gradients=False))
        assert torch.equal(without.value, got[0]) and without.gradients is None


def _group_of_one():
    """A process group whose sums change nothing, but need whole teachers."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return torch.distributed.group.WORLD


def recorded(monkeypatch, triton_dense):
    """Replace all kernels by recorders."""
    found = {}
    for module, names in KERNELS.items():
        module = getattr(triton_dense, module)
        for name in names:
            found[name] = Recorder(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    return found


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("keys", ["latent", "one"])
def test_compiles_without_a_gpu(monkeypatch, capability, keys):
    """Warpgroup instructions on Hopper; operands by asynchronous copies; nothing too large."""
    triton_dense = pytest.importorskip(MODULE)
    shared = max(x for x in triton_dense.LAUNCHES if x <= SHARED[capability])
    monkeypatch.setattr(triton_dense, "launches", lambda device: triton_dense.LAUNCHES[shared])
    recorders = recorded(monkeypatch, triton_dense)
    shape = Shape(64, 128, 4, 192, 128, 512) if keys == "latent" else Shape(64, 128, 4, 576)
    layout = bshd_layout(256, 1, torch.device("cpu"))
    triton_dense.dense(make(layout, shape, torch.bfloat16, keys))
    for name, recorder in recorders.items():
        compiled = assembly(recorder.kernel, *recorder.launches[0], capability)
        ptx = compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED[capability], name
        if name == "finish_rows":
            continue
        assert "cp.async" in ptx, name
        if capability == 90:
            assert "wgmma.mma_async" in ptx and "mma.sync.aligned.m16" not in ptx, name


def test_it_is_the_first_choice():
    pytest.importorskip("triton")
    ours = next(c for c in DENSE_LOSS.candidates if c.name == "triton")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "dtype": torch.bfloat16}
    call = OpCall(device="cuda", capability=(9, 0), **shape)
    for changes in ({}, {"heads": 1}, {"relu": False}, {"packed": True}, {"deterministic": True}):
        assert ours.reason(dataclasses.replace(call, **changes)) is None, changes
    for changes, reason in (
        ({"dtype": torch.float16}, "needs bf16"),
        ({"heads": 65}, "takes 1 to 64 heads"),
        ({"qk_dim": 64}, "needs dims"),
        ({"device": "cpu", "capability": None}, "wrong GPU"),
    ):
        assert reason in ours.reason(dataclasses.replace(call, **changes)), changes


@pytest.mark.parametrize(("mib", "least"), [(256, 2048), (64, 512), (8, 128)])
def test_tiles_fit_the_workspace(mib, least):
    """With V3.2's shapes a key is expanded once for many query rows, if memory allows."""
    triton_dense = pytest.importorskip(MODULE)

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    inputs = IndexerInputs(empty(8192, 64, 128), empty(8192, 128), empty(8192, 64))
    keys = LatentKeys(empty(8192, 576), empty(128, 128, 512))
    layout = bshd_layout(8192, 1, torch.device("cpu"))
    q = empty(8192, 128, 192)
    arguments = DenseLossInputs(inputs, layout, q, keys, 1.0, None, mib * 2**20)
    (rows, width), heads = triton_dense.tile_shape(arguments)
    assert rows >= least and width >= least // 4
    assert triton_dense.tile_bytes(arguments, heads)(rows, width) <= mib * 2**20


if __name__ == "__main__":
    main()
