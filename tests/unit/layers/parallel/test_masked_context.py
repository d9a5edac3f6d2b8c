"""Masked dense attention over context-parallel ranks, beyond one layer's step.

Layers that share a selection, recompute, figures of the log, evaluation, declared operations, what
is kept, and gradients that are not rounded before the sum over ranks.
"""

import dataclasses
import functools

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.dsa_kernels import key_bits, masked_attention
from megatron_dsa.layers.parallel.gather import gathered_product, grad_proxy_for
from megatron_dsa.ops.common.arithmetic import mm
from tests.cases.layers import DSA, PACKED, RECOMPUTED
from tests.helpers import relative_error
from tests.ranks import build_two, spawn, summed_gradients
from tests.tiers import cases_run

SHARING = {"num_layers": 2, "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
#: All tokens are sampled for the log, so that ranks together sample what one rank does.
OPTIONS = DSAOptions(selected_attention="masked", health_tokens=192, evaluate_indexer=True)
#: Layout of tokens, then fields of the case; the packed documents have between 0 and 40 tokens.
CASES = {
    "zigzag": ("zigzag", {}),
    "contiguous, two sequences": ("contiguous", {"batch": 2}),
    "packed": ("zigzag", PACKED),
    "packed rows": ("zigzag_rows", PACKED),
    "recomputed": ("zigzag", {"changes": RECOMPUTED}),
    "up recomputed": ("zigzag", {"changes": UP}),
    "full recompute": ("zigzag", PACKED),
}
#: Ranks of tensor and context parallelism, and what the former divide.
ONE = (1, 1, "heads")
GRIDS = [(1, 2, "heads"), (2, 2, "heads"), (2, 2, "select")]


def sharing_layers(name, mode="heads"):
    cp_layout, fields = CASES[name]
    options = dataclasses.replace(OPTIONS, cp_layout=cp_layout, tp_mode=mode)
    changes = fields.get("changes", {}) | SHARING | {"options": options}
    return dataclasses.replace(DSA, cp_layout=cp_layout, **fields | {"changes": changes})


def _calls(monkeypatch, run):
    """Return the pairs of an operation and its call, without what depends on the batch."""
    from megatron_dsa.ops.dispatch import Operation

    calls, original = [], Operation.run

    def record(operation, call, *arguments, **settings):
        calls.append((operation.name, call))
        return original(operation, call, *arguments, **settings)

    monkeypatch.setattr(Operation, "run", record)
    result = run()
    monkeypatch.setattr(Operation, "run", original)
    return result, _plain(calls)


def _plain(calls):
    return {(name, dataclasses.replace(call, packed=False, topk=None)) for name, call in calls}


def _run_layers(given, tp, cp):
    """Two layers, of which the second attends to the keys of the first."""
    from megatron.core import tensor_parallel

    from megatron_dsa.layers.dsa_core import TopKIndices
    from megatron_dsa.layers.required_ops import called_ops
    from tests.cases.log import logged_of_first

    case, whole = given
    first, second, x, packing = build_two(case, tp, cp)
    first.hands_on_selection = True

    def layers(x):
        out, _ = first(x, None, packed_seq_params=packing)
        second.shared_selection = TopKIndices.unpack(first.used_selection.pack())
        return second(x + out, None, packed_seq_params=packing)[0]

    def step():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = tensor_parallel.checkpoint(layers, False, x) if whole else layers(x)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        out.square().sum().backward()
        return out.detach(), list(storages.values())

    with pytest.MonkeyPatch.context() as patch:
        (out, kept), ran = _calls(patch, step)
    trained = logged_of_first()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        first.eval(), second.eval()
        _, evaluated = _calls(patch, lambda: layers(x))
    declared = [
        each
        for core in (first.core_attention, second.core_attention)
        for each in called_ops(core.required_ops(), core.options.policy)
    ]
    gradients = summed_gradients(torch.nn.ModuleList((first, second)), tp, cp)
    late = []
    for name, child in first.named_modules():
        if name.startswith("linear"):
            child.backward_dw = lambda name=name: late.append(name)
    first.backward_dw()
    return {
        "out": out, "dx": x.grad, "gradients": gradients, "trained": trained,
        "evaluated": logged_of_first(), "undeclared": (ran | evaluated) ^ _plain(declared),
        "kept": kept, "late": late,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(request, tmp_path_factory, backend):
    """``results(grid)``: what every rank found."""

    @functools.cache
    def found(grid):
        tp, cp, mode = grid
        cases = {
            name: (sharing_layers(name, mode), name == "full recompute")
            for (name,) in cases_run(request, "name")
        }
        return spawn(_run_layers, cases, tp, tmp_path_factory.mktemp(mode), cp, backend)

    return found


def of_case(results, grid, name):
    (one,), several = ([rank[name] for rank in results(key)] for key in (ONE, grid))
    return one, several


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_layers_that_share_selections_equal_one_rank(name, grid, results):
    one, several = of_case(results, grid, name)
    (tp, cp, _), case = grid, sharing_layers(name)
    assert len(one["gradients"]) > 15
    for index, rank in enumerate(several):
        place = torch.tensor(case.global_positions(cp)[index // tp]).chunk(tp)[index % tp]
        for what in ("out", "dx"):
            assert relative_error(rank[what], one[what][place]) < 1e-12, (what, index)
        for parameter, full in one["gradients"].items():
            part = rank["gradients"][parameter]
            expected = case.part(parameter, full, index % tp, tp)
            assert expected.norm() > 0
            assert relative_error(part, expected) < 1e-12, (parameter, index)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_log_says_the_same_as_on_one_rank(name, grid, results):
    one, several = of_case(results, grid, name)
    # By heads a rank sees the attention of its heads alone.
    same = ["indexer loss"] + ["dsa attention mass captured"] * (grid[0] == 1)
    for rank in several:
        for figure in same:
            assert rank["trained"][figure] == pytest.approx(one["trained"][figure], rel=1e-6)
        assert rank["trained"].keys() == one["trained"].keys()
        # The same loss, of an evaluation pass.
        assert rank["evaluated"].keys() == one["evaluated"].keys() and len(one["evaluated"]) == 1
        for figure, value in one["evaluated"].items():
            assert rank["evaluated"][figure] == pytest.approx(value, rel=1e-6)
    assert one["trained"]["indexer loss"] > 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_runs_is_what_is_declared(name, grid, results):
    for rank in results(grid):
        assert not rank[name]["undeclared"]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_recompute_makes_the_keys_of_all_ranks_again(name, grid, results):
    """Without it each of the two layers keeps them."""
    case, (tp, *_) = sharing_layers(name), grid
    size = case.rows * case.batch * 4 // tp * (12 + 10) * 8
    expected = 0 if "recompute" in name else 2
    for rank in results(grid):
        assert rank[name]["kept"].count(size) == expected


@pytest.mark.parametrize("grid", [ONE, *GRIDS], ids=str)
def test_the_up_projection_has_no_delayed_weight_gradient(grid, results):
    """Its weight enters as a plain tensor, of which autograd has the gradient."""
    late = results(grid)[0]["zigzag"]["late"]
    assert "linear_q_up_proj" in late
    assert ("linear_kv_up_proj" in late) == (grid == ONE)


# Gradients for the sum over ranks


def _draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)


def test_gradients_of_latents_are_not_rounded():
    """The product with bf16 operands arrives in fp32; that of the weight is rounded once."""
    x, weight, grad = _draw(30, 8, seed=1), _draw(12, 8, seed=2), _draw(30, 12, seed=3)
    proxy = grad_proxy_for(x).requires_grad_()
    weight.requires_grad_()
    out = gathered_product(x, proxy, weight)
    assert out.equal(x @ weight.t()) and not x.requires_grad
    dx, dweight = torch.autograd.grad(out, (proxy, weight), grad)
    exact = grad.double() @ weight.detach().double()
    assert dx.dtype == torch.float32 and relative_error(dx, exact) < 1e-6
    assert relative_error(dx.bfloat16(), exact) > 1e-4
    assert dweight.equal(mm(grad.t(), x).bfloat16())
    # Where the weight is frozen, and where nothing below it is trained.
    frozen = gathered_product(x, proxy, weight.detach())
    assert torch.autograd.grad(frozen, proxy, grad)[0].equal(dx)
    above = gathered_product(x, proxy.detach(), weight)
    assert torch.autograd.grad(above, weight, grad)[0].equal(dweight)


def test_gradients_of_rope_keys_are_not_rounded():
    """As they are without a proxy, before they are rounded."""
    heads, rope = 2, 4
    q, kv, k_pe = (
        _draw(20, heads, 6 + rope, seed=1), _draw(20, heads, 6 + 5, seed=2), _draw(20, rope, seed=3)
    )  # fmt: skip
    last = torch.arange(20, dtype=torch.int32)[:, None]
    bits = key_bits((last - torch.arange(7, dtype=torch.int32)).clamp_min(-1), None, 20)
    leaves = [x.requires_grad_() for x in (q, kv, k_pe)]
    proxy = grad_proxy_for(k_pe).requires_grad_()
    found = []
    for to_proxy in (None, proxy):
        out = masked_attention(*leaves, bits, softmax_scale=0.3, k_pe_grad=to_proxy).out
        wanted = (*leaves, proxy)
        found.append(torch.autograd.grad(out, wanted, out.detach(), allow_unused=True))
    (*others, rounded, unused), (*same, none, unrounded) = found
    assert unused is None and none is None
    assert all(x.equal(y) for x, y in zip(others, same, strict=True))
    assert unrounded.dtype == torch.float32 and unrounded.bfloat16().equal(rounded)
    assert not unrounded.equal(rounded.float())
