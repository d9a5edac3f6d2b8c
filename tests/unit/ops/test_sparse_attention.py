"""Conformance of sparse attention: every implementation against float64, and special properties."""

import importlib
from dataclasses import dataclass, field

import pytest
import torch

from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.dispatch import Policy, describe_call, report, reset_report
from megatron_dsa.ops.sparse_attention import torch as unfused
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, FORWARD, SparseAttentionInputs
from megatron_dsa.ops.sparse_attention.tilelang import launch as tilelang_kernels
from megatron_dsa.ops.sparse_attention.tilelang.kernels import TARGETS, Kernels, kernels_for
from megatron_dsa.testing.comparison import SPARSE_ATTENTION
from tests.cases.sparse_attention import CASE, SMALL, check, check_poisoned, make_case, ragged_case
from tests.helpers import deterministic, leaf, never_waits, relative_error, skip_unless_it_runs

TOLERANCE = SPARSE_ATTENTION[torch.bfloat16]
FORWARDS = {c.name: c for c in FORWARD.candidates if c.fused}
BACKWARDS = {c.name: c for c in BACKWARD.candidates if c.fused}
UNFUSED = Policy(fused=False)
#: Different tilings of our portable kernels; small ones also run with more shared memory, so one
#: GPU tests all.
TILES = ("sm_80", "sm_89", "sm_90a")
HEADS = (1, 2, 8, 16, 24, 32, 48, 64, 96, 128)


def policy_of(forward="torch", backward="torch"):
    return Policy(
        workspace_bytes=256 * 2**20,
        named=(
            ("sparse_attention_forward", forward),
            ("sparse_attention_backward", backward),
            ("sparse_attention_probabilities", "torch"),
        ),
    )


@dataclass(frozen=True)
class Way:
    """An implementation of one pass or both, with torch's for the other.

    torch's runs in small blocks on 24 and 16 dims instead of 576 and 512.
    """

    name: str
    passes: dict[str, str] = field(default_factory=dict)
    where: tuple[str, torch.dtype] = ("cuda", torch.bfloat16)
    tiles: str | None = None

    @property
    def policy(self):
        return policy_of(**self.passes) if self.passes else SMALL

    @property
    def scale(self):
        return 0.05 if self.passes else 0.3

    def like(self):
        return dict(zip(("device", "dtype"), self.where, strict=True))

    def dim(self, dim):
        return dim if self.passes else {576: 24, 512: 16}[dim]

    def skip_unless_it_runs(self, heads=64, dim=576):
        for part, name in self.passes.items():
            known = FORWARDS if part == "forward" else BACKWARDS
            skip_unless_it_runs(known[name], heads, dim)

    def case(self, queries, keys, heads, dim, k, **more):
        self.skip_unless_it_runs(heads, dim)
        return make_case(queries, keys, heads, self.dim(dim), k, **self.like(), **more)

    def ragged(self, heads, dim=576):
        self.skip_unless_it_runs(heads, dim)
        return ragged_case(heads, self.dim(dim), **self.like())

    def sink(self, heads, seed=3):
        return leaf(heads, seed=seed, device=self.where[0], dtype=accumulation_dtype(self.where[1]))

    def run(self, q, kv, indices, **more):
        settings = {"softmax_scale": self.scale, "v_dim": self.dim(512), "policy": self.policy}
        return sparse_attention(q, kv, indices, **settings | more)

    def check(self, q, kv, indices, **more):
        """Compare values, lse, teacher and all gradients with float64."""
        return check(
            q, kv, indices, v_dim=self.dim(512), tolerance=SPARSE_ATTENTION[self.where[1]],
            scale=self.scale, policy=self.policy, **more,
        )  # fmt: skip


def on_gpu(way, *case):
    return pytest.param(way, *case, id="-".join(map(str, (way.name, *case))), marks=pytest.mark.gpu)


TORCH = [
    Way(f"torch {device} {dtype}".replace("torch.", ""), where=(device, dtype))
    for device in ("cpu", "cuda")
    for dtype in (torch.float64, torch.float32)
]
#: Gradients of a query with few keys suffer in bf16.
TORCH_BF16 = [
    Way(f"torch {device} bfloat16", where=(device, torch.bfloat16)) for device in ("cpu", "cuda")
]
FUSED = [Way(f"forward {name}", {"forward": name}) for name in FORWARDS]
FUSED += [Way(f"backward {name}", {"backward": name}) for name in BACKWARDS]
PORTABLE = [
    Way(f"portable {tiles}", {"forward": "tilelang", "backward": "tilelang"}, tiles=tiles)
    for tiles in TILES
]


def conform(names, cases, portable=None, ways=()):
    """Parametrize by ways and ``cases``.

    ``portable``: cases of portable kernels, each with the indices of its tilings first.
    """
    params = []
    for way in (*TORCH, *ways, *FUSED):
        for case in cases:
            named = "-".join(map(str, (way.name, *case)))
            marks = pytest.mark.gpu if way.where[0] == "cuda" else ()
            params.append(pytest.param(way, *case, id=named, marks=marks))
    if portable is None:
        portable = [(range(len(TILES)), *case) for case in cases]
    params += [on_gpu(PORTABLE[i], *case) for which, *case in portable for i in which]
    return pytest.mark.parametrize(("way", *names), params, indirect=["way"])


@pytest.fixture
def way(request, monkeypatch):
    """Yield a way; portable kernels replace all of ours. Skip if it cannot run."""
    way = request.param
    way.skip_unless_it_runs()
    if way.tiles is not None:
        sizes = importlib.import_module(f"{tilelang_kernels.__package__}.portable.tiles").SHARED
        if sizes[way.tiles] > sizes[kernels_for(torch.device("cuda")).target]:
            pytest.skip(f"this GPU has less shared memory than {way.tiles}")
        monkeypatch.setattr(
            tilelang_kernels, "kernels_for", lambda device: kernels_for(device, tiles=way.tiles)
        )
    return way


ALL = range(len(TILES))


@conform(
    ("heads", "dim"),
    [(heads, dim) for heads in HEADS for dim in (576, 512)],
    [
        ([(i + j) % 3], heads, dim)
        for i, heads in enumerate(HEADS)
        for j, dim in enumerate((576, 512))
    ],
    TORCH_BF16,
)
def test_heads(way, heads, dim):
    """A tile of 64 must not mix two queries; 512 columns with a sink."""
    q, kv, indices = way.case(70 - 33 * bool(way.tiles), 400, heads, dim, 128, causal=True)
    reset_report()
    way.check(q, kv, indices, sink=way.sink(heads) if dim == 512 else None)
    for part, name in way.passes.items():
        assert report()[f"sparse_attention_{part}"] == {name: 1}


@conform(
    ("heads", "queries"),
    [(16, 1), (16, 70), (16, 71), (8, 3), (8, 70), (8, 71), (1, 9)],
    [],
)
def test_last_group(way, heads, queries):
    way.check(*way.case(queries, 400, heads, 576, 128, causal=True))


@conform(
    ("heads", "k"),
    [(heads, k) for heads in (16, 64, 128) for k in (1, 63, 64, 100, 640, 2048)],
    [(ALL, heads, k) for heads in (16, 64) for k in (1, 3, 64, 65, 1000, 2048)],
)
def test_widths_and_more_keys_than_exist(way, heads, k):
    way.check(*way.case(40 - 17 * bool(way.tiles), 300, heads, 576, k))


@conform(("heads",), [(16,), (64,), (128,)], [])
def test_many_keys(way, heads):
    q, kv, indices = way.case(40, 70_000, heads, 576, 128)
    way.check(q, kv, indices[:, torch.randperm(128, device=q.device)])


@conform(
    ("heads", "dim", "with_sink"),
    [(heads, 576, sink) for heads in (16, 64, 128) for sink in (False, True)],
    [(ALL, 16, 576, False), (ALL, 64, 576, False), (ALL, 64, 512, True)],
)
def test_invalid_ids_lengths_and_empty_lists(way, heads, dim, with_sink):
    """Unselected keys may be NaN, including the first and the last."""
    case = way.ragged(heads, dim)
    check_poisoned(case, way.sink(heads, 5) if with_sink else None, way.run, way.check)


@conform(
    ("heads", "queries"),
    [(heads, queries) for heads in (16, 64, 128) for queries in (1, 3, 9)],
    [(ALL, heads, queries) for heads in (16, 64) for queries in (1, 3, 9)],
)
def test_few_queries_with_long_lists(way, heads, queries):
    q, kv, indices = way.case(queries, 5000, heads, 576, 2000)
    if way.tiles is not None:
        indices = indices[:, torch.randperm(2000, device=q.device)]
    indices[0, 300:700] = -1
    length = torch.full((queries,), 2000, dtype=torch.int32, device=q.device)
    length[-1] = 600
    length[queries // 2] = 0 if queries > 1 else 2000
    for sink in (None, way.sink(heads)):
        q.grad = kv.grad = None
        way.check(q, kv, indices, sink=sink, topk_length=length)
        empty = way.run(q, kv, indices, topk_length=torch.zeros_like(length), attn_sink=sink)
        assert (empty.out == 0).all() and (empty.lse == float("-inf")).all()


@conform(("heads",), [(8,), (16,)], [])
def test_neighbours_without_common_keys(way, heads):
    """Whole blocks of keys selected by one query of a tile only."""
    q, kv, _ = way.case(24, 2400, heads, 576, 1)
    indices = torch.arange(2400, dtype=torch.int32, device=q.device).view(24, 100)
    indices[1::5] = -1
    indices[::7] = indices[::7].flip(1)
    for order in (indices, indices.flip(0)):  # the first query's keys come first, then last
        q.grad = kv.grad = None
        way.check(q, kv, order)


@conform(("heads",), [(16,), (24,), (64,), (128,)], [])
def test_repeated_calls(way, heads):
    """Nothing may accumulate, and old memory must not matter."""
    q, kv, indices, length, _ = way.ragged(heads)
    results = []
    for filler in (None, float("nan"), 1e4):
        q.grad = kv.grad = None
        if filler is not None:
            torch.utils.deterministic.fill_uninitialized_memory = False  # or torch.empty writes
            with torch.no_grad():
                way.run(*(torch.full_like(x, filler) for x in (q, kv)), torch.zeros_like(indices))
            stale = [torch.full_like(x, filler) for x in results[0][:3]]
            del stale  # the allocator reuses it
        result = way.run(q, kv, indices, topk_length=length)
        result.out.sum().backward()
        results.append([result.out.detach(), result.lse, q.grad, kv.grad])
    for again in results[1:]:
        for got, first in zip(again[:3], results[0], strict=False):
            assert torch.equal(got, first)
        # Sums of atomics are not bitwise equal.
        exact = way.where[1] == torch.float64
        assert relative_error(again[3], results[0][3]) < (1e-14 if exact else 1e-3)


@conform(("heads",), [(16,)], [])
def test_strided_views(way, heads):
    """Megatron's [s, b, h, d] is used without a copy."""
    q, kv, indices = way.case(40, 300, heads, 576, 128)
    views = []
    for x in (q.detach(), kv.detach(), indices):
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
        wide[..., : x.shape[-1]] = x
        views.append(wide[..., : x.shape[-1]])
    with torch.no_grad():
        got, want = way.run(*views), way.run(q, kv, indices)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@conform(("heads",), [(16,), (64,), (128,)], [])
def test_no_host_synchronisation(way, heads):
    if way.where[0] == "cpu":
        pytest.skip("there is nothing to wait for")
    q, kv, indices, length, _ = way.ragged(heads)
    sink = way.sink(heads)
    never_waits(
        lambda: way.run(q, kv, indices, topk_length=length, attn_sink=sink).out.sum().backward()
    )


@conform(("heads", "scale"), [(heads, scale) for heads in (16, 64) for scale in (0.05, 2.0)], [])
def test_lse_is_natural_and_the_sink_is_a_gate(way, heads, scale):
    """Also for overflowing exponentials; lse excludes the sink, and -inf disables it."""
    if "backward" in way.passes:
        pytest.skip("a backward returns no lse")
    q, kv, indices, length, valid = way.ragged(heads)
    sink = way.sink(heads, 5).detach()
    sink[0] = float("-inf")
    more = {"softmax_scale": scale, "topk_length": length}
    with torch.no_grad():
        got = way.run(q, kv, indices, attn_sink=sink, **more)
        plain = way.run(q, kv, indices, **more)
    keys = kv.detach().double()[indices.clamp(0, 299).long()]
    logits = torch.einsum("qhd,qkd->qhk", q.detach().double(), keys) * scale
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    lse, some = torch.logsumexp(logits, -1), valid.any(1)
    exact = way.where[1] == torch.float64
    assert got.lse.dtype == accumulation_dtype(q.dtype)
    assert way.passes or torch.equal(got.lse, plain.lse)
    for found in (got.lse, plain.lse):
        assert (found[~some] == float("-inf")).all()
        assert relative_error(found[some], lse[some]) < (1e-12 if exact else 1e-4)
    values = torch.einsum("qhk,qkd->qhd", torch.softmax(logits, -1), keys[..., : way.dim(512)])
    tolerance = SPARSE_ATTENTION[way.where[1]]
    gated = values * torch.sigmoid(lse - sink)[..., None]
    assert relative_error(got.out[some], gated[some]) < tolerance
    assert relative_error(plain.out[some], values[some]) < tolerance


@pytest.fixture(params=FORWARDS)
def forward(request):
    skip_unless_it_runs(FORWARDS[request.param])
    return request.param


@pytest.fixture(params=BACKWARDS)
def backward(request):
    skip_unless_it_runs(BACKWARDS[request.param])
    return request.param


def attend(q, kv, indices, policy):
    with torch.no_grad():
        return sparse_attention(q, kv, indices, softmax_scale=0.05, v_dim=512, policy=policy)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_full_lists_of_many_keys(forward, heads):
    q, kv, indices = make_case(40, 70_000, heads, 576, 2048, **CASE)
    indices = indices[:, torch.randperm(2048, device="cuda")]
    want, got = (attend(q, kv, indices, policy) for policy in (UNFUSED, policy_of(forward)))
    assert relative_error(got.out, want.out) < TOLERANCE
    assert relative_error(got.lse, want.lse) < 1e-4


@pytest.mark.gpu
def test_teacher_from_a_second_pass(forward):
    """A forward without probabilities: a separate operation computes them from its lse."""
    q, kv, indices = make_case(40, 300, 64, 576, 128, **CASE)
    reset_report()
    arguments = {"softmax_scale": 0.05, "v_dim": 512, "want_p_sum": True}
    fused = sparse_attention(q, kv, indices, policy=policy_of(forward), **arguments)
    assert report()["sparse_attention_probabilities"] == {"torch": 1}
    unfused = sparse_attention(q, kv, indices, policy=UNFUSED, **arguments)
    assert relative_error(fused.p_sum, unfused.p_sum) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_crossed_with_every_backward(forward, backward, heads):
    skip_unless_it_runs(BACKWARDS[backward], heads)
    q, kv, indices, length, _ = ragged_case(heads)
    way = Way("crossed", {"forward": forward, "backward": backward})
    reset_report()
    way.check(q, kv, indices, sink=way.sink(heads, 5), topk_length=length)
    assert report()["sparse_attention_backward"] == {backward: 1}


def inputs_of(q, kv, indices, length=None, sink=None, want_p_sum=False):
    x = [None if t is None else t.detach() for t in (q, kv, indices, length, sink)]
    return SparseAttentionInputs(*x[:3], 512, 0.05, *x[3:], 2**28, want_p_sum)


def call_of(heads, dim=576):
    return describe_call("cuda", dtype=torch.bfloat16, heads=heads, qk_dim=dim, v_dim=512, topk=128)


def backward_and_torchs(backward, inputs):
    """Return results of a backward and of torch's for torch's forward, and that teacher."""
    call = call_of(*inputs.q.shape[1:])
    out, lse, p_sum = FORWARD.run(call, UNFUSED, inputs)
    dout = torch.randn(out.shape, device="cuda").to(out.dtype)
    policies = policy_of(backward=backward), UNFUSED
    return *(BACKWARD.run(call, policy, inputs, out, lse, dout) for policy in policies), p_sum


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
def test_key_gradient_is_not_rounded(backward, heads):
    """The fp32 accumulator must be far closer to float64 than bf16."""
    (_, dkv, *_), (_, exact, *_), _ = backward_and_torchs(
        backward, inputs_of(*make_case(64, 200, heads, 576, 128, **CASE))
    )
    assert dkv.dtype == torch.float32
    rounded = dkv.to(torch.bfloat16).float()
    assert not torch.equal(dkv, rounded)
    assert relative_error(dkv, exact) < relative_error(rounded, exact)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dim"),
    [(2, 576), (8, 512), (16, 576), (24, 512), (64, 576), (96, 512), (128, 576)],
)
@pytest.mark.parametrize(("with_sink", "keys"), [(False, 300), (True, 300), (True, 40_000)])
def test_teacher_of_the_indexer(backward, heads, dim, with_sink, keys):
    skip_unless_it_runs(BACKWARDS[backward], heads, dim)
    q, kv, indices, length, valid = ragged_case(heads, dim)
    kv = torch.cat([kv.detach(), torch.randn(keys - 300, dim, device="cuda").to(kv.dtype)])
    if keys > 300:
        place = torch.randint(300, keys, indices.shape, device="cuda", dtype=torch.int32)
        indices = torch.where(valid, place, torch.where(indices >= 300, keys, indices))
        valid &= indices < keys
    sink = leaf(heads, seed=5, device="cuda") if with_sink else None
    (*_, p_sum), _, wanted = backward_and_torchs(
        backward, inputs_of(q, kv, indices, length, sink, want_p_sum=True)
    )
    if p_sum is None:
        pytest.skip(f"{backward} gives none; it is an operation of its own then")
    assert p_sum.dtype == torch.float32 and (p_sum[~valid] == 0).all()
    assert relative_error(p_sum, wanted) < 1e-3


def many_queries(rows, heads):
    """More queries (and groups) than a grid dimension, more elements than int32 counts."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        x = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        return x.normal_(generator=generator)

    q, kv, dout = normal(rows, heads, 576), normal(512, 576), normal(rows, heads, 512)
    indices = torch.rand(rows, 512, device="cuda").argsort(1)[:, :128].int()
    assert q.numel() > 2**31
    return q, kv, indices, dout


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(70_000, 64), (270_000, 16)])
def test_forward_of_many_queries(forward, rows, heads):
    q, kv, indices, _ = many_queries(rows, heads)
    got = attend(q, kv, indices, policy_of(forward))
    for part in (slice(0, 50), slice(rows - 50, rows)):
        want = attend(q[part], kv, indices[part], UNFUSED)
        assert relative_error(got.out[part], want.out) < TOLERANCE
        assert relative_error(got.lse[part], want.lse) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(70_000, 64), (66_000, 128)])
def test_backward_of_many_queries(backward, rows, heads):
    q, kv, indices, dout = many_queries(rows, heads)
    inputs, call = inputs_of(q, kv, indices), call_of(heads)
    out, lse, _ = FORWARD.run(call, UNFUSED, inputs)
    results = [
        BACKWARD.run(call, policy, inputs, out, lse, dout)[:2]
        for policy in (policy_of(backward=backward), UNFUSED)
    ]
    for got, want in zip(*results, strict=True):
        assert relative_error(got[-50:], want[-50:]) < TOLERANCE
        assert relative_error(got[:50], want[:50]) < TOLERANCE


portable = pytest.mark.parametrize("way", [on_gpu(way) for way in PORTABLE], indirect=True)


@portable
def test_many_queries_of_portable_kernels(way):
    rows = 70_000
    q, kv, indices, dout = many_queries(rows, 64)
    inputs = inputs_of(q, kv, indices)
    out, lse, _ = tilelang_kernels.forward(inputs)
    dq, _, _, _ = tilelang_kernels.backward(inputs, out, lse, dout)
    for part in (slice(0, 50), slice(rows - 50, rows)):
        own = inputs_of(q[part], kv, indices[part])
        want, want_lse, _ = unfused.forward(own)
        assert relative_error(out[part], want) < TOLERANCE
        assert relative_error(lse[part], want_lse) < 1e-4
        want_dq, *_ = unfused.backward(own, out[part], lse[part], dout[part])
        assert relative_error(dq[part], want_dq) < TOLERANCE


@portable
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("keys", [300, 40_000])
def test_teacher_and_deterministic_mode_of_portable_kernels(way, heads, keys):
    q, kv, indices, length, _ = ragged_case(heads)
    kv = torch.cat([kv.detach(), torch.randn(keys - 300, 576, device="cuda").to(kv.dtype)])
    valid = (indices >= 0) & (indices < keys)
    valid &= torch.arange(128, device="cuda") < length[:, None]
    inputs = inputs_of(q, kv, indices, length, want_p_sum=True)
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


def test_which_kernels_a_gpu_has(monkeypatch):
    device = torch.device("cuda")
    for capability, target in TARGETS.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        tiles = None if target == "sm_90a" else target
        assert kernels_for(device) == Kernels(target, tiles)
        assert kernels_for(device, tiles="sm_89") == Kernels(target, "sm_89")
    for name in ("sparse_attention_forward", "sparse_attention_backward"):
        (ours,) = (c for c in OPERATIONS[name].candidates if c.name == "tilelang")
        assert set(ours.support.capabilities) == set(TARGETS)


def test_fp32_gradient_channel(device):
    """With ``kv_grad`` the key gradient must arrive unrounded, and kv itself get none."""
    q, kv, indices = make_case(16, 20, 4, 16, 8, device=device, dtype=torch.bfloat16)
    q32, kv32 = q.detach().float().requires_grad_(), kv.detach().float().requires_grad_()
    channel = torch.zeros(20, 16, device=device, requires_grad=True)
    grad = torch.randn(16, 4, 8, device=device).bfloat16()
    sparse_attention(
        q, kv.detach(), indices, softmax_scale=0.3, v_dim=8, kv_grad=channel
    ).out.backward(grad)
    sparse_attention(q32, kv32, indices, softmax_scale=0.3, v_dim=8).out.backward(grad.float())
    assert channel.grad.dtype == torch.float32
    assert relative_error(channel.grad, kv32.grad) < TOLERANCE
    # Unrounded: not representable in bf16.
    assert not torch.equal(channel.grad, channel.grad.bfloat16().float())


def test_there_is_no_separate_value(device):
    """The value is a slice of kv; a separate one must not be ignored."""
    q, kv, indices = make_case(4, 8, 2, 8, 4, device=device, dtype=torch.float32)
    with pytest.raises(TypeError):
        sparse_attention(q, kv, indices, softmax_scale=1.0, v_dim=8, v=kv)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "most"), [(128, (2.5e-3, 1.9e-3)), (64, (3.0e-3, 2.4e-3))])
def test_rounding_of_gradients(heads, most):
    """Above 64 heads, dS is rounded once, from a rounded P."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper's kernels")
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        q = leaf(32, heads, 576, seed=1, device="cuda", dtype=torch.bfloat16).detach()
        kv = leaf(4096, 576, seed=2, device="cuda", dtype=torch.bfloat16).detach()
        gradient = leaf(32, heads, 512, seed=3, device="cuda", dtype=torch.bfloat16).detach()
        order = torch.rand(32, 4096, generator=torch.Generator().manual_seed(4)).argsort(1)
        indices = order[:, :1024].int().cuda().contiguous()
        q, kv = q.to(dtype).requires_grad_(), kv.to(dtype)
        kv_grad = torch.zeros_like(kv, dtype=accumulation_dtype(dtype)).requires_grad_()
        policy = UNFUSED if dtype == torch.float64 else policy_of("tilelang", "tilelang")
        sparse_attention(
            q, kv, indices, softmax_scale=192**-0.5, v_dim=512, kv_grad=kv_grad, policy=policy
        ).out.backward(gradient.to(dtype))
        found.append((q.grad, kv_grad.grad))
    for own, exact, bound in zip(*found, most, strict=True):
        assert relative_error(own, exact) < bound
