"""The dense indexer loss as a streaming computation: tiles, latent keys, given lse, memory."""

import dataclasses

import pytest
import torch

from megatron_dsa.dsa_kernels import ExpandedKeys, IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.indexer_loss import torch_dense as dense_torch
from megatron_dsa.ops.indexer_loss.dense import query_blocks
from megatron_dsa.ops.indexer_loss.spec import DenseLossInputs
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.sharding import KeyOwnership, Sharding, sharded_layout
from megatron_dsa.testing.cases import visible_keys
from megatron_dsa.testing.comparison import INDEXER_LOSS
from megatron_dsa.testing.indexer_loss import expected_dense_loss
from tests.cases.indexer_loss import check
from tests.helpers import leaf, no_synchronisation, peak_bytes, relative_error
from tests.processes import run_ranks

SCALE = 0.37  # not 1, so that a scale applied twice shows
HEADS, DIM, SHARED, RANK, VALUE = 10, 12, 4, 6, 5  # more heads than are handled at once
#: 32 rows and 16 slots per tile in float64.
SMALL = Policy(workspace_bytes=300_000)


def rank_of_two(layout, batch, rank):
    """The layout of one of two zigzag ranks: two runs of rows, keys rank after rank."""
    sharding = Sharding(cp=2, cp_rank=rank)
    places = sharding.global_positions(layout.num_queries // batch, None, layout.start.device)
    return sharded_layout(layout, sharding, KeyOwnership(sharding, places, batch))


def packed(device):
    """Sequences of uneven lengths with padding, and a padded tail: rows that see nothing."""
    real = torch.tensor([0, 3, 20, 20, 41, 73], device=device, dtype=torch.int32)
    padded = torch.tensor([0, 8, 32, 32, 56, 90], device=device, dtype=torch.int32)
    return packed_layout(real, 96, 34, padded)


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(96, 1, device),
    "batch of 3": lambda device: bshd_layout(32, 3, device),
    "packed": packed,
    "a rank of two, batch of 2": lambda device: rank_of_two(bshd_layout(48, 2, device), 2, 1),
    # The first rows see nothing, slots stand for 4 positions.
    "compressed": lambda device: compressed_keys(bshd_layout(96, 1, device), 4, True).layout,
    "compressed, packed": lambda device: compressed_keys(packed(device), 4, True).layout,
}


def make(device, layout, dtype=torch.float64, keys="latent"):
    """Inputs, queries and keys of a layout."""

    def fixed(*shape, seed):
        return leaf(*shape, seed=seed, device=device, dtype=dtype).detach()

    rows, slots = layout.num_queries, layout.num_keys
    inputs = IndexerInputs(
        leaf(rows, 9, 8, seed=1, device=device, dtype=dtype),
        leaf(slots, 8, seed=2, device=device, dtype=dtype),
        leaf(rows, 9, seed=3, device=device, dtype=dtype, scale=0.3),
    )
    q = fixed(rows, HEADS, DIM, seed=4)
    if keys == "latent":
        latents = fixed(slots, RANK + SHARED, seed=5)
        return inputs, q, LatentKeys(latents, fixed(HEADS, DIM - SHARED, RANK, seed=6))
    if keys == "expanded":
        kv, k_pe = fixed(slots, HEADS, DIM - SHARED + VALUE, seed=5), fixed(slots, SHARED, seed=6)
        return inputs, q, ExpandedKeys(kv, k_pe, VALUE)
    return inputs, q, fixed(slots, 1 if keys == "one" else HEADS, DIM, seed=5)


def fresh(inputs):
    """The same inputs as new leaves."""
    tensors = (inputs.q, inputs.k, inputs.weights)
    return IndexerInputs(*(x.detach().requires_grad_() for x in tensors), inputs.relu)


def value_and_gradients(inputs, *args, **kwargs):
    inputs = fresh(inputs)
    loss = dense_indexer_loss(inputs, *args, softmax_scale=SCALE, **kwargs)
    loss.backward()
    return loss.detach(), inputs.q.grad, inputs.k.grad, inputs.weights.grad


def assert_same(got, want, tolerance):
    for name, x, y in zip(("value", "q", "k", "weights"), got, want, strict=True):
        assert relative_error(x, y) < tolerance, name


def every_key(k):
    """Keys [Skv, H, D], written out head by head."""
    if not isinstance(k, LatentKeys):
        return k.expand(-1, HEADS, -1)
    own = torch.einsum("sr,hdr->shd", k.latents[:, :RANK], k.w_uk)
    return torch.cat([own, k.latents[:, None, RANK:].expand(-1, HEADS, -1)], -1)


def attention_lse(q, k, mask, other=None):
    """Log-sum-exp [Sq, H] in float64, -inf for rows that see nothing."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), every_key(k).double()) * SCALE
    lse = scores.masked_fill_(~mask, float("-inf")).logsumexp(-1).t()
    return lse if other is None else torch.logaddexp(lse, other)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("keys", ["latent", "expanded", "one", "all"])
@pytest.mark.parametrize("relu", [True, False])
def test_against_autograd(device, name, keys, relu):
    layout = LAYOUTS[name](device)
    inputs, q, k = make(device, layout, keys=keys)
    inputs = dataclasses.replace(inputs, relu=relu)
    loss = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE, policy=SMALL)
    expected = expected_dense_loss(DenseLossInputs(inputs, layout, q, k, SCALE, None, 0))
    check(inputs, loss, expected, INDEXER_LOSS[torch.float64])


def test_value_without_gradients(device):
    """Under no_grad the value is the same; the loss trains the indexer only."""
    layout = LAYOUTS["packed"](device)
    inputs, q, k = make(device, layout, keys="one")
    q, k = q.requires_grad_(), k.requires_grad_()
    loss = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE)
    with torch.no_grad():
        value = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE)
    assert not value.requires_grad and torch.equal(value, loss.detach())
    loss.backward()
    assert q.grad is None and k.grad is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_given_lse(device, name):
    """The lse of a dense attention spares a pass; rows that see nothing may hold anything."""
    layout = LAYOUTS[name](device)
    inputs, q, k = make(device, layout)
    mask = visible_keys(layout)
    lse = attention_lse(q, k, mask)
    computed = value_and_gradients(inputs, q, k, layout, policy=SMALL)
    assert_same(value_and_gradients(inputs, q, k, layout, lse=lse, policy=SMALL), computed, 1e-12)
    for anything in (float("nan"), float("inf")):
        lse[~mask.any(-1)] = anything
        got = value_and_gradients(inputs, q, k, layout, lse=lse, policy=SMALL)
        assert_same(got, computed, 1e-12)


def test_given_lse_is_not_computed_again(device, monkeypatch):
    layout = LAYOUTS["one sequence"](device)
    inputs, q, k = make(device, layout)
    lse = attention_lse(q, k, visible_keys(layout))
    monkeypatch.setattr(dense_torch, "teacher_lse", None)
    value_and_gradients(inputs, q, k, layout, lse=lse)
    with pytest.raises(TypeError):
        value_and_gradients(inputs, q, k, layout)


@pytest.mark.parametrize(
    ("name", "workspace", "shape"),
    [
        ("compressed, packed", 1, (1, 1)),
        ("packed", 20_000, (4, 2)),
        ("batch of 3", 100_000, (16, 8)),
    ],
)
def test_size_of_tiles_changes_nothing(device, name, workspace, shape):
    """From one pair per tile to one tile per window."""
    layout = LAYOUTS[name](device)
    inputs, q, k = make(device, layout)
    given = DenseLossInputs(inputs, layout, q, k, SCALE, None, workspace)
    assert dense_torch.tile_shape(given) == shape
    want = value_and_gradients(inputs, q, k, layout, policy=Policy(workspace_bytes=2**30))
    got = value_and_gradients(inputs, q, k, layout, policy=Policy(workspace_bytes=workspace))
    assert_same(got, want, 1e-12)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_mass(device, name, given):
    """The rest of the softmax's denominator differs by head, so it changes the head sum.

    Without any it is -inf. Where it leaves no mass at all, a row has neither loss nor gradient.
    """
    layout = LAYOUTS[name](device)
    inputs, q, k = make(device, layout)
    mask = visible_keys(layout)
    other = leaf(layout.num_queries, HEADS, seed=8, device=device, dtype=torch.float64).detach() * 3
    other[::5, 2] = float("-inf")
    other[7] = float("-inf")
    other[30] = 1e5
    lse = attention_lse(q, k, mask) if given else None
    loss = dense_indexer_loss(
        inputs, q, k, layout, softmax_scale=SCALE, other_lse=other, lse=lse, policy=SMALL
    )
    expected = expected_dense_loss(DenseLossInputs(inputs, layout, q, k, SCALE, None, 0, other))
    assert (expected.q[30] == 0).all()
    check(inputs, loss, expected, INDEXER_LOSS[torch.float64])
    assert (inputs.q.grad[30] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(device, dtype):
    """Latent keys are rounded like those of the projection; many tiles cost no accuracy."""
    layout = LAYOUTS["one sequence"](device)
    inputs, q, k = make(device, layout, dtype)
    k = LatentKeys(k.latents, k.w_uk * 0.5)
    loss = dense_indexer_loss(inputs, q, k, layout, softmax_scale=SCALE, policy=SMALL)
    assert loss.dtype == torch.float32
    assert relative_error(k.expanded(), every_key(k)) < INDEXER_LOSS[torch.bfloat16]
    expected = expected_dense_loss(DenseLossInputs(inputs, layout, q, k, SCALE, None, 0))
    check(inputs, loss, expected, INDEXER_LOSS[dtype])


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
    ("make_layout", "most"),
    [
        (lambda device: bshd_layout(256, 1, device), 0.56),
        (lambda device: bshd_layout(128, 2, device), 0.32),
        # Rows see at most 32 of 256 slots, which the bounds know.
        (
            lambda device: packed_layout(
                torch.arange(0, 257, 32, dtype=torch.int32, device=device), 256, 32
            ),
            0.25,
        ),
    ],
    ids=["causal", "batch of 2", "packed"],
)
def test_pairs_that_cannot_see_each_other_are_skipped(device, monkeypatch, make_layout, most):
    layout = make_layout(device)
    inputs, q, k = make(device, layout)
    sizes = []

    def counting(q, keys, lse, scale, tile=dense_torch.teacher_tile):
        sizes.append(q.shape[0] * keys.latents.shape[0])
        return tile(q, keys, lse, scale)

    monkeypatch.setattr(dense_torch, "teacher_tile", counting)
    monkeypatch.setattr(dense_torch, "tile_shape", lambda inputs: (32, 16))
    value_and_gradients(inputs, q, k, layout)
    assert len(sizes) > 20
    assert int(visible_keys(layout).sum()) <= sum(sizes) < most * 256**2


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
    """Above results and saved gradients there is no more than the workspace, for any length."""
    budget = 800_000
    for length in (320, 480):
        layout = bshd_layout(length // batch, batch, device)
        inputs, q, k = make(device, layout, dtype, keys)
        arguments = DenseLossInputs(inputs.detach(), layout, q, k, SCALE, None, budget)
        rows, width = dense_torch.tile_shape(arguments)
        assert rows < length // batch  # several blocks
        losses = []  # kept alive, with what they save
        peak = peak_bytes(
            device, lambda p=arguments, kept=losses: kept.append(dense_torch.dense(p))
        )
        wide = torch.promote_types(dtype, torch.float32).itemsize
        products = dense_torch.HEADS_AT_ONCE * wide  # per pair
        tensors = (inputs.q, inputs.k, inputs.weights)
        accumulated = (inputs.k.numel() + inputs.k.shape[1] + inputs.weights.numel()) * wide
        saved = sum(x.numel() * x.element_size() for x in tensors)
        assert peak > rows * width * products  # a tile's, or nothing was measured
        assert peak < budget + accumulated + saved
        assert budget < length * length // batch * products  # all pairs' would not fit


def test_many_rows_share_expanded_keys():
    """With V3.2's shapes a key is expanded once per at least 512 query rows, if memory allows."""

    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    inputs = IndexerInputs(empty(8192, 64, 128), empty(8192, 128), empty(8192, 64))
    keys = LatentKeys(empty(8192, 576), empty(128, 128, 512))
    layout = bshd_layout(8192, 1, torch.device("cpu"))
    arguments = DenseLossInputs(
        inputs, layout, empty(8192, 128, 192), keys, 1.0, None, Policy().workspace_bytes
    )
    for mib, least in ((256, 1024), (64, 512), (1, 8)):
        part = dataclasses.replace(arguments, workspace_bytes=mib * 2**20)
        rows, width = dense_torch.tile_shape(part)
        assert rows >= least
        assert dense_torch.tile_bytes(part)(rows, width) <= mib * 2**20


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
    """Value and gradients, of this rank's half of the heads if there is a group."""
    layout_name, given, has_other = GROUP_CASES[name]
    layout = LAYOUTS[layout_name](torch.device("cpu"))
    inputs, q, k = make("cpu", layout)
    other = leaf(layout.num_queries, HEADS, seed=8, dtype=torch.float64).detach() * 3
    other[30] = 1e5
    # Mass on these keys exists on the second rank only.
    other[31, : HEADS // 2] = 1e5
    lse = attention_lse(q, k, visible_keys(layout)) if given else None
    heads = slice(None)
    if group is not None:
        (heads,) = list(slices(HEADS, HEADS // 2))[group.rank() :][:1]
        k = LatentKeys(k.latents, k.w_uk[heads])
    return value_and_gradients(
        inputs,
        q[:, heads],
        k,
        layout,
        other_lse=other[:, heads] if has_other else None,
        lse=None if lse is None else lse[:, heads],
        head_group=group,
        policy=SMALL,
    )


def test_heads_of_a_group(tmp_path):
    """The teacher is summed over ranks, tile by tile, and normalised by the mass of all heads."""
    run_ranks(_one_of_two_ranks, (str(tmp_path / "s"), str(tmp_path)), 2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name in GROUP_CASES:
        want = _of_group(name, None)
        for rank in ranks:
            assert_same(rank[name], want, 1e-12)


@pytest.mark.gpu
def test_no_host_synchronisation():
    device = torch.device("cuda")
    layouts = [make_layout(device) for make_layout in LAYOUTS.values()]
    cases = [(layout, *make(device, layout, torch.bfloat16)) for layout in layouts]
    with no_synchronisation():
        for layout, inputs, q, k in cases:
            value_and_gradients(inputs, q, k, layout, policy=SMALL)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse": zeros(96, 2)}, "^lse must be"),
        ({"other_lse": zeros(96, 2)}, "^other_lse must be"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive"),
        ({"k": zeros(96, 3, DIM)}, "k must have 1 or"),
        ({"k": LatentKeys(zeros(96, 10), zeros(3, 8, 6))}, "k must have latents"),
        ({"k": LatentKeys(zeros(96, 9), zeros(HEADS, 8, 6))}, "k must have latents"),
        ({"k": LatentKeys(zeros(96, 10).half(), zeros(HEADS, 8, 6))}, "in q's dtype"),
        ({"k": ExpandedKeys(zeros(96, 3, 13), zeros(96, 4), 5)}, r"k.kv must be \[Skv, 10, 13\]"),
        ({"k": ExpandedKeys(zeros(96, HEADS, 12), zeros(96, 4), 5)}, "k.kv must be"),
        ({"k": ExpandedKeys(zeros(96, HEADS, 13), zeros(95, 4), 5)}, "k.k_pe must be"),
        ({"k": ExpandedKeys(zeros(96, HEADS, 13), zeros(96, 4).half(), 5)}, "k.k_pe must have"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    layout = bshd_layout(96, 1, torch.device("cpu"))
    inputs, q, k = make("cpu", layout)
    arguments = {"q": q, "k": k, "layout": layout, "softmax_scale": 1.0} | change
    with pytest.raises(ConfigError, match=message):
        dense_indexer_loss(inputs, **arguments)
