"""Fakes against the adapters' allocations with inert kernels."""

import dataclasses
import importlib
import sys
import types
from unittest import mock

import pytest
import torch

from megatron_dsa.extras.planner.host import host
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch.support import import_attribute
from megatron_dsa.ops.masked_attention.spec import groups
from megatron_dsa.ops.sparse_attention import flashmla
from megatron_dsa.ops.sparse_attention.meta import NoOpKernels
from megatron_dsa.ops.sparse_attention.spec import SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.sparse_attention.tilelang.kernels import TARGETS
from megatron_dsa.testing.masked_attention import MaskedDims, masked_case
from tests.cases.masked_attention import ascending_lists

HEADS = (6, 16, 24, 32, 48, 64, 96, 128)
#: Queries, keys and listed keys: dominated by lists and sums, or by the key gradient.
SHAPES = {"queries": (256, 64, 256), "keys": (16, 4096, 64)}


def sparse_inputs(heads, shape, device, sums_heads=False):
    queries, keys, width = SHAPES[shape]
    like = {"dtype": torch.bfloat16, "device": device}
    return SparseAttentionInputs(
        torch.zeros(queries, heads, 576, **like), torch.zeros(keys, 576, **like),
        torch.zeros(queries, width, dtype=torch.int32, device=device), 512, 0.1,
        None, None, 2**26, want_p_sum=sums_heads, in_order=True,
    )  # fmt: skip


def saved(given):
    """Return out, lse and dout of a call."""
    out = torch.zeros_like(given.q[..., :512]).contiguous()
    return out, torch.zeros(out.shape[:2], device=out.device), torch.zeros_like(out)


def peak(run, given, *more):
    tracker = MemoryTracker()
    padded = () if given.padded_q is None else (given.padded_q,)
    tracker.ignore(given.q, given.kv, given.indices, *padded, *more)
    with tracker:
        result = run(given, *more)
    assert result is not None
    return tracker.peak


def planned(capability, operation, name, given, *more):
    (candidate,) = (c for c in OPERATIONS[operation].candidates if c.name == name)
    meta = import_attribute(OPERATIONS[operation].fake)
    with host(capability):
        return peak(lambda *all: meta(candidate, *all), given, *more)


class FirstPlaces(NoOpKernels):
    """Unions in which every key has the first slot."""

    def unions(self, *arguments):
        return lambda *tensors: tensors[5].zero_()


@pytest.fixture
def kernels():
    """Our kernels for a compute capability, inert."""
    pytest.importorskip("tilelang", reason="tilelang is not installed")

    def of(capability):
        target = TARGETS[capability]
        return FirstPlaces(target, None if target == "sm_90a" else target)

    return of


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fake_lies_beside_the_implementations(name):
    operation = OPERATIONS[name]
    assert callable(import_attribute(operation.fake))
    folder = operation.fake.partition(":")[0].rpartition(".")[0]
    for candidate in operation.candidates:
        assert candidate.kernel.startswith(f"{folder}.")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("capability", TARGETS)
def test_our_sparse_attention(capability, heads, shape, kernels):
    silent = kernels(capability)
    # One launch on a GPU without memory; the CPU would reorder in torch.
    silent_order = mock.patch.object(tilelang_kernels, "to_callers_lists", lambda *_: None)
    for sums_heads in (False, True):
        given, meta = (
            sparse_inputs(heads, shape, device, sums_heads) for device in ("cpu", "meta")
        )
        for operation, run, more in (
            ("sparse_attention_forward", tilelang_kernels.forward, lambda _: ()),
            ("sparse_attention_backward", tilelang_kernels.backward, saved),
        ):
            with silent_order:
                real = peak(lambda *all, run=run: run(*all, kernels=silent), given, *more(given))
            counted = planned(capability, operation, "tilelang", meta, *more(meta))
            assert counted == pytest.approx(real, rel=0.001), (operation, sums_heads)


def test_lists_in_parts_stay_within_the_workspace(kernels):
    silent, budget = kernels((9, 0)), 2**17
    given = dataclasses.replace(sparse_inputs(16, "queries", "cpu"), workspace_bytes=budget)

    def run(given):
        lists = tilelang_kernels.key_lists(given, 4, kernels=silent)
        return [part for part, _lists, _places in lists]

    rows = [row for part in run(given) for row in range(part.start, part.stop)]
    assert rows == list(range(256)) and len(run(given)) > 2
    assert 0.8 * budget < peak(run, given) < 1.05 * budget


@pytest.mark.parametrize("width", [100, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_flashmla(heads, width, monkeypatch):
    def silent(q, _kv, _indices, _scale, d_v, **_settings):
        out, lse = q.new_empty(*q.shape[:2], d_v), q.new_empty(q.shape[:2], dtype=torch.float32)
        return out, None, lse

    module = types.ModuleType("flash_mla")
    module.flash_mla_sparse_fwd = silent
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setitem(SHAPES, "this", (64, 32, width))
    given, meta = (sparse_inputs(heads, "this", device) for device in ("cpu", "meta"))
    for padded in (False, True):
        if padded:
            given, meta = (_in_padding(x) for x in (given, meta))
        real = peak(flashmla.forward, given)
        counted = planned((9, 0), "sparse_attention_forward", "flashmla", meta)
        assert counted == pytest.approx(real, rel=0.01)


def _in_padding(inputs):
    """Return the same with q in a tensor of as many heads as FlashMLA requires."""
    heads = inputs.q.shape[1]
    padded = inputs.q.new_zeros(len(inputs.q), 64 if heads <= 64 else 128, 576)
    return dataclasses.replace(inputs, q=padded[:, :heads], padded_q=padded)


def test_our_masked_attention_keeps_no_bits_along_queries(monkeypatch):
    """They are as large as the bits, and unused by the loss after the backward."""
    for package in ("tilelang", "triton"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    launch = importlib.import_module("megatron_dsa.ops.masked_attention.tilelang.launch")
    silent = types.SimpleNamespace(compiled=lambda *_dims: lambda *_tensors: None)
    for program in ("backward_program", "value_program", "probabilities_program"):
        monkeypatch.setattr(launch, program, silent)
    processors = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: processors)
    monkeypatch.setattr(launch, "tiles_for", lambda *_: _empty_tiles(launch.Tiles, 1000, 4000))
    monkeypatch.setattr(launch, "numbers", lambda lse, *_: lse.new_zeros(lse.shape[1], 2, 1024))
    monkeypatch.setattr(launch, "round_gradient", lambda *_: None)
    dims = MaskedDims(heads=1, nope=128, rope=64, v=128)
    lists = ascending_lists(1000, 4000, 9)
    inputs = masked_case(dims, lists, torch.bfloat16).inputs()
    saved = inputs.q[..., :128].contiguous(), torch.zeros(1000, 1), inputs.q[..., :128]
    with MemoryTracker() as tracker:
        result = launch.backward(inputs, *saved)
        held = tracker.live - sum(x.nbytes for x in result)
    assert launch._tiles(inputs, with_queries=False) is inputs.kept["tiles"]
    assert 0 < held < inputs.bits.nbytes / 10


def _empty_tiles(tiles, queries, keys):
    """Return tiles of the right sizes without an entry."""
    queries, keys = groups(queries), groups(keys)
    shapes = (queries, keys), (queries,), (128 * keys, queries, 4), (keys, 2 * queries), (keys,)
    return tiles(*(torch.zeros(shape, dtype=torch.int32) for shape in shapes))
