"""Ring attention on several ranks equals attention in one process, with the expected traffic."""

import pytest
import torch
from torch import distributed

from megatron_dsa.errors import ConfigError, ImplementationError
from megatron_dsa.layers.parallel.gather import finish_with_proxy, start_gather
from megatron_dsa.ops.dense_attention.blocks import torch_kernel
from megatron_dsa.ops.dense_attention.ring import (
    ZigzagShard,
    gathered_latent_attention,
    ring_attention,
)
from tests import host
from tests.cases.ring import CUTS, PACKED, WEIGHTS, WHOLE, Case, expected, together
from tests.helpers import relative_error
from tests.ranks import spawn

CASES = {
    "sbhd": Case(),
    "sbhd, two sequences": Case(batch=2, workspace=3000),
    "packed": Case(real=WHOLE),
    "packed, with padding": Case(**PACKED),
    "packed, small tiles": Case(**PACKED, workspace=3000),
    "sbhd, fp32": Case(batch=2, dtype=torch.float32),
    "packed, fp32": Case(**PACKED, dtype=torch.float32),
    "sbhd, bf16": Case(batch=2, dtype=torch.bfloat16),
    "rows, small tiles": Case(**CUTS["rows, with padding"], workspace=3000),
    **{name: Case(**changes) for name, changes in CUTS.items()},
    **{
        f"{mode}, {name}": Case(mode=mode, **changes)
        for mode in ("gathered",)
        for name, changes in {
            "sbhd": {"batch": 2},
            "packed": {"real": WHOLE},
            "packed, with padding": PACKED,
            "fp32": {"dtype": torch.float32, **PACKED},
            **{name: cut for name, cut in CUTS.items() if "real" in cut or "batch" in cut},
        }.items()
    },
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def run_local(case, rows, group, local):
    """Call the tested function on leaves; return results, gradients and bytes."""
    counted = {"sent": 0}
    original = distributed.batch_isend_irecv

    def counting(operations):
        sends = [o.tensor for o in operations if o.op is distributed.isend]
        counted["sent"] += sum(x.numel() * x.itemsize for x in sends)
        return original(operations)

    distributed.batch_isend_irecv = counting
    dout = local.pop("dout")
    leaves = {name: x.clone().requires_grad_() for name, x in local.items()}
    block = None if case.workspace is None else torch_kernel(case.workspace)
    if case.mode == "gathered":
        q, latent, *weights = leaves.values()
        latents, grad_proxy = finish_with_proxy(start_gather(latent, group))
        out, lse = gathered_latent_attention(
            q, latents, *weights, rows, case.scale, block, latent_grad=grad_proxy
        )
    else:
        out, lse = ring_attention(*leaves.values(), rows, group, case.scale, block)
    forward, counted["sent"] = counted["sent"], 0
    out.backward(dout)
    distributed.batch_isend_irecv = original
    # Sent buffers must not be overwritten, even if the caller's.
    assert all(torch.equal(leaves[name].detach(), x) for name, x in local.items())
    return {
        "out": out.detach(),
        "lse": lse,
        "sent": (forward, counted["sent"]),
        **{f"d{name}": x.grad for name, x in leaves.items()},
    }


def run_rank(case, _tp, world):
    rank, device = distributed.get_rank(), host.start()
    mine = case.local_rows(world, rank)
    local = {n: x if n in WEIGHTS else x[mine] for n, x in case.inputs().items()}
    local = {n: x.to(device) for n, x in local.items()}
    return run_local(case, case.describe(world, rank, device), distributed.group.WORLD, local)


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request, tmp_path_factory):
    """Return the context-parallel size, and every rank's results of all cases."""
    world = request.param
    return world, spawn(run_rank, CASES, 1, tmp_path_factory.mktemp("ring"), world)


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(name, results):
    check(CASES[name], [rank[name] for rank in results[1]])


def check(case, several):
    """Compare ranks with one process."""
    assert all(rank["out"].dtype == case.dtype for rank in several)
    for what, right in expected(case).items():
        found = together(case, several, what)
        if what == "lse":
            accumulation = torch.promote_types(case.dtype, torch.float32)
            assert found.dtype == accumulation
            none = right == float("-inf")
            assert torch.equal(found == float("-inf"), none)
            found, right = found[~none], right[~none]
        assert relative_error(found, right) < TOLERANCE[case.dtype], what
        assert right.norm() > 0, what


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_with_nccl(world, tmp_path):
    """The ring runs on NCCL's stream, parallel to attention kernels."""
    large = {"dtype": torch.bfloat16, "dims": (8, 192, 128, 64, 512)}
    batches = {"sbhd": {"length": 2048, "batch": 2}}
    batches["packed"] = {"real": (2000, 0, 300, 1001), "padded": (2000, 16, 512, 1008), "tail": 16}
    batches["contiguous"] = {"length": 2048, "batch": 2, "cut": "contiguous"}
    batches["rows"] = {"real": (1500, 0, 37, 2300, 4), "tail": 255, "cut": "zigzag_rows"}
    cases = {
        f"{mode}, {name}": Case(mode=mode, **large, **batch)
        for mode in ("ring", "gathered")
        for name, batch in batches.items()
    }
    several = spawn(run_rank, cases, 1, tmp_path, world, "nccl")
    for name, case in cases.items():
        check(case, [rank[name] for rank in several])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.padded])
def test_padding_gets_and_gives_nothing(name, results):
    case, several = CASES[name], [rank[name] for rank in results[1]]
    real = torch.zeros(case.total, dtype=torch.bool)
    for rows, length in case.sequences():
        real[rows[:length]] = True
    assert not real.all()
    row_wise = ("out", "dq", "dk", "dv") if case.mode == "ring" else ("out", "dq", "dlatent")
    for what in row_wise:
        assert together(case, several, what)[~real].eq(0).all(), what
    assert together(case, several, "lse")[~real].eq(float("-inf")).all()


@pytest.mark.parametrize("name", CASES)
def test_bytes_on_the_ring(name, results):
    """One block per hop; gradients are fp32 or wider, with one more hop to return."""
    world, several = results[0], [rank[name] for rank in results[1]]
    case = CASES[name]
    size, accumulated = case.dtype.itemsize, max(4, case.dtype.itemsize)
    heads, qk, v, rope, rank = case.dims
    width = heads * (qk + v) if case.mode == "ring" else rank + rope
    numbers = case.total // world * width
    keys = (world - 1) * numbers * size
    gradients = world * numbers * accumulated if world > 1 else 0
    right = (0, 0) if case.mode == "gathered" else (keys, keys + gradients)
    assert all(rank["sent"] == right for rank in several)


def test_every_step_is_the_same_work():
    """In zigzag order every rank has equally many pairs at every step."""
    cp, length = 4, 64
    pairs = {}
    for rank in range(cp):
        rows = ZigzagShard(cp, rank, 1, length // cp)
        for step in range(1, cp):
            (part,) = rows.parts((rank - step) % cp)
            n = range(rows.tokens)
            pairs[rank, step] = len(n[part.queries]) * len(n[part.keys])
            assert not part.causal
    assert len(set(pairs.values())) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("packed", "packed, with padding", "gathered, packed"),
        *("rows, packed", "contiguous, with padding"),
    ],
)
def test_nothing_is_read_from_the_device(name, monkeypatch):
    """Anything that would synchronise on a GPU passes through these functions."""
    case = CASES[name]
    local = case.inputs()
    rows, several = case.describe(1, 0), case.describe(4, 2)

    def refuse(*_):
        raise AssertionError("reads a tensor on the host")

    for method in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    for source in range(4):
        several.parts(source)
    dout = local.pop("dout")
    leaves = [x.clone().requires_grad_() for x in local.values()]
    if case.mode == "ring":
        out, _ = ring_attention(*leaves, rows, None, case.scale)
    else:
        out, _ = gathered_latent_attention(*leaves, rows, case.scale)
    out.backward(dout)


def test_kernels_that_cannot_run_are_refused():
    q, shard = torch.zeros(8, 2, 4), ZigzagShard(1, 0, 1, 8)
    message = r"dense_attention=flash9: must be auto or one of torch-cudnn"
    with pytest.raises(ConfigError, match=message):
        ring_attention(q, q, q, shard, None, 0.5, "flash9")
    message = r"dense_attention=torch-cudnn: it cannot run here"
    with pytest.raises(ImplementationError, match=message):
        ring_attention(q, q, q, shard, None, 0.5, "torch-cudnn")
