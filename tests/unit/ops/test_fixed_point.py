"""Key gradients in fixed point: no overflow, no wrong finite number, and on a GPU equal bits."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import (
    BACKWARD,
    KeyGradientAccumulator,
    SparseAttentionInputs,
)
from megatron_dsa.ops.sparse_attention.tilelang import launch
from megatron_dsa.ops.sparse_attention.tilelang.fixed_point import to_float, units_per_one
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels
from tests.cases.sparse_attention import make_case
from tests.helpers import deterministic, relative_error


def case(rows=40, keys=200, heads=16, dim=576, k=64, device="cpu", spread=1.0):
    """Return inputs with a sharp softmax, their forward, and an output gradient."""
    q, kv, indices = make_case(rows, keys, heads, dim, k, device=device, dtype=torch.bfloat16)
    q = (q.detach() * spread).contiguous()
    inputs = SparseAttentionInputs(q, kv.detach(), indices, 512, 0.05, None, None, 2**28)
    out, lse, _ = unfused.forward(inputs)
    generator = torch.Generator(device).manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device=device).to(q.dtype)
    return inputs, out.to(q.dtype), lse.float(), dout


@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
def test_no_sum_overflows_and_little_range_is_wasted(spread):
    """All contributions to one element, with one sign, must stay below 2^62."""
    inputs, out, lse, dout = case(spread=spread)
    units = units_per_one(inputs, out, dout)
    assert math.log2(units.item()).is_integer()
    q, kv, out, dout = (x.double() for x in (inputs.q, inputs.kv, out, dout))
    ids = inputs.indices.long()
    p = torch.exp(torch.einsum("qhd,qkd->qhk", q, kv[ids]) * 0.05 - lse.double()[..., None])
    p = p.masked_fill((inputs.indices < 0)[:, None], 0.0)
    dp = torch.einsum("qhd,qkd->qhk", dout, kv[ids][..., :512])
    ds = 0.05 * p * (dp - (dout * out).sum(-1, keepdim=True))
    share = torch.einsum("qhk,qhd->qkd", ds.abs(), q.abs())
    share[..., :512] += torch.einsum("qhk,qhd->qkd", p, dout.abs())
    most = torch.zeros_like(kv).index_put_((ids.clamp(min=0),), share, accumulate=True).max()
    assert most * units < 2**62
    assert most * units > 2**30


def test_no_gradient_is_no_division_by_zero():
    inputs, out, _, dout = case()
    units = units_per_one(inputs, out, torch.zeros_like(dout))
    assert units.isfinite().all()
    assert (to_float(torch.zeros(3, 32, dtype=torch.int64), units) == 0).all()


def test_what_is_not_finite_stays_so_and_unselected_keys_do_not_count():
    arguments, out, _, dout = case()
    units = units_per_one(arguments, out, dout)
    kv = arguments.kv.clone()
    kv[-1] = float("nan")
    assert torch.equal(units_per_one(replace(arguments, kv=kv), out, dout), units)
    zeros = torch.zeros(2, 16, dtype=torch.int64)
    for bad in (float("nan"), float("inf")):
        for name in ("out", "dout", "q"):
            inputs = {"q": arguments.q, "out": out, "dout": dout}
            inputs[name] = inputs[name].clone()
            inputs[name][3, 2, 1] = bad
            spoiled = replace(arguments, q=inputs["q"])
            units = units_per_one(spoiled, inputs["out"], inputs["dout"])
            assert to_float(zeros, units).isnan().all()


class AddingKernels(Kernels):
    """Kernels that add one per call to every element of the key gradient."""

    def compiled(self, part, *arguments):
        assert part == "backward"

        def add(*tensors):
            dkv, units = tensors[9], tensors[10]
            dkv.add_(units.to(dkv.dtype) if dkv.dtype == torch.int64 else 1.0)

        return add


@pytest.mark.parametrize("fixed", [False, True])
def test_calls_that_share_a_sum_add_to_one_accumulator(fixed, monkeypatch):
    pytest.importorskip("tilelang", reason="tilelang is not installed")
    monkeypatch.setattr(launch, "deterministic_mode", lambda: fixed)
    inputs, out, lse, dout = case(heads=64)
    kernels, asked = AddingKernels("sm_90a", "sm_90a"), []

    def bounds():
        asked.append(True)
        return inputs.q.abs().max().float(), dout.abs().max().float()

    def run(outputs):
        shared = replace(inputs, key_sum=KeyGradientAccumulator(3 * inputs.q.shape[0] * 64, bounds))
        for each in outputs:
            assert launch.backward(shared, each, lse, dout, kernels)[1] is None
        return shared.key_sum.result()

    monkeypatch.setattr(launch, "sorting_pays", lambda _inputs: False)
    alone = launch.backward(inputs, out, lse, dout, kernels)[1]
    assert torch.equal(alone, torch.ones_like(alone)) and not asked
    assert torch.equal(run([out] * 3), 3 * torch.ones_like(alone))
    assert len(asked) == fixed  # once, for the first call
    if fixed:  # units are fixed before; later values must not be hidden
        bad = out.clone()
        bad[3, 2, 1] = float("nan")
        assert run([out, bad, out]).isnan().all()


def test_units_of_a_shared_sum_leave_room_for_all_calls():
    inputs, out, _, dout = case()
    queries, gradient = inputs.q.abs().max().float(), dout.abs().max().float()
    rows = inputs.q.shape[:2].numel()
    alone = units_per_one(inputs, out, dout)
    for calls in (1, 8):
        total = KeyGradientAccumulator(calls * rows, lambda: (queries, gradient))
        units = units_per_one(replace(inputs, key_sum=total), out, dout)
        # Outputs are assumed to be as large as values, which loses at most a factor of two.
        assert alone / calls / 2 <= units <= alone / calls


def test_column_order():
    """Thread t holds columns 2t, 2t+1, 8+2t, 9+2t of 16; four threads exchange."""
    stored = [half * 8 + 2 * t + e for half in range(2) for e in range(2) for t in range(4)]
    columns = torch.arange(32.0).expand(3, 32) + 100 * torch.arange(3.0)[:, None]
    fixed = columns[:, stored + [16 + c for c in stored]].long() * 8
    assert torch.equal(to_float(fixed, torch.tensor([8.0])), columns)


def test_no_queries_and_no_keys():
    for rows, keys in ((0, 5), (3, 0)):
        q = torch.zeros(rows, 16, 576, dtype=torch.bfloat16)
        kv = torch.zeros(keys, 576, dtype=torch.bfloat16)
        ids = torch.zeros(rows, 4, dtype=torch.int32)
        inputs = SparseAttentionInputs(q, kv, ids, 512, 0.05, None, None, 2**28)
        units = units_per_one(inputs, q[..., :512], q[..., :512])
        assert (to_float(torch.zeros(2, 16, dtype=torch.int64), units) == 0).all()


def gradients(inputs, out, lse, dout):
    """Return dq and dkv in deterministic mode, by dispatch."""
    shape = describe_call(
        "cuda", dtype=torch.bfloat16, heads=inputs.q.shape[1], qk_dim=inputs.q.shape[2],
        v_dim=512, topk=inputs.indices.shape[1], deterministic=True,
    )  # fmt: skip
    chosen = BACKWARD.choose(shape, Policy()).candidate
    assert chosen.name == "tilelang"
    with deterministic():
        return chosen.load()(inputs, out, lse, dout)[:2]


@pytest.mark.parametrize(
    ("heads", "dim", "k"),
    [(16, 576, 128), (33, 576, 300), (64, 576, 128), (64, 512, 300), (128, 512, 128)],
)
def test_twenty_repeats_give_the_same_bits(hopper, heads, dim, k):
    inputs = case(600, 300, heads, dim, k, device="cuda")
    first = gradients(*inputs)
    for _ in range(19):
        again = gradients(*inputs)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])
    dq, dkv, _, _ = unfused.backward(*inputs)
    assert relative_error(first[0], dq) < 5e-3
    assert relative_error(first[1], dkv) < 5e-3


def test_the_order_of_the_queries_does_not_matter(hopper):
    inputs, out, lse, dout = case(600, 300, 64, 576, 128, device="cuda")
    order = torch.randperm(600, device="cuda")
    shuffled = replace(inputs, q=inputs.q[order], indices=inputs.indices[order])
    first = gradients(inputs, out, lse, dout)
    again = gradients(shuffled, out[order], lse[order], dout[order])
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[0][order], again[0])
