"""Selection through fp8 candidates, and the scores of listed keys that it forms again.

Numbers in docstrings are rows of the list of bugs that other systems shipped.
"""

import dataclasses

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk import fp8, listed, reference
from megatron_dsa.ops.indexer_topk.api import candidates_for, selection_calls
from megatron_dsa.ops.indexer_topk.declaration import SCORES
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from tests.cases.indexer_topk import LAYOUTS, expected, integer_inputs
from tests.cases.triton_kernels import Recorder, assembly, interpret, prepare_interpreter
from tests.helpers import leaf, relative_error

KERNELS = "megatron_dsa.ops.indexer_topk.triton"
#: Blocks of any width are worth their candidates here.
FP8 = Policy(fp8_selection=True, fp8_least_ratio=0)


def draw(rows, keys, heads=4, dim=16, *, device="cpu", dtype=torch.float32, relu=True):
    """Random inputs; some vectors are large, some 0."""
    q, k, weights = (
        leaf(*shape, seed=seed, device=device).detach()
        for seed, shape in enumerate(((rows, heads, dim), (keys, dim), (rows, heads)))
    )
    k[::7] *= 300.0
    k[3::11] = 0.0
    return IndexerInputs(q.to(dtype), k.to(dtype), (weights / (heads * dim) ** 0.5).to(dtype), relu)


def test_quantized():
    """3 bits of mantissa; the largest element is 448; zeros stay zeros."""
    x = torch.cat([leaf(50, 64, seed=3).detach() * 10.0 ** torch.arange(-20, 30)[:, None]])
    x = torch.cat([x, torch.zeros(1, 64)])
    values, scales = fp8.quantized(x.bfloat16())
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert (values.float().abs().amax(-1)[:-1] == 448).all() and scales[-1] == 1
    back = values.double() * scales.double()[:, None]
    error = (back - x.bfloat16().double()).abs()
    assert (error <= x.double().abs() * 0.0626 + scales.double()[:, None] * 2.0**-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_numbers_are_finite(dtype):
    """A vector whose scale fp32 cannot hold is as good as 0, not NaN."""
    x = torch.zeros(2, 16, dtype=dtype)
    x[0, 0], x[1, 0] = 1e-43, 1e-30
    values, scales = fp8.quantized(x)
    back = values.double() * scales.double()[:, None]
    assert back.isfinite().all() and (scales > 0).all()
    assert abs(float(back[1, 0]) / 1e-30 - 1) < 1e-6


@pytest.mark.parametrize("capability", [89, 90, 100])
def test_quantization_compiles_once_without_a_gpu(monkeypatch, capability):
    kernels = pytest.importorskip(KERNELS)
    recorder = Recorder(kernels._quantize)
    monkeypatch.setattr(kernels, "_quantize", recorder)
    for shape in ((1, 128), (48, 64, 128)):
        kernels.quantize(torch.zeros(shape, dtype=torch.bfloat16))
    made = [assembly(recorder.kernel, *launch, capability) for launch in recorder.launches]
    assert len({x.hash for x in made}) == 1 and ".local" not in made[0].asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 128), (1001, 64, 128), (333, 5, 16), (0, 128)])
def test_quantized_by_triton(shape):
    """As torch does it, but for roundings of quotients that lie between two numbers."""
    kernels = pytest.importorskip(KERNELS)
    x = leaf(*shape, seed=2).detach().bfloat16().cuda()
    assert torch.equal(*(fp8.quantized(y)[0].float() for y in (x[::2], x[::2].contiguous())))
    if len(x) > 300:
        x[7], x[8, ..., 3], x[9, ..., 1], x[10] = 0.0, float("nan"), float("inf"), 3e38
    (got, scales), (want, wanted) = kernels.quantize(x), fp8.quantized(x.cpu())
    assert torch.equal(scales.nan_to_num(0).cpu(), wanted.nan_to_num(0)) or len(x) > 300
    finite = x.isfinite().all(-1).cpu()
    assert relative_error(scales.cpu()[finite], wanted[finite]) < 1e-6
    near = (got.cpu().float() - want.float())[finite].abs()
    assert bool((near <= want.float()[finite].abs() / 8).all())
    assert float((near > 0).float().mean() if near.numel() else 0) < 1e-3
    if len(x) > 300:
        assert got[8].isnan().any(-1).all() and got[9].isnan().any(-1).all()


def emulated(inputs, layout, topk):
    """The same selection in float64, of all pairs at once."""
    keys = layout.keys_in_slot_order(inputs.k)
    q, weights = fp8.quantized_queries(inputs.q, inputs.weights)
    k, scales = fp8.quantized(keys)
    rough = reference.index_scores(
        q.double(), k.double() * scales.double()[:, None], weights.double(), inputs.relu
    )
    fine = reference.index_scores(
        inputs.q.double(), keys.double(), inputs.weights.double(), inputs.relu
    )
    slots = torch.arange(layout.num_keys, device=keys.device)
    visible = (slots >= layout.start[:, None]) & (slots < layout.end[:, None])
    chosen = reference.topk(rough, visible, candidates_for(topk)).long()
    spare = layout.num_keys
    listed = torch.zeros(len(chosen), spare + 1, dtype=torch.bool, device=keys.device)
    listed.scatter_(1, torch.where(chosen < 0, spare, chosen), True)
    return layout.to_key_rows(reference.topk(fine, visible & listed[:, :spare], topk))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("workspace", [1, 20_000, 2**26])
def test_best_of_the_candidates(device, name, k, relu, workspace):
    layout = LAYOUTS[name](device)
    inputs = draw(60, 60, device=device, relu=relu)
    policy = dataclasses.replace(FP8, workspace_bytes=workspace)
    reset_report()
    indices, length = indexer_topk(inputs, layout, k, policy=policy)
    assert {"indexer_scores", "indexer_listed_scores", "indexer_topk"} <= set(report())
    assert torch.equal(indices, emulated(inputs, layout, k))
    assert torch.equal(length, (indices >= 0).sum(-1).int())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_best_of_the_candidates_in_other_dtypes(device, dtype):
    layout, inputs = bshd_layout(300, 1, device), draw(300, 300, device=device, dtype=dtype)
    indices, _ = indexer_topk(inputs, layout, 8, policy=FP8)
    assert recall(indices, emulated(inputs, layout, 8)) > 0.99


def test_start_up_asks_for_all_that_a_step_calls():
    """Narrow blocks are scored as the inputs are, wide ones in fp8."""
    shape = {"device": "cpu", "capability": None, "heads": 4, "qk_dim": 16, "v_dim": 0, "topk": 8}
    call = OpCall(dtype=torch.float32, **shape)
    for policy, dtypes in ((Policy(), {torch.float32}), (FP8, {torch.float32, fp8.DTYPE})):
        calls = list(selection_calls(call, policy))
        assert {x.dtype for name, x in calls if name == "indexer_scores"} == dtypes
        assert len(set(calls)) == len(calls)


def test_it_is_another_selection():
    """The emulation above would also pass for exact scores, did fp8 not change anything."""
    layout, inputs = bshd_layout(400, 1, torch.device("cpu")), draw(400, 400)
    inputs.k[:] = leaf(400, 16, seed=9).detach() * 0.02 + leaf(1, 16, seed=8).detach()
    exact, _ = indexer_topk(inputs, layout, 8)
    assert not torch.equal(indexer_topk(inputs, layout, 8, policy=FP8)[0], exact)


@pytest.mark.parametrize("name", LAYOUTS)
def test_exact_where_all_that_is_visible_is_a_candidate(device, name):
    """18: ties abound there, and go to the smallest."""
    layout, inputs = LAYOUTS[name](device), integer_inputs(60, device=device)
    indices, _ = indexer_topk(inputs, layout, 50, policy=FP8)
    assert torch.equal(indices, expected(inputs, layout, 50))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0])
def test_all_scores_equal(device, value):
    """18: with nothing but ties the smallest keys win."""
    ones = torch.ones(90, 2, 16, device=device)
    inputs = IndexerInputs(ones, ones[:, 0], torch.full((90, 2), value, device=device))
    indices, _ = indexer_topk(inputs, bshd_layout(90, 1, device), 8, policy=FP8)
    for t, row in enumerate(indices.tolist()):
        count = min(8, t + 1)
        assert row == list(range(count)) + [-1] * (8 - count)


def recall(indices, exact):
    """Share of the exact selection that was found."""
    common = sum(
        len(set(a) & set(b) - {-1}) for a, b in zip(indices.tolist(), exact.tolist(), strict=True)
    )
    return common / int((exact >= 0).sum())


def test_recall(device):
    """What fp8 misses is little, and much less than without candidates to spare."""
    layout = bshd_layout(1500, 1, device)
    q, k, weights = (leaf(*s, seed=1, device=device).detach().bfloat16()
                     for s in ((1500, 8, 64), (1500, 64), (1500, 8)))  # fmt: skip
    inputs = IndexerInputs(q, k, weights)
    exact, _ = indexer_topk(inputs, layout, 128)
    indices, _ = indexer_topk(inputs, layout, 128, policy=FP8)
    assert recall(indices, exact) > 0.999


def test_narrow_blocks_are_scored_exactly():
    """Where candidates cost more than they save."""
    layout, inputs = bshd_layout(60, 1, torch.device("cpu")), integer_inputs(60, device="cpu")
    want = expected(inputs, layout, 4)
    for ratio, rows in ((6, 60 - 29), (100, 0)):
        # A row at a time.
        policy = dataclasses.replace(FP8, workspace_bytes=1, fp8_least_ratio=ratio)
        reset_report()
        indices, _ = indexer_topk(inputs, layout, 4, policy=policy)
        assert report().get("indexer_listed_scores", {}).get("torch", 0) == rows
        if not rows:
            assert torch.equal(indices, want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_workspace_does_not_change_the_selection(name):
    """Which rows are scored exactly is settled by their places, not by where blocks end."""
    layout, inputs = LAYOUTS[name](torch.device("cpu")), draw(60, 60)
    inputs.k[:] = leaf(60, 16, seed=9).detach() * 0.02 + leaf(1, 16, seed=8).detach()
    exact, _ = indexer_topk(inputs, layout, 4)
    results = []
    for workspace in (1, 3_000, 20_000, 2**26):
        policy = dataclasses.replace(FP8, workspace_bytes=workspace, fp8_least_ratio=3)
        results.append(indexer_topk(inputs, layout, 4, policy=policy)[0])
    assert all(torch.equal(result, results[0]) for result in results)
    assert not torch.equal(results[0], exact)


def test_unseen_scores_may_hold_anything(add):
    """2: neither the rough nor the fine scores of what is not seen reach the selection."""

    def poisoned(original):
        def implementation(inputs, block, keys, seen):
            scores = original(inputs, block, keys, seen)
            return scores.masked_fill(~seen.columns(block.width), float("nan"))

        return implementation

    def poisoned_lists(original):
        def implementation(inputs, columns, workspace_bytes):
            scores = original(inputs, columns, workspace_bytes)
            return scores.masked_fill(columns < 0, float("nan"))

        return implementation

    add("indexer_scores", poisoned)
    add("indexer_listed_scores", poisoned_lists)
    layout = LAYOUTS["packed"](torch.device("cpu"))
    inputs = draw(60, 60)
    assert torch.equal(indexer_topk(inputs, layout, 5, policy=FP8)[0], emulated(inputs, layout, 5))


def test_support():
    """Our scores take fp8, cuDNN's do not; torch's always can."""
    shape = {"device": "cuda", "capability": (9, 0), "heads": 64, "qk_dim": 128, "v_dim": 0}
    call = OpCall(dtype=torch.float8_e4m3fn, topk=2560, **shape)
    reasons = {c.name: c.reason(call) or "" for c in SCORES.candidates}
    assert "needs" not in reasons["tilelang"] and reasons["torch"] == ""
    assert (
        "needs bf16, got torch.float8_e4m3fn" in reasons["cudnn"] or "missing" in reasons["cudnn"]
    )


# Scores of listed keys


def lists(rows, width, keys, device="cpu"):
    """Columns with -1 here and there, the first rows empty."""
    generator = torch.Generator().manual_seed(rows + width)
    columns = torch.randint(0, keys, (rows, width), generator=generator, dtype=torch.int32)
    columns[torch.rand(rows, width, generator=generator) < 0.2] = -1
    columns[: rows // 8] = -1
    return columns.to(device)


def check_listed(scores, inputs, columns, tolerance, workspace_bytes=2**26):
    """Compare with float64 where there is a key."""
    got = scores(inputs, columns, workspace_bytes)
    some = columns >= 0
    keys = inputs.k[columns.clamp_min(0).long()].double()
    products = torch.einsum("rhd,rcd->rhc", inputs.q.double(), keys)
    products = products.relu() if inputs.relu else products
    want = torch.einsum("rh,rhc->rc", inputs.weights.double(), products)
    assert got.shape == columns.shape
    assert relative_error(got[some], want[some]) < tolerance
    return got


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("workspace", [1, 10_000, 2**26])
def test_listed_scores(device, relu, workspace):
    inputs = draw(30, 50, device=device, dtype=torch.float64, relu=relu)
    check_listed(listed.scores, inputs, lists(30, 21, 50, device), 1e-12, workspace)


#: Rows, width, keys, heads, dim.
SHAPES = [(9, 5, 40, 3, 16), (3, 128, 300, 16, 32), (2, 300, 90, 20, 64), (0, 7, 9, 4, 16)]


def test_triton_interpreted():
    """The kernel, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter."""
    from megatron_dsa.ops.indexer_topk import triton as triton_kernels

    prepare_interpreter()
    for rows, width, keys, heads, dim in SHAPES:
        for relu in (True, False):
            inputs = draw(rows, keys, heads, dim, dtype=torch.float16, relu=relu)
            check_listed(triton_kernels.scores, inputs, lists(rows, width, keys), 1e-3)
    for rows, width, topk in ((5, 9, 7), (2, 2600, 2048), (0, 3, 2)):
        columns, places = lists(rows, width, 10_000), lists(rows, topk, width)
        want = listed.chosen(columns, places)
        assert torch.equal(triton_kernels.chosen(columns, places), want)


@pytest.mark.parametrize("heads", [5, 32, 64])
def test_compiles_once_without_a_gpu(monkeypatch, heads):
    """23: products of bf16 on the tensor cores of every generation, nothing in local memory."""
    kernels = pytest.importorskip(KERNELS)
    recorder = Recorder(kernels._listed_scores)
    monkeypatch.setattr(kernels, "_listed_scores", recorder)
    for width in (1, 16, 2560):
        inputs = draw(4, 64, heads, 128, dtype=torch.bfloat16)
        kernels.scores(inputs, lists(4, width, 64), 0)
    for capability, product in ((80, "mma.sync"), (90, "wgmma"), (100, "tcgen05")):
        made = [assembly(recorder.kernel, *launch, capability) for launch in recorder.launches]
        assert len({x.hash for x in made}) == 1
        assert product in made[0].asm["ptx"] and ".local" not in made[0].asm["ptx"]


CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 5, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("relu", [True, False])
def test_triton_against_float64(heads, dim, relu):
    """1, 4: heads, odd widths; 17: twice the same."""
    kernels = pytest.importorskip(KERNELS)
    for rows, width, keys in ((70, 2560, 3000), (33, 37, 4099)):
        inputs = draw(rows, keys, heads, dim, device=CUDA, dtype=torch.bfloat16, relu=relu)
        columns = lists(rows, width, keys, CUDA)
        # 2: keys that nobody lists.
        unlisted = torch.ones(keys, dtype=torch.bool, device=CUDA)
        unlisted[columns[columns >= 0].long()] = False
        inputs.k[unlisted] = float("nan")
        got = check_listed(kernels.scores, inputs, columns, 2e-6)
        assert torch.equal(got, kernels.scores(inputs, columns, 0))


@pytest.mark.gpu
def test_triton_many_rows():
    """25: rows beyond 65535, elements of q beyond 2^31."""
    kernels = pytest.importorskip(KERNELS)
    rows, heads = 2**18 + 3, 64
    assert rows * heads * 128 > 2**31
    q = torch.empty(rows, heads, 128, device=CUDA, dtype=torch.bfloat16).normal_()
    x = draw(1, 500, heads, 128, device=CUDA, dtype=torch.bfloat16)
    weights = torch.rand(rows, heads, device=CUDA)
    columns = torch.randint(0, 500, (rows, 130), device=CUDA, dtype=torch.int32)
    got = kernels.scores(IndexerInputs(q, x.k, weights), columns, 0)
    for some in (slice(0, 30), slice(rows // 2, rows // 2 + 30), slice(rows - 30, rows)):
        part = IndexerInputs(q[some], x.k, weights[some])
        check_listed(lambda *_, some=some: got[some], part, columns[some], 2e-6)


def packed():
    ends = torch.tensor([0, 5, 5, 1305, 1306, 1370, 2499, 2576], device=CUDA, dtype=torch.int32)
    return packed_layout(ends, 2800, 1300)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one sequence", "batch of 2", "packed", "compressed keys"])
@pytest.mark.parametrize("heads", [5, 64])
def test_fused_selection(name, heads):
    """15, 24: our kernels are what runs, without waiting for the device; little is missed."""
    (ours,) = (c for c in SCORES.candidates if c.name == "tilelang")
    shape = {"device": "cuda", "heads": heads, "qk_dim": 128, "v_dim": 0, "topk": 300}
    capability = torch.cuda.get_device_capability()
    reason = ours.reason(OpCall(dtype=torch.float8_e4m3fn, capability=capability, **shape))
    if reason is not None:
        pytest.skip(reason)
    layout = {
        "one sequence": lambda: bshd_layout(3000, 1, CUDA),
        "batch of 2": lambda: bshd_layout(1400, 2, CUDA),
        "packed": packed,
        "compressed keys": lambda: compressed_keys(bshd_layout(9000, 1, CUDA), 4).layout,
    }[name]()
    inputs = draw(layout.num_queries, layout.num_keys, heads, 128, device=CUDA,
                  dtype=torch.bfloat16)  # fmt: skip
    policy = dataclasses.replace(FP8, workspace_bytes=2**24)
    exact, lengths = indexer_topk(inputs, layout, 256, policy=Policy(fused=False))
    first, _ = indexer_topk(inputs, layout, 256, policy=policy)
    reset_report()
    torch.cuda.set_sync_debug_mode("error")
    try:
        indices, length = indexer_topk(inputs, layout, 256, policy=policy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ran = report()
    assert set(ran["indexer_scores"]) == {"tilelang"}
    assert set(ran["indexer_listed_scores"]) == {"triton"}
    assert torch.equal(length, lengths) and torch.equal(first, indices)
    assert torch.equal((indices >= 0).sum(-1), length)
    assert recall(indices, exact) > 0.99


if __name__ == "__main__":
    main()
