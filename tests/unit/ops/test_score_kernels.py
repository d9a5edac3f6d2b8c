"""Our kernel of the index scores: compiled without a GPU, right on one."""

import importlib

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk
from megatron_dsa.layers.warm_up import warm_up
from megatron_dsa.ops.dispatch import Policy, describe_call, report, reset_report
from megatron_dsa.ops.indexer_topk.spec import SCORES, index_scores
from megatron_dsa.ops.indexer_topk.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import Seen, bshd_layout, packed_layout
from tests.cases.indexer_topk import op_call
from tests.helpers import (
    never_waits,
    relative_error,
    skip_unless_they_run,
)

BF16, FP8 = "bfloat16", "float8_e4m3fn"
CUDA = torch.device("cuda")
#: Sums of 64 x 128 products in fp32.
TOLERANCE = 2e-6


def program():
    return importlib.import_module("megatron_dsa.ops.indexer_topk.tilelang.scores")


def test_it_is_the_first_choice_on_hopper():
    pytest.importorskip("tilelang")
    ours = SCORES.candidates[0]
    assert ours.name == "tilelang"
    for changes in ({}, {"heads": 1}, {"relu": False}, {"packed": True}, {"deterministic": True}):
        assert ours.reason(op_call(**changes)) is None, changes
    for changes, reason in (
        ({"capability": (8, 0)}, "wrong GPU"),
        ({"capability": (10, 0)}, "wrong GPU"),
        ({"dtype": torch.float16}, "needs bf16"),
        ({"heads": 65}, "takes 1 to 64 heads"),
        ({"qk_dim": 64}, "needs dims"),
    ):
        assert reason in ours.reason(op_call(**changes)), changes


@pytest.fixture
def ours():
    skip_unless_they_run(("indexer_scores", "tilelang"))


def normal(*shape, seed, dtype=torch.bfloat16):
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA, dtype=torch.float32).to(dtype)


def random_inputs(rows, keys, heads, relu=True):
    weights = normal(rows, heads, seed=3) * (heads * 128) ** -0.5
    return IndexerInputs(normal(rows, heads, 128, seed=1), normal(keys, 128, seed=2), weights, relu)


def integer_inputs(rows, keys, heads, relu=True):
    """Draw inputs whose scores are exact in any order of sums, with many ties."""
    x = random_inputs(rows, keys, heads, relu)
    return IndexerInputs(x.q.round(), x.k.round(), (x.weights * 128).round(), relu)


def expected(inputs, keys):
    """Return float64 scores ``[queries, width]``."""
    weights = inputs.weights.double()
    return index_scores(inputs.q.double(), keys.double(), weights, inputs.relu)


def all_scores(inputs, layout, rows_at_once):
    """Return visibility and scores, as ``[num_queries, num_keys]``; the rest must be unwritten."""
    keys = layout.keys_in_slot_order(inputs.k)
    out = torch.zeros(layout.num_queries, layout.num_keys, device=CUDA)
    visible = torch.zeros_like(out, dtype=torch.bool)
    for block in layout.blocks(lambda width: rows_at_once):
        seen = layout.seen(block)
        got = tilelang_kernels.Scores()(inputs, block, keys, seen)
        mask = seen.columns(block.width)
        assert got.dtype == torch.float32 and got.shape == mask.shape
        # Memory is filled with NaN before.
        assert got[~mask].isnan().all()
        visible[block.tokens, block.lo : block.hi] = mask
        out[block.tokens, block.lo : block.hi] = torch.where(mask, got, 0.0)
    return visible, out


def packed(padded=None):
    """Return short, empty and long sequences, and padding; 900 tokens."""
    ends = torch.tensor([0, 5, 5, 305, 306, 370, 499, 576, 836], device=CUDA, dtype=torch.int32)
    return packed_layout(ends, 900, 320, padded)


LAYOUTS = {
    "one sequence": lambda: bshd_layout(777, 1, CUDA),
    "batch of 2": lambda: bshd_layout(333, 2, CUDA),
    "packed": packed,
    "compressed keys": lambda: compressed_keys(bshd_layout(1003, 1, CUDA), 4).layout,
    "compressed keys, batch of 2": lambda: compressed_keys(bshd_layout(404, 2, CUDA), 4).layout,
    "compressed keys, packed": lambda: compressed_keys(packed(), 4).layout,
}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [5, 16, 32, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_against_float64(ours, name, heads):
    layout = LAYOUTS[name]()
    inputs = random_inputs(layout.num_queries, layout.num_keys, heads)
    visible, got = all_scores(inputs, layout, 1000)
    want = expected(inputs, layout.keys_in_slot_order(inputs.k))
    assert visible.any() and relative_error(got[visible], want[visible]) < TOLERANCE
    # Scores must not depend on the division into blocks.
    visible_by_100, by_100 = all_scores(inputs, layout, 100)
    assert torch.equal(visible, visible_by_100) and torch.equal(got, by_100)


@pytest.mark.gpu
def test_one_row_per_block(ours):
    layout = bshd_layout(150, 1, CUDA)
    inputs = random_inputs(150, 150, 64)
    visible, got = all_scores(inputs, layout, 1)
    assert torch.equal(got, all_scores(inputs, layout, 1000)[1])
    assert relative_error(got[visible], expected(inputs, inputs.k)[visible]) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_without_relu(ours, heads):
    layout = bshd_layout(500, 1, CUDA)
    inputs = random_inputs(500, 500, heads, relu=False)
    visible, got = all_scores(inputs, layout, 1000)
    assert relative_error(got[visible], expected(inputs, inputs.k)[visible]) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 3), (1, 64), (5, 65), (37, 4099)])
def test_few_rows(ours, rows, width):
    inputs = random_inputs(rows, width, 64)
    end = torch.arange(width - rows + 1, width + 1, device=CUDA, dtype=torch.int32)
    seen = Seen(torch.zeros_like(end), end)
    got = tilelang_kernels.scores(inputs.q, inputs.k, inputs.weights, seen)
    mask = seen.columns(width)
    assert got[~mask].isnan().all()
    assert relative_error(got[mask], expected(inputs, inputs.k)[mask]) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_nan_that_nobody_sees(ours, heads):
    padded = torch.tensor([0, 8, 8, 320, 336, 410, 550, 630, 896], device=CUDA, dtype=torch.int32)
    layout = packed(padded)
    inputs = random_inputs(900, 900, heads)
    for x in (inputs.q, inputs.k, inputs.weights):
        x[~layout.real] = float("nan")
    visible, got = all_scores(inputs, layout, 1000)
    want = expected(inputs, inputs.k)
    assert torch.isfinite(got).all()
    assert relative_error(got[visible], want[visible]) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "heads", "most"),
    [(70_000, 130, 16, 130), (2**18 + 5, 130, 64, 130), (70_000, 33_000, 16, 100)],
)
def test_many_rows(ours, rows, width, heads, most):
    inputs = random_inputs(1, width, heads)
    q = torch.empty(rows, heads, 128, device=CUDA, dtype=torch.bfloat16)
    q.normal_(generator=torch.Generator(CUDA).manual_seed(5))
    weights = normal(rows, heads, seed=6, dtype=torch.float32)
    start = torch.arange(rows, device=CUDA, dtype=torch.int32) * 7919 % (width - most + 1)
    seen = Seen(start, start + start % most + 1)
    got = tilelang_kernels.scores(q, inputs.k, weights, seen)
    for some in (slice(0, 50), slice(rows // 2, rows // 2 + 50), slice(rows - 50, rows)):
        mask = Seen(seen.start[some], seen.end[some]).columns(width)
        assert got[some][~mask].isnan().all()
        want = expected(IndexerInputs(q[some], inputs.k, weights[some]), inputs.k)
        assert relative_error(got[some][mask], want[mask]) < TOLERANCE


@pytest.mark.gpu
def test_bitwise_repeatable(ours):
    layout, inputs = packed(), random_inputs(900, 900, 64)
    _, first = all_scores(inputs, layout, 1000)
    for _ in range(20):
        assert torch.equal(all_scores(inputs, layout, 1000)[1], first)


def ours_with(topk, **rest):
    pairs = (("indexer_scores", "tilelang"), ("indexer_topk", topk))
    skip_unless_they_run(*pairs)
    return Policy(named=pairs, **rest)


@pytest.mark.gpu
@pytest.mark.parametrize("topk", ["torch", "cudnn", "tilelang"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [5, 64])
@pytest.mark.parametrize("workspace", [1, 2**18, 2**26])
def test_selection(name, heads, workspace, topk):
    policy = ours_with(topk, workspace_bytes=workspace)
    if topk == "cudnn" and "packed" in name:
        pytest.skip("cuDNN's selection has no packed mode")
    layout = LAYOUTS[name]()
    for relu in (True, False):
        inputs = integer_inputs(layout.num_queries, layout.num_keys, heads, relu)
        reset_report()
        got = indexer_topk(inputs, layout, 48, policy=policy)
        assert set(report()["indexer_scores"]) == {"tilelang"}
        assert set(report().get("indexer_topk", {})) <= {topk}
        want = indexer_topk(inputs, layout, 48, policy=Policy(fused=False))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("topk", ["torch", "tilelang"])
def test_no_host_synchronisation(topk):
    policy = ours_with(topk, workspace_bytes=2**18)
    layout, inputs = packed(), random_inputs(900, 900, 64)
    never_waits(lambda: indexer_topk(inputs, layout, 48, policy=policy))


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [True, False])
def test_warm_up_compiles_what_a_step_calls(ours, relu):
    compiled = program().compiled
    compiled.cache_clear()
    warm_up.cache_clear()
    inputs, layout = random_inputs(300, 300, 24, relu), bshd_layout(300, 1, CUDA)
    shape = {"heads": 24, "qk_dim": 128, "v_dim": 0, "topk": 64, "relu": relu}
    step = describe_call(CUDA, dtype=torch.bfloat16, **shape)
    warm_up((("indexer_scores", step), ("indexer_topk", step)), Policy(), 1.0)
    before = compiled.cache_info()
    indexer_topk(inputs, layout, 64)
    after = compiled.cache_info()
    assert after.hits > before.hits and after.misses == before.misses == 1
