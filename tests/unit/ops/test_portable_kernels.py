"""Our portable kernels: without a GPU they compile for every target; on one they are right.

The tiles of GPUs with less shared memory also run on one with more, so one GPU tests them all.
Numbers in docstrings are rows of the list of bugs that other systems shipped.
"""

import importlib

import pytest
import torch

from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Policy, report, reset_report
from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.sparse_attention.tilelang.kernels import TARGETS, Kernels, kernels_for
from megatron_dsa.testing.comparison import SPARSE_ATTENTION
from tests.cases.sparse_attention import CASE, check, check_poisoned, make_case, ragged_case
from tests.helpers import (
    deterministic,
    leaf,
    relative_error,
    skip_unless_it_runs,
)

#: Tilings that differ, and all numbers of heads with dims and sinks: each goes with one of them.
TILES = ("sm_80", "sm_89", "sm_90a")
HEADS = (1, 8, 16, 24, 32, 48, 64, 96, 128)
TOLERANCE = SPARSE_ATTENTION[torch.bfloat16]
OURS = Policy(
    workspace_bytes=256 * 2**20,
    named=(
        ("sparse_attention_forward", "tilelang"),
        ("sparse_attention_backward", "tilelang"),
        ("sparse_attention_probabilities", "torch"),
    ),
)


def portable(module):
    return importlib.import_module(f"megatron_dsa.ops.sparse_attention.tilelang.portable.{module}")


def test_which_kernels_a_gpu_has(monkeypatch):
    """Hopper its own, unless a test asks for tiles; the others the portable ones."""
    device = torch.device("cuda")
    for capability, target in TARGETS.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        tiles = None if target == "sm_90a" else target
        assert kernels_for(device) == Kernels(target, tiles)
        assert kernels_for(device, tiles="sm_89") == Kernels(target, "sm_89")
    for name in ("sparse_attention_forward", "sparse_attention_backward"):
        (ours,) = (c for c in OPERATIONS[name].candidates if c.name == "tilelang")
        assert set(ours.support.capabilities) == set(TARGETS)


@pytest.fixture
def tiles(request, monkeypatch):
    """Portable kernels, with the tiling that is named, for all calls of ours; or skips."""
    name = getattr(request, "param", "sm_80")
    (ours,) = (c for c in BACKWARD.candidates if c.name == "tilelang")
    skip_unless_it_runs(ours)
    sizes = portable("tiles").SHARED
    if sizes[name] > sizes[kernels_for(torch.device("cuda")).target]:
        pytest.skip(f"this GPU has less shared memory than {name}")
    monkeypatch.setattr(
        tilelang_kernels, "kernels_for", lambda device: kernels_for(device, tiles=name)
    )
    return name


def all_tiles(test):
    return pytest.mark.parametrize("tiles", TILES, indirect=True)(test)


def sink_of(heads):
    return leaf(heads, seed=3, device="cuda")


@pytest.mark.parametrize(
    ("tiles", "heads", "dim"),
    [
        (TILES[(i + j) % 3], heads, dim)
        for i, heads in enumerate(HEADS)
        for j, dim in enumerate((576, 512))
    ],
    indirect=["tiles"],
)
def test_heads(tiles, heads, dim):
    """A tile must not straddle two queries unnoticed; 512 columns with a sink."""
    q, kv, indices = make_case(37, 400, heads, dim, 128, causal=True, **CASE)
    sink = sink_of(heads) if dim == 512 else None
    reset_report()
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, sink=sink, scale=0.05, policy=OURS)
    for name in ("sparse_attention_forward", "sparse_attention_backward"):
        assert report()[name] == {"tilelang": 1}


@all_tiles
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("k", [1, 3, 64, 65, 1000, 2048])
def test_widths_and_more_keys_than_exist(tiles, k, heads):
    q, kv, indices = make_case(23, 300, heads, 576, k, **CASE)
    check(q, kv, indices, v_dim=512, tolerance=TOLERANCE, scale=0.05, policy=OURS)


@all_tiles
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("queries", [1, 3, 9])
def test_long_ragged_lists(tiles, heads, queries):
    """The last group has fewer queries; lists full to the end, an empty one, and a hole."""
    q, kv, indices = make_case(queries, 5000, heads, 576, 2000, **CASE)
    indices = indices[:, torch.randperm(2000, device="cuda")]
    indices[0, 300:700] = -1
    length = torch.full((queries,), 2000, dtype=torch.int32, device="cuda")
    length[-1] = 600
    length[queries // 2] = 0 if queries > 1 else 2000
    check(
        q, kv, indices, v_dim=512, tolerance=TOLERANCE, topk_length=length, scale=0.05, policy=OURS
    )  # fmt: skip


@all_tiles
@pytest.mark.parametrize(("heads", "dim"), [(16, 576), (64, 576), (64, 512)])
def test_invalid_ids_and_empty_lists(tiles, heads, dim):
    """Keys that no query selects may be NaN, the first and the last included."""
    check_poisoned(heads, dim, dim == 512, OURS, TOLERANCE)


@all_tiles
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("keys", [300, 40_000])
def test_teacher_and_deterministic_mode(tiles, heads, keys):
    """Head sums of the probabilities, and the same bits again where that is asked for."""
    q, kv, indices, length, _ = ragged_case(heads)
    kv = torch.cat([kv.detach(), torch.randn(keys - 300, 576, device="cuda").to(kv.dtype)])
    valid = (indices >= 0) & (indices < keys)
    valid &= torch.arange(128, device="cuda") < length[:, None]
    inputs = SparseAttentionInputs(q.detach(), kv, indices, 512, 0.05, length, None, 2**28, True)
    out, lse, wanted = unfused.forward(inputs)
    out, lse = out.to(q.dtype), lse.float()
    dout = torch.randn(out.shape, device="cuda").to(q.dtype)
    dq, dkv, _, p_sum = tilelang_kernels.backward(inputs, out, lse, dout)
    assert (p_sum[~valid] == 0).all() and relative_error(p_sum, wanted) < 1e-3
    with deterministic():
        first, again = (tilelang_kernels.backward(inputs, out, lse, dout) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert relative_error(first[0], dq) < 1e-3 and relative_error(first[1], dkv) < 1e-3


@all_tiles
def test_many_rows(tiles):
    """More rows than a grid dimension holds, more elements than int32 counts."""
    rows = 70_000
    q = torch.empty(rows, 64, 576, device="cuda", dtype=torch.bfloat16).normal_()
    kv = torch.randn(512, 576, device="cuda", dtype=torch.bfloat16)
    first = torch.randint(0, 384, (rows, 1), device="cuda", dtype=torch.int32)
    indices = first + torch.arange(128, device="cuda", dtype=torch.int32)
    assert q.numel() > 2**31
    inputs = SparseAttentionInputs(q, kv, indices, 512, 0.05, None, None, 2**30)
    out, lse, _ = tilelang_kernels.forward(inputs)
    dout = torch.randn_like(out)
    dq, _, _, _ = tilelang_kernels.backward(inputs, out, lse, dout)
    for part in (slice(0, 50), slice(rows - 50, rows)):
        own = SparseAttentionInputs(q[part], kv, indices[part], 512, 0.05, None, None, 2**30)
        want, want_lse, _ = unfused.forward(own)
        assert relative_error(out[part], want) < TOLERANCE
        assert relative_error(lse[part], want_lse) < 1e-4
        want_dq, *_ = unfused.backward(own, out[part], lse[part], dout[part])
        assert relative_error(dq[part], want_dq) < TOLERANCE
