"""Conformance of the dense indexer loss: every implementation against float64, tiles, memory."""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.dsa_kernels import ExpandedKeys, IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_loss import torch_dense as dense_torch
from megatron_dsa.ops.indexer_loss.dense import query_blocks
from megatron_dsa.ops.indexer_loss.spec import DENSE_LOSS, DenseLossInputs
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.sharding import KeyOwnership, Sharding, sharded_layout
from megatron_dsa.testing.cases import visible_keys
from megatron_dsa.testing.comparison import INDEXER_LOSS
from megatron_dsa.testing.indexer_loss import expected_dense_loss
from tests.cases.dense_loss import (
    HOPPER,
    MODULE,
    SCALE,
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
from tests.helpers import no_synchronisation, peak_bytes, relative_error
from tests.processes import run_ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXACT = INDEXER_LOSS[torch.float64]
KERNELS = {
    "teacher": ("head_sums", "head_lse"),
    "student": ("student_lse", "student_loss"),
    "gradients": ("query_gradient", "key_gradient", "finish_queries"),
}
#: Bytes of shared memory of a thread block.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: Tiles of 32 queries and 16 slots in float64.
BUDGET = 300_000
#: Heads and dims of torch's cases: more heads than are handled at once.
SMALL = Shape(9, 8, 10, 12, 8, 6, 5)


def rank_of_two(layout, batch, rank):
    """Return the layout of one of two zigzag ranks: two runs of tokens, keys rank by rank."""
    sharding = Sharding(cp=2, cp_rank=rank)
    places = sharding.global_positions(layout.num_queries // batch, None, layout.start.device)
    return sharded_layout(layout, sharding, KeyOwnership(sharding, places, batch))


def packed(device, real=(0, 3, 20, 20, 41, 73), apart=(0, 8, 32, 32, 56, 90), tokens=96):
    """Return uneven sequences with padding, and a padded tail: queries without keys."""
    real, apart = (torch.tensor(x, device=device, dtype=torch.int32) for x in (real, apart))
    return packed_layout(real, tokens, int(real.diff().max()), apart)


def packed_on_gpu(device):
    return packed(device, (0, 5, 5, 170, 171, 270, 540), (0, 8, 16, 184, 192, 301, 600), 650)


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(96, 1, device),
    "batch of 3": lambda device: bshd_layout(32, 3, device),
    "packed": packed,
    "a rank of two, batch of 2": lambda device: rank_of_two(bshd_layout(48, 2, device), 2, 1),
    # The first queries see nothing, slots stand for 4 positions.
    "compressed": lambda device: compressed_keys(bshd_layout(96, 1, device), 4, True).layout,
    "compressed, packed": lambda device: compressed_keys(packed(device), 4, True).layout,
}
#: For kernels: lengths that no tile divides.
LARGE = {
    "one sequence": lambda device: bshd_layout(333, 1, device),
    "batch of 3": lambda device: bshd_layout(150, 3, device),
    "packed": packed_on_gpu,
    "compressed": lambda device: compressed_keys(bshd_layout(700, 1, device), 4, True).layout,
    "compressed, packed": lambda device: compressed_keys(packed_on_gpu(device), 4, True).layout,
}

V32 = Shape(64, 128, 16, 192, 128, 512)
FEW = Shape(5, 128, 3, 100, 36, 40)
ABSORBED = Shape(32, 128, 16, 576)
GLM = Shape(32, 128, 8, 256, 192, 512, 256)
WIDE = dataclasses.replace(V32, value=128)
#: Dims, keys, implementation.
FUSED = {
    "latent": (V32, "latent", "triton"),
    "absorbed": (ABSORBED, "one", "triton"),
    "every head": (dataclasses.replace(V32, dim=64), "all", "triton"),
    "odd dims": (FEW, "latent", "triton"),
    "expanded": (WIDE, "expanded", "triton"),
    "odd dims, expanded": (FEW, "expanded", "triton"),
    "ours, latent": (V32, "latent", "tilelang"),
    "ours, expanded": (WIDE, "expanded", "tilelang"),
    "ours, every head": (V32, "all", "tilelang"),
    "ours, one key head": (V32, "one", "tilelang"),
    "ours, GLM-5's latent": (GLM, "latent", "tilelang"),
    "ours, GLM-5's expanded": (GLM, "expanded", "tilelang"),
}
#: Dims for options and NaN.
SOME = ("latent", "absorbed", "ours, latent", "ours, expanded")
OPTIONS = {"others": with_others, "lse": with_lse, "no relu": without_relu}


def small(device, layout, dtype=torch.float64, keys="latent", workspace=BUDGET):
    inputs = make(LAYOUTS[layout](device), SMALL, dtype, keys)
    return dataclasses.replace(inputs, workspace_bytes=workspace)


def same(got, want, tolerance):
    for name, x, y in zip(("value", "q", "k", "weights"), got, want, strict=True):
        assert relative_error(x, y) < tolerance, name


@pytest.fixture
def ours():
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "teacher_dim": 192}
    for candidate in DENSE_LOSS.candidates:
        if candidate.name in ("tilelang", "triton"):
            reason = candidate.reason(describe_call("cuda", dtype=torch.bfloat16, **shape))
            if reason is not None:
                pytest.skip(reason)
    return CUDA


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("keys", ["latent", "expanded", "one", "all"])
@pytest.mark.parametrize("option", ["none", *OPTIONS])
def test_torch(device, name, keys, option):
    inputs = small(device, name, keys=keys)
    if option == "lse":
        for anything in (float("nan"), float("inf")):
            changed = with_lse(inputs, anything)
            check(computed(changed, name="torch"), expected_dense_loss(inputs), EXACT, EXACT)
        return
    inputs = OPTIONS.get(option, lambda x: x)(inputs)
    expected = expected_dense_loss(inputs)
    got = computed(inputs, name="torch")
    check(got, expected, EXACT, EXACT)
    if option == "others":
        assert (expected.q[30] == 0).all() and (got[1][30] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(device, dtype):
    """Latent keys are rounded like the projection's; many tiles cost no accuracy."""
    inputs = small(device, "one sequence", dtype)
    got = computed(inputs, name="torch")
    assert got[0].dtype == torch.float32
    check(got, expected_dense_loss(inputs), 1e-5, INDEXER_LOSS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("case", FUSED)
def test_fused(ours, case, name):
    shape, keys, implementation = FUSED[case]
    inputs = make(LARGE[name](ours), shape, torch.bfloat16, keys)
    want = expected_dense_loss(inputs)
    for workspace in (2**28, 1):
        part = dataclasses.replace(inputs, workspace_bytes=workspace)
        check(computed(part, name=implementation), want, 1e-3, 1e-2)


def value_of(inputs, implementation):
    """Return the value under no_grad."""
    policy = Policy(
        workspace_bytes=inputs.workspace_bytes, named=(("dense_indexer_loss", implementation),)
    )
    with torch.no_grad():
        value = dense_indexer_loss(
            inputs.indexer, inputs.q, inputs.k, inputs.layout, softmax_scale=SCALE,
            other_lse=inputs.other_lse, lse=inputs.lse, policy=policy,
        )  # fmt: skip
    assert not value.requires_grad
    return value


@pytest.mark.gpu
@pytest.mark.parametrize("change", OPTIONS.values())
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("case", SOME)
def test_options_of_fused(ours, case, name, change):
    shape, keys, implementation = FUSED[case]
    inputs = change(make(LARGE[name](ours), shape, torch.bfloat16, keys))
    got = computed(inputs, name=implementation)
    check(got, expected_dense_loss(dataclasses.replace(inputs, lse=None)), 1e-3, 1e-2)
    assert torch.equal(value_of(inputs, implementation), got[0])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "tilelang"])
def test_all_heads_of_the_model(ours, implementation):
    shape = dataclasses.replace(V32, heads=128)
    inputs = make(bshd_layout(1100, 1, ours), shape, torch.bfloat16, "latent")
    inputs = dataclasses.replace(inputs, workspace_bytes=2**25)
    assert importlib.import_module(MODULE).tile_shape(inputs)[1] < 128
    check(computed(inputs, name=implementation), expected_dense_loss(inputs), 1e-3, 1e-2)


def test_triton_interpreted():
    interpret(__file__)


def main():
    """Run in the interpreter: tiles of 64 x 64 pairs, programs of 32 x 32."""
    triton_dense = importlib.import_module(MODULE)
    prepare_interpreter()
    names = [name for names in KERNELS.values() for name in names]
    triton_dense.LAUNCHES = {0: dict.fromkeys(names, triton_dense.Launch(32, 32, 1))}
    triton_dense.BLOCK, triton_dense.LONGEST_EDGE, triton_dense.FEWEST_HEADS = 32, 64, 2
    few, uneven = Shape(dim=12, own=8, rank=6), packed(CPU)
    group = _group_of_one()
    for layout, shape, keys, change in (
        (bshd_layout(90, 1, CPU), Shape(), "latent", with_others),
        (bshd_layout(41, 2, CPU), few, "latent", with_lse),
        (uneven, few, "all", lambda inputs: dataclasses.replace(inputs, head_group=group)),
        (uneven, Shape(), "latent", with_nan),
        (bshd_layout(41, 2, CPU), Shape(), "expanded", with_lse),
        (uneven, few, "expanded", with_nan),
        (compressed_keys(uneven, 4, True).layout, Shape(), "one", with_others),
        (compressed_keys(bshd_layout(96, 1, CPU), 4, True).layout, few, "one", without_relu),
    ):
        inputs = make(layout, shape, torch.float32, keys)
        want = expected_dense_loss(change(inputs) if change is not with_nan else inputs)
        # Two heads are expanded at a time.
        inputs = dataclasses.replace(change(inputs), workspace_bytes=2**15)
        assert triton_dense.tile_shape(inputs)[1] < 3
        got = computed(inputs, triton_dense.dense)
        check(got, want, 1e-5, 1e-5)
        with torch.no_grad():
            without = triton_dense.dense(dataclasses.replace(inputs, want_gradients=False))
            assert torch.equal(without.value, got[0]) and without.gradients is None


def _group_of_one():
    """A process group whose sums change nothing, but require whole teachers."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return torch.distributed.group.WORLD


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["packed", "compressed, packed"])
@pytest.mark.parametrize("case", SOME)
def test_nan_that_nobody_sees(ours, case, name):
    """It must not change any bit."""
    shape, keys, implementation = FUSED[case]
    inputs = make(LARGE[name](ours), shape, torch.bfloat16, keys)
    both = (computed(x, name=implementation) for x in (with_nan(inputs), inputs))
    for got, want in zip(*both, strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "tilelang"])
def test_nan_that_somebody_sees(ours, implementation):
    """It must show in the loss: in a query, a latent. NaN in index scores is rejected."""
    inputs = make(bshd_layout(200, 1, ours), V32, torch.bfloat16, "latent")
    for tensor in (inputs.q, inputs.k.latents):
        before = tensor.detach()[100].clone()
        tensor.detach()[100] = float("nan")
        assert computed(inputs, name=implementation)[0].isnan()
        tensor.detach()[100] = before
    assert computed(inputs, name=implementation)[0].isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["latent", "ours, latent", "ours, expanded"])
def test_bitwise_repeatable(ours, case):
    shape, keys, implementation = FUSED[case]
    inputs = make(packed_on_gpu(ours), shape, torch.bfloat16, keys)
    first = computed(inputs, name=implementation)
    for _ in range(20):
        assert all(map(torch.equal, computed(inputs, name=implementation), first))


@pytest.mark.gpu
def test_no_host_synchronisation(ours):
    several = [
        (make(layout(ours), shape, torch.bfloat16, keys), name)
        for layout in LARGE.values()
        for shape, keys, name in FUSED.values()
    ]
    for inputs, name in several[: len(FUSED)]:
        computed(inputs, name=name)
    several += [(small(ours, name, torch.bfloat16), "torch") for name in LAYOUTS]
    with no_synchronisation():
        for inputs, name in several:
            computed(inputs, name=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "index_heads", "heads", "dim"), [(2**18 + 5, 64, 1, 64), (70_000, 2, 128, 256)]
)
def test_many_rows(ours, rows, index_heads, heads, dim):
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
    arguments = DenseLossInputs(inputs, packed_layout(ends, rows, length), q, k, SCALE, None, 2**28)
    ours_alone = IndexerInputs(inputs.q[last:], inputs.k[last:], inputs.weights[last:])
    layout = packed_layout(ends[-6:] - last, rows - last, length)
    alone = DenseLossInputs(ours_alone, layout, q[last:], k[last:], SCALE, None, 2**28)
    got, want = computed(arguments), computed(alone)
    for x, y in zip(got[1:], want[1:], strict=True):
        assert y.abs().sum() > 0 and relative_error(x[last:], y) < 1e-3
    assert got[0].isfinite()


@pytest.mark.parametrize(
    ("name", "workspace", "shape"),
    [
        ("compressed, packed", 1, (1, 1)),
        ("packed", 20_000, (4, 2)),
        ("batch of 3", 100_000, (16, 8)),
    ],
)
def test_size_of_tiles_changes_nothing(device, name, workspace, shape):
    inputs, whole = (small(device, name, workspace=x) for x in (workspace, 2**30))
    assert dense_torch.tile_shape(inputs) == shape
    same(*(computed(x, name="torch") for x in (inputs, whole)), 1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (16, 16), (64, 8), (7, 1024)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_cover_what_is_visible_once(device, name, shape):
    layout = LAYOUTS[name](device)
    slots = torch.arange(layout.num_keys, device=device)
    visible = (slots >= layout.start[:, None]) & (slots < layout.end[:, None])
    covered = torch.zeros_like(visible, dtype=torch.int32)
    for block in query_blocks(layout, shape[0]):
        rows = torch.arange(layout.num_queries, device=device)[block.tokens]
        assert 0 < rows.numel() <= shape[0]
        for tile in block.tiles(shape[1]):
            covered[tile.tokens, tile.slots] += 1
            assert covered[tile.tokens, tile.slots].shape[1] <= shape[1]
            own = torch.arange(layout.num_queries, device=device)[tile.tokens]
            assert torch.equal(rows[tile.inside], own)
    assert int(covered.max()) == 1
    assert (covered[visible] == 1).all()


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (bshd_layout(256, 1, CPU), 0.56),
        (bshd_layout(128, 2, CPU), 0.32),
        # Queries see at most 32 of 256 slots, which bounds exploit.
        (packed_layout(torch.arange(0, 257, 32, dtype=torch.int32), 256, 32), 0.25),
    ],
    ids=["causal", "batch of 2", "packed"],
)
def test_pairs_that_cannot_see_each_other_are_skipped(monkeypatch, layout, most):
    sizes = []

    def counting(q, keys, lse, scale, tile=dense_torch.teacher_tile):
        sizes.append(q.shape[0] * keys.latents.shape[0])
        return tile(q, keys, lse, scale)

    monkeypatch.setattr(dense_torch, "teacher_tile", counting)
    monkeypatch.setattr(dense_torch, "tile_shape", lambda inputs: (32, 16))
    computed(make(layout, SMALL, torch.float64, "latent"), name="torch")
    assert len(sizes) > 20
    assert int(visible_keys(layout).sum()) <= sum(sizes) < most * 256**2


def test_given_lse_is_not_computed_again(device, monkeypatch):
    inputs = small(device, "one sequence")
    given = with_lse(inputs)
    monkeypatch.setattr(dense_torch, "teacher_lse", None)
    computed(given, name="torch")
    with pytest.raises(TypeError):
        computed(inputs, name="torch")


def test_value_without_gradients(device):
    inputs = small(device, "packed", keys="one")
    inputs.q.requires_grad_(), inputs.k.requires_grad_()
    assert torch.equal(value_of(inputs, "torch"), computed(inputs, name="torch")[0])
    assert inputs.q.grad is None and inputs.k.grad is None


def fits(inputs, run, wide):
    """Check the peak: at most the workspace above results and saved gradients."""
    x, kept = inputs.indexer, []  # losses are kept alive, with saved tensors
    peak = peak_bytes(x.q.device, lambda: kept.append(run(inputs)))
    accumulated = (x.k.numel() + x.k.shape[1] + x.weights.numel()) * wide
    saved = sum(t.numel() * t.element_size() for t in (x.q, x.k, x.weights))
    assert 0 < peak < inputs.workspace_bytes + accumulated + saved
    return peak


@pytest.mark.parametrize(
    ("keys", "batch", "dtype"),
    [
        ("latent", 1, torch.float64),
        ("latent", 2, torch.bfloat16),
        ("expanded", 2, torch.bfloat16),
        ("all", 2, torch.float64),
    ],
)
def test_temporaries_fit_the_workspace(device, keys, batch, dtype):
    budget = 800_000
    for length in (320, 480):
        inputs = make(bshd_layout(length // batch, batch, device), SMALL, dtype, keys)
        inputs = dataclasses.replace(inputs, workspace_bytes=budget)
        rows, width = dense_torch.tile_shape(inputs)
        assert rows < length // batch  # several blocks
        wide = torch.promote_types(dtype, torch.float32).itemsize
        products = dense_torch.HEADS_AT_ONCE * wide  # per pair
        # A tile's at least, or nothing was measured.
        assert fits(inputs, dense_torch.dense, wide) > rows * width * products
        assert budget < length * length // batch * products  # all pairs' would not fit


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("keys", ["latent", "expanded"])
@pytest.mark.parametrize("module", [MODULE, HOPPER])
@pytest.mark.parametrize("mib", [64, 256])
def test_temporaries_of_fused_fit_the_workspace(ours, mib, module, keys, batch):
    shape = dataclasses.replace(WIDE, heads=128)
    for length in (3000, 5000):
        inputs = make(bshd_layout(length // batch, batch, ours), shape, torch.bfloat16, keys)
        inputs = dataclasses.replace(inputs, workspace_bytes=mib * 2**20)
        fits(inputs, importlib.import_module(module).dense, 4)


def v32_inputs():
    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    inputs = IndexerInputs(empty(8192, 64, 128), empty(8192, 128), empty(8192, 64))
    keys = LatentKeys(empty(8192, 576), empty(128, 128, 512))
    layout = bshd_layout(8192, 1, CPU)
    return DenseLossInputs(inputs, layout, empty(8192, 128, 192), keys, 1.0, None, 0)


@pytest.mark.parametrize(
    ("module", "mib", "least"),
    [(dense_torch.__name__, mib, least) for mib, least in ((256, 1024), (64, 512), (1, 8))]
    + [(MODULE, mib, least) for mib, least in ((256, 2048), (64, 512), (8, 128))],
)
def test_many_rows_share_expanded_keys(module, mib, least):
    module = pytest.importorskip(module)
    inputs = dataclasses.replace(v32_inputs(), workspace_bytes=mib * 2**20)
    if module is dense_torch:
        (rows, width), count = dense_torch.tile_shape(inputs), ()
    else:
        (rows, width), *count = module.tile_shape(inputs)
        assert width >= least // 4
    assert rows >= least
    assert module.tile_bytes(inputs, *count)(rows, width) <= mib * 2**20


def _one_of_two_ranks(rank, store, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    results = {name: _of_group(name, torch.distributed.group.WORLD) for name in GROUP_CASES}
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


#: Layout, and whether lse and other_lse are given.
GROUP_CASES = {
    "computed": ("batch of 3", False, False),
    "other mass": ("compressed, packed", False, True),
    "lse and other mass": ("packed", True, True),
}


def _of_group(name, group):
    """Return value and gradients, of this rank's half of the heads if there is a group."""
    layout, given, has_other = GROUP_CASES[name]
    inputs = small(CPU, layout)
    heads = SMALL.heads
    if has_other:
        inputs = with_others(inputs)
        # Mass on these keys exists on the second rank only.
        inputs.other_lse[31, : heads // 2] = 1e5
    if given:
        inputs = with_lse(inputs)
    if group is not None:
        some = list(slices(heads, heads // 2))[group.rank()]
        inputs = dataclasses.replace(
            inputs, q=inputs.q[:, some], k=LatentKeys(inputs.k.latents, inputs.k.w_uk[some]),
            other_lse=inputs.other_lse[:, some] if has_other else None,
            lse=inputs.lse[:, some] if given else None, head_group=group,
        )  # fmt: skip
    return computed(inputs, name="torch")


def test_heads_of_a_group(tmp_path):
    """The teacher must be summed over ranks per tile, and normalised by all heads' mass."""
    run_ranks(_one_of_two_ranks, (str(tmp_path / "s"), str(tmp_path)), 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name in GROUP_CASES:
        want = _of_group(name, None)
        for rank in ranks:
            same(rank[name], want, 1e-12)


def recorded(monkeypatch, triton_dense):
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
    triton_dense = pytest.importorskip(MODULE)
    shared = max(x for x in triton_dense.LAUNCHES if x <= SHARED[capability])
    monkeypatch.setattr(triton_dense, "launches", lambda device: triton_dense.LAUNCHES[shared])
    recorders = recorded(monkeypatch, triton_dense)
    shape = Shape(64, 128, 4, 192, 128, 512) if keys == "latent" else Shape(64, 128, 4, 576)
    triton_dense.dense(make(bshd_layout(256, 1, CPU), shape, torch.bfloat16, keys))
    for name, recorder in recorders.items():
        compiled = assembly(recorder.kernel, *recorder.launches[0], capability)
        ptx = compiled.asm["ptx"]
        assert compiled.metadata.shared <= SHARED[capability], name
        if name == "finish_queries":
            continue
        assert "cp.async" in ptx, name
        if capability == 90:
            assert "wgmma.mma_async" in ptx and "mma.sync.aligned.m16" not in ptx, name


def test_which_calls_triton_takes():
    pytest.importorskip("triton")
    triton = next(c for c in DENSE_LOSS.candidates if c.name == "triton")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "dtype": torch.bfloat16}
    call = OpCall(device="cuda", capability=(9, 0), **shape)
    for changes in ({}, {"heads": 1}, {"relu": False}, {"packed": True}, {"deterministic": True}):
        assert triton.reason(dataclasses.replace(call, **changes)) is None, changes
    for changes, reason in (
        ({"dtype": torch.float16}, "needs bf16"),
        ({"heads": 65}, "takes 1 to 64 heads"),
        ({"qk_dim": 64}, "needs dims"),
        ({"device": "cpu", "capability": None}, "wrong GPU"),
    ):
        assert reason in triton.reason(dataclasses.replace(call, **changes)), changes


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": zeros(96, 2)}, "^lse must be"),
        ({"other_lse": zeros(96, 2)}, "^other_lse must be"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive"),
        ({"k": zeros(96, 3, 12)}, "k must have 1 or"),
        ({"k": LatentKeys(zeros(96, 10), zeros(3, 8, 6))}, "k must have latents"),
        ({"k": LatentKeys(zeros(96, 9), zeros(10, 8, 6))}, "k must have latents"),
        ({"k": LatentKeys(zeros(96, 10).half(), zeros(10, 8, 6))}, "in q's dtype"),
        ({"k": ExpandedKeys(zeros(96, 3, 13), zeros(96, 4), 5)}, r"k.kv must be \[Skv, 10, 13\]"),
        ({"k": ExpandedKeys(zeros(96, 10, 12), zeros(96, 4), 5)}, "k.kv must be"),
        ({"k": ExpandedKeys(zeros(96, 10, 13), zeros(95, 4), 5)}, "k.k_pe must be"),
        ({"k": ExpandedKeys(zeros(96, 10, 13), zeros(96, 4).half(), 5)}, "k.k_pe must have"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    inputs = small(CPU, "one sequence")
    arguments = {"q": inputs.q, "k": inputs.k, "layout": inputs.layout, "softmax_scale": 1.0}
    with pytest.raises(ConfigError, match=message):
        dense_indexer_loss(inputs.indexer, **arguments | change)


if __name__ == "__main__":
    main()
