"""The Triton kernels of the dense indexer loss: interpreted, compiled, and on a GPU.

Numbers in docstrings are rows of the list of bugs that other systems shipped.
"""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.dispatch import Policy, report, reset_report
from megatron_dsa.dispatch.support import OpCall
from megatron_dsa.dsa_kernels import IndexerInputs, LatentKeys, dense_indexer_loss
from megatron_dsa.ops.indexer_loss import reference
from megatron_dsa.ops.indexer_loss.declaration import DENSE_LOSS
from megatron_dsa.ops.indexer_loss.inputs import DenseLossInputs
from megatron_dsa.ops.indexer_topk.reference import index_scores
from megatron_dsa.sequence.compressed import compressed_keys
from megatron_dsa.sequence.layout import bshd_layout, packed_layout
from tests.helpers import double_leaf, leaf, relative_error
from tests.unit.ops.test_compressor import Recorder, assembly, interpret, prepare_interpreter
from tests.unit.ops.test_indexer_loss import visible_rows

MODULE = "megatron_dsa.ops.indexer_loss.triton.dense"
SCALE = 0.11  # not 1, so that a scale applied twice shows
KERNELS = {
    "teacher": ("head_sums", "head_lse"),
    "student": ("student_lse", "student_loss"),
    "gradients": ("query_gradient", "key_gradient", "finish_rows"),
}
#: Bytes of shared memory that a thread block can have.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


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
    """Return inputs of the largest workspace; scores have a deviation of about 1."""
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
    return DenseLossInputs(inputs, layout, q, k, SCALE, None, 2**28)


def expected(inputs):
    """Return value and gradients in float64."""
    x, k = inputs.indexer, inputs.k
    if isinstance(k, LatentKeys):
        k = k.expanded()  # rounded as those of the projection
    copies = IndexerInputs(*map(double_leaf, (x.q, x.k, x.weights)), x.relu)
    mask = visible_rows(inputs.layout)
    if inputs.other_lse is None:
        teacher = reference.dense_teacher(inputs.q.double(), k.double(), mask, SCALE)
    else:
        logits = torch.einsum("qhd,khd->qhk", inputs.q.double(), k.double()) * SCALE
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        total = torch.logaddexp(logits.logsumexp(-1), inputs.other_lse.double())[..., None]
        teacher = torch.where(mask[:, None], (logits - total).exp(), 0.0).sum(1)
    scores = index_scores(copies.q, copies.k, copies.weights, copies.relu)
    value = reference.kl_sum(scores, teacher, mask)
    value.backward()
    return value.detach(), copies.q.grad, copies.k.grad, copies.weights.grad


def computed(arguments, run=None):
    """Return value and gradients of ``run``, of dispatch's choice if it is None."""
    tensors = (arguments.indexer.q, arguments.indexer.k, arguments.indexer.weights)
    inputs = IndexerInputs(*(x.detach().requires_grad_() for x in tensors), arguments.indexer.relu)
    arguments = dataclasses.replace(arguments, indexer=inputs)
    if run is None:
        reset_report()
        value = dense_indexer_loss(
            inputs, arguments.q, arguments.k, arguments.layout, softmax_scale=SCALE,
            other_lse=arguments.other_lse, lse=arguments.lse,
            policy=Policy(workspace_bytes=arguments.workspace_bytes),
        )  # fmt: skip
        assert report()["dense_indexer_loss"] == {"triton": 1}
    else:
        value = run(arguments)
    value.backward()
    return value.detach(), inputs.q.grad, inputs.k.grad, inputs.weights.grad


def check(got, want, of_value, of_gradients):
    names = ("value", "q", "k", "weights")
    limits = (of_value, *3 * [of_gradients])
    for name, x, y, limit in zip(names, got, want, limits, strict=True):
        assert relative_error(x, y) < limit, name


def with_others(inputs):
    """Mass besides the keys that differs by head; none in some rows, nothing else in others."""
    rows, heads = inputs.q.shape[:2]
    other = leaf(rows, heads, seed=8, device=inputs.q.device).detach() * 3
    other[::5, -1] = float("-inf")
    other[7] = float("-inf")
    other[30] = 1e5
    return dataclasses.replace(inputs, other_lse=other)


def with_lse(inputs):
    """Given log-sum-exps, with anything in rows that see nothing."""
    k = inputs.k.expanded() if isinstance(inputs.k, LatentKeys) else inputs.k
    mask = visible_rows(inputs.layout)
    logits = torch.einsum("qhd,khd->qhk", inputs.q.double(), k.double()) * SCALE
    lse = logits.masked_fill(~mask[:, None], float("-inf")).logsumexp(-1).float()
    lse[~mask.any(-1)] = float("nan")
    return dataclasses.replace(inputs, lse=lse)


def test_triton_interpreted():
    """All kernels in fp32, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter: tiles of 64 x 64 pairs, programs of 32 x 32."""
    triton_dense = importlib.import_module(MODULE)
    prepare_interpreter()
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
        (uneven, small, "all", lambda inputs: dataclasses.replace(inputs, head_group=group)),
        (uneven, Shape(), "latent", with_nan),
        (compressed_keys(uneven, 4, True).layout, Shape(), "one", with_others),
        (compressed_keys(bshd_layout(96, 1, cpu), 4, True).layout, small, "one", without_relu),
    ):
        inputs = make(layout, shape, torch.float32, keys)
        want = expected(change(inputs) if change is not with_nan else inputs)
        inputs = change(inputs)
        # Two heads are expanded at a time.
        inputs = dataclasses.replace(inputs, workspace_bytes=2**15)
        assert triton_dense.tile_shape(inputs)[1] < 3
        got = computed(inputs, triton_dense.dense)
        check(got, want, 1e-5, 1e-5)
        with torch.no_grad():
            assert torch.equal(triton_dense.dense(inputs), got[0])


def without_relu(inputs):
    return dataclasses.replace(inputs, indexer=dataclasses.replace(inputs.indexer, relu=False))


def with_nan(inputs):
    """2: rows that see nothing, and keys that nobody sees, hold NaN."""
    layout, x = inputs.layout, inputs.indexer.detach()
    unseen_rows, unseen_keys = layout.start == layout.end, ~visible_rows(layout).any(0)
    assert unseen_rows.any() and unseen_keys.any()

    def spoilt(tensor, rows):
        return tensor.clone().index_fill_(0, rows.nonzero().squeeze(1), float("nan"))

    k = inputs.k
    return dataclasses.replace(
        inputs,
        indexer=IndexerInputs(
            spoilt(x.q, unseen_rows), spoilt(x.k, unseen_keys), spoilt(x.weights, unseen_rows),
            x.relu,
        ),
        q=spoilt(inputs.q, unseen_rows),
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
    ours = next(c for c in DENSE_LOSS.candidates if c.name == "triton")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "dtype": torch.bfloat16}
    call = OpCall(device="cuda", capability=(9, 0), **shape)
    for changes in ({}, {"heads": 1}, {"relu": False}, {"packed": True}, {"deterministic": True}):
        assert ours.reason(dataclasses.replace(call, **changes)) is None, changes
    for changes, reason in (
        ({"dtype": torch.float16}, "needs bf16"),
        ({"heads": 65}, "takes 1 to 64 heads"),
        ({"qk_dim": 64}, "needs dims"),
        ({"device": "cpu", "capability": None}, "wrong GPU"),
    ):
        assert reason in ours.reason(dataclasses.replace(call, **changes)), changes


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
    arguments = DenseLossInputs(inputs, layout, q, keys, 1.0, None, mib * 2**20)
    (rows, width), heads = triton_dense.tile_shape(arguments)
    assert rows >= least and width >= least // 4
    assert triton_dense.tile_bytes(arguments, heads)(rows, width) <= mib * 2**20


if __name__ == "__main__":
    main()
