"""Bits of visible keys: torch and Triton against masks; layers of a batch share them."""

import pytest
import torch

from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.masked_attention import api
from megatron_dsa.ops.masked_attention import torch as unfused
from megatron_dsa.ops.masked_attention.spec import VisibleBitsInputs, pack, unpack
from megatron_dsa.testing.cases import visible_keys
from tests.cases.triton_kernels import assembly, interpret, prepare_interpreter, recorded

KERNEL = "megatron_dsa.ops.masked_attention.triton.bits"
SIZES = (1, 63, 64, 127, 128, 129, 300, 777)


def packed(device):
    """Uneven sequences with padding, and a padded tail: queries that see nothing."""
    real = torch.tensor([0, 5, 5, 170, 171, 270], device=device, dtype=torch.int32)
    apart = torch.tensor([0, 8, 16, 184, 192, 301], device=device, dtype=torch.int32)
    return packed_layout(real, 333, 300, apart)


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(300, 1, device),
    "batch of 3": lambda device: bshd_layout(57, 3, device),
    "packed": packed,
}


def ranges(queries, keys, shuffled, seed=0):
    """Return random ranges of slots; every fifth query sees nothing, every seventh all."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(0, keys + 1, (queries, 2), generator=generator, dtype=torch.int32)
    start, end = both.sort(1).values.unbind(1)
    start, end = start.clone(), end.clone()
    start[2::5] = end[2::5]
    start[3::7], end[3::7] = 0, keys
    slots = torch.randperm(keys, generator=generator).int() if shuffled else None
    return VisibleBitsInputs(start, end, slots, keys, 20_000)


def check(build, inputs):
    slots = range(inputs.num_keys) if inputs.slots is None else inputs.slots.tolist()
    mask = torch.zeros(len(inputs.start), inputs.num_keys, dtype=torch.bool)
    bounds = zip(inputs.start.tolist(), inputs.end.tolist(), strict=True)
    for query, (first, last) in enumerate(bounds):
        for key, slot in enumerate(slots):
            mask[query, key] = first <= slot < last
    bits = build(inputs)
    assert bits.dtype == torch.int32 and torch.equal(bits, pack(mask))


def check_all(build):
    """Ragged sizes, keys in another order than slots, no query, no key."""
    for keys in SIZES:
        for shuffled in (False, True):
            check(build, ranges(11, keys, shuffled))
    for shuffled in (False, True):
        check(build, ranges(5, 5000, shuffled))  # several programs of a query
    check(build, ranges(0, 300, False))
    nothing = torch.zeros(4, dtype=torch.int32)
    check(build, VisibleBitsInputs(nothing, nothing, None, 0, 20_000))
    strided = ranges(20, 300, False)
    check(build, VisibleBitsInputs(strided.start[::2], strided.end[::2], None, 300, 20_000))


def test_unfused_bits():
    check_all(unfused.visible_bits)


def test_triton_interpreted():
    """The kernel, see :func:`main`."""
    interpret(__file__)


def main():
    from megatron_dsa.ops.masked_attention.triton.bits import visible_bits

    prepare_interpreter()
    check_all(visible_bits)


def test_compiles_once_without_a_gpu(monkeypatch):
    """For Hopper and Blackwell; the same code for other sizes."""
    kernel = pytest.importorskip(KERNEL)
    (recorder,) = recorded(monkeypatch, kernel, ["_visible_bits"])
    for shuffled in (False, True):
        recorder.launches.clear()
        for queries, keys in ((1, 1), (256, 256), (37, 301)):
            kernel.visible_bits(ranges(queries, keys, shuffled))
        for capability in (80, 90, 100):
            compiled = [
                assembly(recorder.kernel, args, kwargs, capability)
                for args, kwargs in recorder.launches
            ]
            assert len({one.hash for one in compiled}) == 1
            assert all(".local" not in one.asm["ptx"] for one in compiled)


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_of_layouts(name):
    """In the order of key rows; also with a workspace for one query at a time."""
    for workspace in (1, 2**20):
        layout = LAYOUTS[name](torch.device("cpu"))
        layout.derived.clear()  # unpacked ones are cached
        bits = api.visible_bits(layout, Policy(workspace_bytes=workspace))
        assert torch.equal(unpack(bits, layout.num_keys), visible_keys(layout))
        if layout.real is not None:
            assert not bits[~layout.real].any()


def test_layers_share_the_bits(monkeypatch):
    """Up to a number of keys; also those that evaluation computed first."""
    layout = packed(torch.device("cpu"))
    reset_report()
    with torch.inference_mode():
        first = api.visible_bits(layout)
    assert not first.is_inference()
    assert api.visible_bits(layout) is first
    assert report()["visible_bits"] == {"torch": 1}
    monkeypatch.setattr(api, "MOST_KEPT", layout.num_keys - 1)
    again = api.visible_bits(packed(torch.device("cpu")))
    assert torch.equal(again, first)
    other = packed(torch.device("cpu"))
    api.visible_bits(other)
    assert "visible bits" not in other.derived


@pytest.mark.gpu
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8192, 8192), (1000, 9001), (3, 40_000)])
def test_triton_on_the_gpu(queries, keys, shuffled):
    """Equal to torch's, without waiting for the device, whatever the memory held before."""
    kernel = pytest.importorskip(KERNEL)
    given = ranges(queries, keys, shuffled)
    slots = None if given.slots is None else given.slots.cuda()
    given = VisibleBitsInputs(given.start.cuda(), given.end.cuda(), slots, keys, 2**28)
    expected = unfused.visible_bits(given)
    kernel.visible_bits(given)  # compiles
    poison = torch.full((2**27,), -1, dtype=torch.int32, device="cuda")
    del poison
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = kernel.visible_bits(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_synchronisation(name):
    """Also the slots of interleaved batches are computed on the device."""
    device = torch.device("cuda")
    api.visible_bits(LAYOUTS[name](device))
    layout = LAYOUTS[name](device)
    layout.derived.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        api.visible_bits(layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
