"""Our kernel of the selection: compiled without a GPU, equal to a sort on one."""

import importlib

import pytest
import torch

from megatron_dsa.ops.dispatch import describe_call
from megatron_dsa.ops.indexer_topk.spec import TOPK, selected_ids
from megatron_dsa.ops.indexer_topk.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.layout.layout import Seen
from tests.cases.indexer_topk import op_call
from tests.helpers import never_waits

TILINGS = ("narrow", "wide", "large")
#: Of an SM: bytes of shared memory, of which each thread block takes 1024 more, and registers.
SHARED, REGISTERS = 228 * 1024, 65536
CUDA = torch.device("cuda")
NAN, INFINITY = float("nan"), float("inf")


def program():
    pytest.importorskip("tilelang")
    return importlib.import_module("megatron_dsa.ops.indexer_topk.tilelang.selection")


def test_it_is_the_first_choice_on_hopper():
    pytest.importorskip("tilelang")
    ours = TOPK.candidates[0]
    assert ours.name == "tilelang"
    for changes in ({}, {"heads": 3}, {"packed": True}, {"deterministic": True}, {"topk": 4096}):
        assert ours.reason(op_call(**changes)) is None, changes
    for changes, reason in (
        ({"capability": (8, 0)}, "wrong GPU"),
        ({"topk": 4097}, "takes 1 to 4096 selected keys"),
        ({"dtype": torch.float64}, "needs bf16 or fp16 or fp32"),
    ):
        assert reason in ours.reason(op_call(**changes)), changes
    assert ours.load().bytes_per_score() == 0


def expected(scores, seen, topk):
    """Return the selection of a stable sort of float64 scores."""
    width = scores.shape[1]
    # 0 - x is +0 for both zeros. NaN is sorted last.
    losses = (0.0 - scores.double()).masked_fill(~seen.columns(width), NAN)
    best = losses.sort(dim=-1, stable=True).indices[:, :topk]
    place = torch.arange(best.shape[1], device=scores.device)
    best = torch.where(place < (seen.end - seen.start)[:, None], best, width).sort(dim=-1).values
    out = torch.full((scores.shape[0], topk), -1, dtype=torch.int32, device=scores.device)
    out[:, : best.shape[1]] = torch.where(best == width, -1, best)
    return out


@pytest.mark.parametrize("topk", [1, 5, 40, 60])
def test_what_is_expected_here_is_what_the_reference_selects(topk):
    scores = torch.randn(9, 50, generator=torch.Generator().manual_seed(1)).mul_(2).round_()
    scores[3] = -scores[3].sign() * 0.0
    scores[4, ::3] = -INFINITY
    seen = Seen(torch.arange(9, dtype=torch.int32) * 5, torch.arange(9, dtype=torch.int32) * 5 + 10)
    for some in (seen, Seen(seen.start * 0, seen.end), Seen(seen.start, seen.start)):
        want = selected_ids(scores, some.columns(50), topk)
        assert torch.equal(expected(scores, some, topk), want)


@pytest.fixture
def select():
    """Return the selection; skip if it cannot run."""
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "topk": 64}
    reason = TOPK.candidates[0].reason(describe_call(CUDA, dtype=torch.bfloat16, **shape))
    if reason is not None:
        pytest.skip(reason)
    return tilelang_kernels.Selection()


@pytest.fixture(params=TILINGS)
def tiling(select, monkeypatch, request):
    """Use this tiling for all widths."""
    monkeypatch.setattr(program(), "tiling_for", lambda _width, _topk: request.param)
    return request.param


def normal(rows, width, seed=1):
    return torch.randn(rows, width, generator=torch.Generator(CUDA).manual_seed(seed), device=CUDA)


def columns(rows, width):
    return torch.arange(width, device=CUDA, dtype=torch.float32).expand(rows, -1).clone()


def with_infinities(rows, width):
    scores = normal(rows, width)
    scores[:, ::3], scores[:, 1::5] = INFINITY, -INFINITY
    return scores


def a_part_above(rows, width, part):
    """Raise some columns far above the others, which a threshold from elsewhere misses."""
    scores = normal(rows, width)
    scores[:, part] += 9
    return scores


#: ``(rows, width) -> scores``; integers for many ties, if the name says so.
SCORES = {
    "normal": normal,
    "all 1": lambda *shape: torch.ones(shape, device=CUDA),
    "zeros of both signs": lambda *shape: normal(*shape).sign() * 0.0,
    "two values": lambda *shape: normal(*shape).sign(),
    "ascending": columns,
    "descending": lambda *shape: -columns(*shape),
    "90 % zeros": lambda *shape: (normal(*shape) - 1.28).relu_(),
    "few values": lambda *shape: (normal(*shape) * 4).round_(),
    "infinities": with_infinities,
    "denormal numbers": lambda *shape: (normal(*shape) * 9).round_() * 1e-45,
    "the first tenth above": lambda r, w: a_part_above(r, w, slice(0, w // 10)),
    "the last tenth above": lambda r, w: a_part_above(r, w, slice(w - w // 10, w)),
}


def ranges(rows, width, topk):
    """Return visible ranges: all, nothing, exactly K, one more, and random parts."""
    generator = torch.Generator(CUDA).manual_seed(rows + width + topk)
    ends = torch.randint(width + 1, (2, rows), generator=generator, device=CUDA).int()
    start, end = ends.amin(0), ends.amax(0)
    start[0], end[0] = 0, width
    start[1::11] = end[1::11]
    end[2::11] = (start[2::11] + topk).clamp(max=width)
    end[3::11] = (start[3::11] + topk + 1).clamp(max=width)
    start[4::5] = 0
    end[5::5] = width
    return Seen(start, end)


def poisoned(scores, seen):
    """Return the scores, with NaN of both signs for invisible keys."""
    poison = torch.tensor([NAN, -NAN, INFINITY], device=CUDA)
    width = scores.shape[1]
    poison = poison[torch.arange(width, device=CUDA) % 3]
    return torch.where(seen.columns(width), scores, poison)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 33, 1000, 2049, 4097, 8192, 16_387, 40_001, 131_072])
@pytest.mark.parametrize("kind", SCORES)
def test_selections(select, tiling, kind, width):
    rows = max(8, min(64, 2**20 // width))
    scores = SCORES[kind](rows, width)
    for topk in (1, 64, 512, 1024, 2048, *((2560, 4096) if tiling == "large" else ())):
        seen = ranges(rows, width, topk)
        got = select(poisoned(scores, seen), seen, topk)
        assert got.dtype == torch.int32
        assert torch.equal(got, expected(scores, seen, topk)), topk


@pytest.mark.gpu
@pytest.mark.parametrize("above", [10.0, 0.0])
def test_a_sample_that_is_not_typical(select, tiling, above):
    """All of the sample is above (below) the others, which ascend: the worst case."""
    t, width = program().TILINGS[tiling], 2**17
    at = torch.arange(t.sectors * t.threads, device=CUDA)
    first = at * (width // 8) // len(at) * 8
    scores = columns(3, width) / width * 5
    sample = first[:, None] + torch.arange(8, device=CUDA)
    scores[:, sample.flatten()] = above + normal(3, sample.numel()).abs() * (1 if above else -1)
    seen = Seen(torch.zeros(3, device=CUDA).int(), torch.full((3,), width, device=CUDA).int())
    for topk in (1, 2048):
        assert torch.equal(select(scores, seen, topk), expected(scores, seen, topk))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "stride", "first"), [(700, 703, 1), (5000, 9001, 3)])
def test_strides_of_rows(select, tiling, width, stride, first):
    buffer = torch.full((50, stride), NAN, device=CUDA)
    scores = buffer[:, first : first + width]
    seen = ranges(50, width, 64)
    scores.copy_(poisoned(normal(50, width), seen))
    before = buffer.clone()
    for view in (scores, scores[::3], scores[7:8], scores.t().contiguous().t()):
        some = seen if len(view) == 50 else Seen(seen.start[::3], seen.end[::3])
        some = Seen(seen.start[7:8], seen.end[7:8]) if len(view) == 1 else some
        some = Seen(some.start.contiguous(), some.end.contiguous())
        assert torch.equal(select(view, some, 64), expected(view, some, 64))
    assert torch.equal(buffer.view(torch.int32), before.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [300, 8192, 50_000])
def test_scores_that_are_nan(select, tiling, width):
    scores = normal(40, width)
    scores[1::4, ::2], scores[2::4], scores[2::4, ::2] = NAN, NAN, -NAN
    scores[3::4] = torch.tensor(2**31 - 1, device=CUDA, dtype=torch.int32).view(torch.float32)
    seen, topk = ranges(40, width, 200), 200
    got, want = select(scores, seen, topk), expected(scores, seen, topk)
    assert torch.equal(got[::4], want[::4])
    chosen = got >= 0
    assert torch.equal(chosen, want >= 0)
    assert (got >= seen.start[:, None])[chosen].all() and (got < seen.end[:, None])[chosen].all()
    assert (got.diff(dim=1) > 0)[chosen[:, 1:]].all()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width", "topk"), [(66_001, 300, 64), (70_000, 33_000, 100)])
def test_many_rows(select, rows, width, topk):
    scores = torch.empty(rows, width, device=CUDA)
    scores.normal_(generator=torch.Generator(CUDA).manual_seed(5))
    end = width - torch.arange(rows, device=CUDA, dtype=torch.int32) * 7919 % width
    seen = Seen(end // 3, end)
    got = select(scores, seen, topk)
    for some in (slice(0, 50), slice(rows // 2, rows // 2 + 50), slice(rows - 50, rows)):
        part = Seen(seen.start[some], seen.end[some])
        assert torch.equal(got[some], expected(scores[some], part, topk))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "90 % zeros", "two values"])
def test_bitwise_repeatable(select, tiling, kind):
    scores = SCORES[kind](300, 20_000)
    seen = ranges(300, 20_000, 2048)
    first = select(scores, seen, 2048)
    for _ in range(20):
        assert torch.equal(select(scores, seen, 2048), first)


@pytest.mark.gpu
def test_the_first_call_compiles_for_every_width(select):
    """No step may compile because its sequence has grown."""
    compiled = program().compiled
    for topk, kernels in ((64, 2), (2560, 1)):
        compiled.cache_clear()
        for width in (3000, 30_000):
            select(normal(2, width), ranges(2, width, topk), topk)
            assert compiled.cache_info().misses == kernels


@pytest.mark.gpu
def test_no_host_synchronisation(select, tiling):
    scores, seen = normal(40, 9000), ranges(40, 9000, 512)
    never_waits(lambda: select(scores, seen, 512))


def test_more_keys_than_there_is_room_for_are_refused():
    pytest.importorskip("tilelang")
    with pytest.raises(ValueError, match="topk must be from 1 to 4096, got 4097"):
        tilelang_kernels.Selection()(torch.zeros(1, 5000), Seen(None, None), 4097)
