"""Updates of Muon against a float64 reference: blocks, scales, blocks over several ranks."""

import pytest
import torch

from tests import host
from tests.helpers import relative_error
from tests.ranks import spawn
from tests.reference.muon_float64 import COEFFICIENTS, scaled_blocks

pytest.importorskip("emerging_optimizers", minversion="0.3")
EXTRA, LR, DECAY = 0.18, 0.02, 0.1


def muon(parameters, group=None, adaptive=False, **settings):
    from types import SimpleNamespace

    from megatron_dsa.extras.muon.optimizer import BlockAdaptiveMuon, BlockMuon

    groups = None if group is None else SimpleNamespace(tp=group, gtp_remat=None)
    return (BlockAdaptiveMuon if adaptive else BlockMuon)(
        parameters, lr=LR, weight_decay=DECAY, fp32_matmul_prec="high", extra_scale_factor=EXTRA,
        pg_collection=groups, is_qkv_fn=lambda p: False, **settings,
    )  # fmt: skip


def full_gradient(rows, columns):
    generator = torch.Generator().manual_seed(rows + columns)
    # Blocks of different sizes, so that joint orthogonalisation is noticed.
    factor = torch.linspace(0.2, 3, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * factor


def marked(gradient, pattern, ranks=1, partition_dim=None):
    from megatron_dsa.layers.weight_blocks import mark_row_blocks

    parameter = torch.nn.Parameter(torch.ones_like(gradient))
    parameter.grad = gradient.clone()
    parameter.tensor_model_parallel = partition_dim is not None
    parameter.partition_dim = 0 if partition_dim is None else partition_dim
    if pattern is not None:
        mark_row_blocks(parameter, pattern, ranks)
    return parameter


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize(
    ("rows", "columns", "pattern"),
    [
        (32, 24, (8,)),  # wide blocks
        (48, 8, (16,)),  # tall ones
        (42, 20, (6, 8)),  # keys and values of three heads
        (24, 24, (24,)),
        (32, 24, None),
    ],
)
def test_a_step_equals_the_reference(rows, columns, pattern, coefficients):
    host.start()
    gradient = full_gradient(rows, columns)
    parameter = marked(gradient, pattern)
    steps = COEFFICIENTS[coefficients]
    muon([parameter], coefficient_type=coefficients, num_ns_steps=len(steps), nesterov=False).step()
    sizes = [rows] if pattern is None else list(pattern) * (rows // sum(pattern))
    expected = 1 - LR * DECAY - LR * scaled_blocks(gradient, sizes, steps, EXTRA)
    assert relative_error(parameter.detach() - 1, expected - 1) < 1e-4
    if pattern not in (None, (rows,)):
        whole = 1 - LR * DECAY - LR * scaled_blocks(gradient, [rows], steps, EXTRA)
        assert relative_error(whole - 1, expected - 1) > 0.1


@pytest.mark.parametrize("pattern", [(8,), (6, 10), None])
def test_a_step_of_adaptive_muon_equals_the_reference(pattern):
    host.start()
    gradient = full_gradient(32, 12)
    parameter = marked(gradient, pattern)
    muon([parameter], adaptive=True, beta2=0.9, nesterov=False).step()
    sizes = [32] if pattern is None else list(pattern) * (32 // sum(pattern))
    whole = scaled_blocks(gradient, sizes, COEFFICIENTS["quintic"], EXTRA)
    scale = torch.cat([torch.full((size, 1), max(size, 12) ** 0.5 * EXTRA) for size in sizes])
    update = whole / scale
    update = update / ((0.1 * update.square()).sqrt() + 1e-8) * scale
    expected = 1 - LR * DECAY - LR * update
    assert relative_error(parameter.detach() - 1, expected - 1) < 1e-4


ROWS, COLUMNS = 32, 24
#: Height of a block -> blocks on each of four ranks: two, one, a half, a quarter.
SHARED = {"two blocks": 4, "one block": 8, "half a block": 16, "a quarter of a block": 32}
MODES = ("duplicated", "distributed", "blockwise")


def shared_updates(case, tp, _cp):
    """Return this rank's part of the update, and sizes of communicating groups."""
    from megatron.core import parallel_state

    rows, mode, partition_dim = case
    group = parallel_state.get_tensor_model_parallel_group()
    full = full_gradient(ROWS, COLUMNS)
    gradient = full if partition_dim is None else full.chunk(tp)[group.rank()]
    parameter = marked(gradient, None if rows is None else (rows,), tp, partition_dim)
    sizes = []
    real = {name: getattr(torch.distributed, name) for name in ("all_gather", "all_reduce")}

    def counted(name):
        def call(*args, **kwargs):
            asked = kwargs.get("group") or args[-1]
            sizes.append(torch.distributed.get_world_size(asked))
            return real[name](*args, **kwargs)

        return call

    for name in real:
        setattr(torch.distributed, name, counted(name))
    optimizer = muon([parameter], group, tp_mode=mode)
    update = optimizer.orthogonalize(parameter, gradient)
    again = optimizer.orthogonalize(parameter, gradient)
    for name, function in real.items():
        setattr(torch.distributed, name, function)
    assert again.equal(update)
    adaptive = muon([parameter], group, adaptive=True, tp_mode=mode)
    raw = adaptive.orthogonalize(parameter, gradient)
    assert relative_error(adaptive._apply_muon_scale(raw, *raw.shape), update) < 1e-6
    return {"update": update, "sizes": torch.tensor(sorted(set(sizes)))}


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory):
    cases = {f"{n}, {m}": (rows, m, 0) for n, rows in SHARED.items() for m in MODES}
    cases |= {"whole": (None, "duplicated", 0), "replicated": (None, "duplicated", None)}
    cases["replicated, blocks"] = (8, "duplicated", None)
    return spawn(shared_updates, cases, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHARED)
def test_blocks_on_four_ranks(name, mode, on_four_ranks):
    """Only the ranks of a block may communicate."""
    results = [result[f"{name}, {mode}"] for result in on_four_ranks]
    rows, held = SHARED[name], ROWS // 4
    sizes = [min(rows, held) if mode == "blockwise" else rows]
    expected = scaled_blocks(
        full_gradient(ROWS, COLUMNS), sizes * (ROWS // sizes[0]), COEFFICIENTS["quintic"], EXTRA
    )
    got = torch.cat([result["update"] for result in results])
    assert relative_error(got, expected) < 1e-4
    sharers = rows // held
    talk = [sharers] if sharers > 1 and mode != "blockwise" else []
    assert all(result["sizes"].tolist() == talk for result in results)


def test_unmarked_matrices_on_four_ranks(on_four_ranks):
    """Megatron gathers them over all ranks; replicated ones must not be gathered."""
    full = full_gradient(ROWS, COLUMNS)
    expected = scaled_blocks(full, [ROWS], COEFFICIENTS["quintic"], EXTRA)
    whole = torch.cat([result["whole"]["update"] for result in on_four_ranks])
    assert relative_error(whole, expected) < 1e-4
    blocks = scaled_blocks(full, [8] * 4, COEFFICIENTS["quintic"], EXTRA)
    for result in on_four_ranks:
        assert result["replicated"]["sizes"].tolist() == []
        assert relative_error(result["replicated"]["update"], expected) < 1e-4
        assert relative_error(result["replicated, blocks"]["update"], blocks) < 1e-4
