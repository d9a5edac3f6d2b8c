"""The Triton kernels of the dense indexer loss: interpreted, compiled, and on a GPU.

Numbers in docstrings are rows of the list of bugs that other systems shipped.
"""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.compressed_keys import compressed_keys
from megatron_dsa.dispatch import Policy, candidates, device_problem, report, reset_report
from megatron_dsa.dsa_kernels import IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.layout import bshd_layout, packed_layout
from megatron_dsa.ops.indexer_loss import DenseLossProblem, reference
from megatron_dsa.ops.indexer_topk.reference import index_scores
from megatron_dsa.support import Problem
from tests.helpers import double_leaf, leaf, relative_error
from tests.unit.test_compressor import Recorder, assembly, interpret, repair_interpreter
from tests.unit.test_dense_indexer_loss import peak_bytes
from tests.unit.test_indexer_loss import visible_rows

MODULE = "megatron_dsa.ops.indexer_loss.triton_dense"
SCALE = 0.11  # not 1, so that a scale applied twice shows
KERNELS = {
    "teacher": ("head_sums", "head_lse"),
    "student": ("student_lse", "student_loss"),
    "gradients": ("query_gradient", "key_gradient", "finish_rows"),
}
#: Bytes of shared memory that a thread block can have.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


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


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads and dims; ``own`` dims of a latent key are its head's, of ``rank`` latents."""

    index_heads: int = 5
    index_dim: int = 16
    heads: int = 3
    dim: int = 80
    own: int = 64
    rank: int = 24


def make(layout, shape, dtype, keys, relu=True):
    """Return a problem of the largest workspace; scores have a deviation of about 1."""
    device, rows, slots = layout.start.device, layout.num_queries, layout.num_keys

    def draw(*sizes, seed, scale=1.0):
        return leaf(*sizes, seed=seed, device=device, dtype=dtype, scale=scale)

    inputs = IndexerInputs(
        draw(rows, shape.index_heads, shape.index_dim, seed=1),
        draw(slots, shape.index_dim, seed=2),
        draw(rows, shape.index_heads, seed=3, scale=(shape.index_heads * shape.index_dim) ** -0.5),
        relu,
    )
    if keys == "latent":
        shared = shape.dim - shape.own
        latents = draw(slots, shape.rank + shared, seed=5)
        w_uk = draw(shape.heads, shape.own, shape.rank, seed=6, scale=shape.rank**-0.5)
        k = LatentKeys(latents, w_uk).detach()
    else:
        k = draw(slots, 1 if keys == "one" else shape.heads, shape.dim, seed=5).detach()
    q = draw(rows, shape.heads, shape.dim, seed=4).detach()
    return DenseLossProblem(inputs, layout, q, k, SCALE, None, 2**28)


def expected(problem):
    """Return value and gradients in float64."""
    x, k = problem.inputs, problem.k
    if isinstance(k, LatentKeys):
        k = k.expanded()  # rounded as those of the projection
    copies = IndexerInputs(*map(double_leaf, (x.q, x.k, x.weights)), x.relu)
    mask = visible_rows(problem.layout)
    if problem.other_lse is None:
        teacher = reference.dense_teacher(problem.q.double(), k.double(), mask, SCALE)
    else:
        logits = torch.einsum("qhd,khd->qhk", problem.q.double(), k.double()) * SCALE
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        total = torch.logaddexp(logits.logsumexp(-1), problem.other_lse.double())[..., None]
        teacher = torch.where(mask[:, None], (logits - total).exp(), 0.0).sum(1)
    scores = index_scores(copies.q, copies.k, copies.weights, copies.relu)
    value = reference.kl_sum(scores, teacher, mask)
    value.backward()
    return value.detach(), copies.q.grad, copies.k.grad, copies.weights.grad


def computed(problem, run=None):
    """Return value and gradients of ``run``, of dispatch's choice if it is None."""
    tensors = (problem.inputs.q, problem.inputs.k, problem.inputs.weights)
    inputs = IndexerInputs(*(x.detach().requires_grad_() for x in tensors), problem.inputs.relu)
    problem = dataclasses.replace(problem, inputs=inputs)
    if run is None:
        reset_report()
        value = dense_indexer_loss(
            inputs, problem.q, problem.k, problem.layout, softmax_scale=SCALE,
            other_lse=problem.other_lse, lse=problem.lse,
            policy=Policy(workspace_bytes=problem.workspace_bytes),
        )  # fmt: skip
        assert report()["dense_indexer_loss"] == {"triton": 1}
    else:
        value = run(problem)
    value.backward()
    return value.detach(), inputs.q.grad, inputs.k.grad, inputs.weights.grad


def check(got, want, of_value, of_gradients):
    names = ("value", "q", "k", "weights")
    limits = (of_value, *3 * [of_gradients])
    for name, x, y, limit in zip(names, got, want, limits, strict=True):
        assert relative_error(x, y) < limit, name


def with_others(problem):
    """Mass besides the keys that differs by head; none in some rows, nothing else in others."""
    rows, heads = problem.q.shape[:2]
    other = leaf(rows, heads, seed=8, device=problem.q.device).detach() * 3
    other[::5, -1] = float("-inf")
    other[7] = float("-inf")
    other[30] = 1e5
    return dataclasses.replace(problem, other_lse=other)


def with_lse(problem):
    """Given log-sum-exps, with anything in rows that see nothing."""
    k = problem.k.expanded() if isinstance(problem.k, LatentKeys) else problem.k
    mask = visible_rows(problem.layout)
    logits = torch.einsum("qhd,khd->qhk", problem.q.double(), k.double()) * SCALE
    lse = logits.masked_fill(~mask[:, None], float("-inf")).logsumexp(-1).float()
    lse[~mask.any(-1)] = float("nan")
    return dataclasses.replace(problem, lse=lse)


def test_triton_interpreted():
    """All kernels in fp32, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter: tiles of 64 x 64 pairs, programs of 32 x 32."""
    triton_dense = importlib.import_module(MODULE)
    repair_interpreter()
    # Memory that no kernel writes shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
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
        (uneven, small, "all", lambda problem: dataclasses.replace(problem, head_group=group)),
        (uneven, Shape(), "latent", with_nan),
        (compressed_keys(uneven, 4, True).layout, Shape(), "one", with_others),
        (compressed_keys(bshd_layout(96, 1, cpu), 4, True).layout, small, "one", without_relu),
    ):
        problem = make(layout, shape, torch.float32, keys)
        want = expected(change(problem) if change is not with_nan else problem)
        problem = change(problem)
        # Two heads are expanded at a time.
        problem = dataclasses.replace(problem, workspace_bytes=2**15)
        assert triton_dense.tile_shape(problem)[1] < 3
        got = computed(problem, triton_dense.dense)
        check(got, want, 1e-5, 1e-5)
        with torch.no_grad():
            assert torch.equal(triton_dense.dense(problem), got[0])


def without_relu(problem):
    return dataclasses.replace(problem, inputs=dataclasses.replace(problem.inputs, relu=False))


def with_nan(problem):
    """2: rows that see nothing, and keys that nobody sees, hold NaN."""
    layout, x = problem.layout, problem.inputs.detach()
    unseen_rows, unseen_keys = layout.start == layout.end, ~visible_rows(layout).any(0)
    assert unseen_rows.any() and unseen_keys.any()

    def spoilt(tensor, rows):
        return tensor.clone().index_fill_(0, rows.nonzero().squeeze(1), float("nan"))

    k = problem.k
    return dataclasses.replace(
        problem,
        inputs=IndexerInputs(
            spoilt(x.q, unseen_rows), spoilt(x.k, unseen_keys), spoilt(x.weights, unseen_rows),
            x.relu,
        ),
        q=spoilt(problem.q, unseen_rows),
        k=LatentKeys(spoilt(k.latents, unseen_keys), k.w_uk)
        if isinstance(k, LatentKeys)
        else spoilt(k, unseen_keys),
    )  # fmt: skip


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
    """23: warpgroup instructions on Hopper; operands by asynchronous copies; nothing too large."""
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
    ours = next(c for c in candidates("dense_indexer_loss") if c.name == "triton")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "dtype": torch.bfloat16}
    problem = Problem(device="cuda", capability=(9, 0), **shape)
    for changes in ({}, {"heads": 1}, {"relu": False}, {"packed": True}, {"deterministic": True}):
        assert ours.reason(dataclasses.replace(problem, **changes)) is None, changes
    for changes, reason in (
        ({"dtype": torch.float16}, "needs bf16"),
        ({"heads": 65}, "takes 1 to 64 heads"),
        ({"qk_dim": 64}, "needs dims"),
        ({"device": "cpu", "capability": None}, "wrong GPU"),
    ):
        assert reason in ours.reason(dataclasses.replace(problem, **changes)), changes


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
    problem = DenseLossProblem(inputs, layout, q, keys, 1.0, None, mib * 2**20)
    (rows, width), heads = triton_dense.tile_shape(problem)
    assert rows >= least and width >= least // 4
    assert triton_dense.tile_bytes(problem, heads)(rows, width) <= mib * 2**20


# On a GPU

V32 = Shape(64, 128, 16, 192, 128, 512)
FEW = Shape(5, 128, 3, 100, 36, 40)
ABSORBED = Shape(32, 128, 16, 576)
CASES = {
    "latent": (V32, "latent"),
    "absorbed": (ABSORBED, "one"),
    "every head": (dataclasses.replace(V32, dim=64), "all"),
    "odd dims": (FEW, "latent"),
}


@pytest.fixture
def ours():
    """Skips where the kernels cannot run."""
    (candidate,) = (c for c in candidates("dense_indexer_loss") if c.name == "triton")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0}
    reason = candidate.reason(device_problem("cuda", dtype=torch.bfloat16, **shape))
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_against_float64(ours, case, name):
    """1, 4, 5, 7, 8, 10: in one tile, and in the smallest tiles."""
    shape, keys = CASES[case]
    problem = make(LAYOUTS[name](ours), shape, torch.bfloat16, keys)
    want = expected(problem)
    for workspace in (2**28, 1):
        part = dataclasses.replace(problem, workspace_bytes=workspace)
        check(computed(part), want, 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("change", [with_others, with_lse, without_relu])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", ["latent", "absorbed"])
def test_options(ours, case, name, change):
    shape, keys = CASES[case]
    problem = change(make(LAYOUTS[name](ours), shape, torch.bfloat16, keys))
    want, got = expected(dataclasses.replace(problem, lse=None)), computed(problem)
    check(got, want, 1e-3, 1e-2)
    with torch.no_grad():
        value = dense_indexer_loss(
            problem.inputs, problem.q, problem.k, problem.layout, softmax_scale=SCALE,
            other_lse=problem.other_lse, lse=problem.lse,
        )  # fmt: skip
    assert torch.equal(value, got[0])


@pytest.mark.gpu
def test_all_heads_of_the_model(ours):
    """128 heads from latents, 64 index heads, several tiles each way."""
    shape = dataclasses.replace(V32, heads=128)
    problem = make(bshd_layout(1100, 1, ours), shape, torch.bfloat16, "latent")
    problem = dataclasses.replace(problem, workspace_bytes=2**25)
    assert importlib.import_module(MODULE).tile_shape(problem)[1] < 128
    check(computed(problem), expected(problem), 1e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["packed", "compressed, packed"])
@pytest.mark.parametrize("case", ["latent", "absorbed"])
def test_nan_that_nobody_sees(ours, case, name):
    """2, 3: the same bits as without it."""
    shape, keys = CASES[case]
    problem = make(LAYOUTS[name](ours), shape, torch.bfloat16, keys)
    for got, want in zip(computed(with_nan(problem)), computed(problem), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
def test_nan_that_somebody_sees(ours):
    """It shows in the loss: in a query, a key, a latent."""
    problem = make(bshd_layout(200, 1, ours), V32, torch.bfloat16, "latent")
    for tensor in (problem.q, problem.inputs.q, problem.inputs.k, problem.k.latents):
        before = tensor.detach()[100].clone()
        tensor.detach()[100] = float("nan")
        assert computed(problem)[0].isnan()
        tensor.detach()[100] = before
    assert computed(problem)[0].isfinite()


@pytest.mark.gpu
def test_bitwise_repeatable(ours):
    """17: 20 repeats."""
    problem = make(packed(ours), V32, torch.bfloat16, "latent")
    first = computed(problem)
    for _ in range(20):
        assert all(map(torch.equal, computed(problem), first))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "index_heads", "heads", "dim"), [(2**18 + 5, 64, 1, 64), (70_000, 2, 128, 256)]
)
def test_many_rows(ours, rows, index_heads, heads, dim):
    """25: grids, elements of queries beyond 2^31; the last sequences are as they are alone."""
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
    problem = DenseLossProblem(inputs, packed_layout(ends, rows, length), q, k, SCALE, None, 2**28)
    ours_alone = IndexerInputs(inputs.q[last:], inputs.k[last:], inputs.weights[last:])
    layout = packed_layout(ends[-6:] - last, rows - last, length)
    alone = DenseLossProblem(ours_alone, layout, q[last:], k[last:], SCALE, None, 2**28)
    got, want = computed(problem), computed(alone)
    for x, y in zip(got[1:], want[1:], strict=True):
        assert y.abs().sum() > 0 and relative_error(x[last:], y) < 1e-3
    assert got[0].isfinite()


@pytest.mark.gpu
def test_no_host_synchronisation(ours):
    """24: packed batches included."""
    problems = [
        make(layout(ours), shape, torch.bfloat16, keys)
        for layout in LAYOUTS.values()
        for shape, keys in (CASES["latent"], CASES["absorbed"])
    ]
    computed(problems[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for problem in problems:
            computed(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [64, 256])
def test_temporaries_fit_the_workspace(ours, mib):
    """Above results and saved gradients there is no more than the workspace, for any length."""
    triton_dense = importlib.import_module(MODULE)
    shape = dataclasses.replace(V32, heads=128)
    for length in (3000, 5000):
        problem = make(bshd_layout(length, 1, ours), shape, torch.bfloat16, "latent")
        problem = dataclasses.replace(problem, workspace_bytes=mib * 2**20)
        x, kept = problem.inputs, []
        peak = peak_bytes(ours, lambda p=problem, kept=kept: kept.append(triton_dense.dense(p)))
        accumulated = (x.k.numel() + x.k.shape[1] + x.weights.numel()) * 4
        saved = sum(t.numel() * t.element_size() for t in (x.q, x.k, x.weights))
        assert 0 < peak < mib * 2**20 + accumulated + saved


if __name__ == "__main__":
    main()
