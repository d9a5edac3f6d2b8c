"""Masked dense attention over ranks, beyond one layer's step.

Shared selections, recompute, log, evaluation, declared operations, saved tensors, unrounded
gradients before the sum over ranks; and the operation itself.
"""

import dataclasses
import functools
import math

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.dsa_kernels import IndexerInputs, IndexerTraining, key_bits, masked_attention
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.parallel.gather import gathered_product, grad_proxy_for
from megatron_dsa.ops.common.arithmetic import mm
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.masked_attention.spec import WORDS, groups
from tests.cases.layers import DSA, PACKED, RECOMPUTED
from tests.helpers import relative_error
from tests.ranks import build_two, check_parts, spawn, summed_gradients
from tests.tiers import cases_run

SHARING = {"num_layers": 2, "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
#: All tokens are sampled for the log, so that ranks together match one rank.
OPTIONS = DSAOptions(selected_attention="masked", health_tokens=192, evaluate_indexer=True)
#: Layout of tokens, then fields of the case; packed documents have 0 to 40 tokens.
CASES = {
    "zigzag": ("zigzag", {}),
    "contiguous, two sequences": ("contiguous", {"batch": 2}),
    "packed": ("zigzag", PACKED),
    "packed rows": ("zigzag_rows", PACKED),
    "recomputed": ("zigzag", {"changes": RECOMPUTED}),
    "up recomputed": ("zigzag", {"changes": UP}),
    "full recompute": ("zigzag", PACKED),
}
#: Tensor- and context-parallel ranks, and the former's division.
ONE = (1, 1, "heads")
GRIDS = [
    (1, 2, "heads"), (2, 2, "heads"), (2, 2, "select"), (2, 1, "select"), (4, 1, "select"),
]  # fmt: skip


def sharing_layers(name, mode="heads"):
    cp_layout, fields = CASES[name]
    options = dataclasses.replace(OPTIONS, cp_layout=cp_layout, tp_mode=mode)
    changes = fields.get("changes", {}) | SHARING | {"options": options}
    return dataclasses.replace(DSA, cp_layout=cp_layout, **fields | {"changes": changes})


def _run_layers(given, tp, cp):
    """Run two layers; the second attends to the first one's keys."""
    from megatron.core import tensor_parallel

    from megatron_dsa.layers.dsa_core import TopKIndices
    from megatron_dsa.layers.required_ops import called_ops
    from megatron_dsa.ops.dispatch import report, reset_report
    from tests.cases.calls import delayed_linears, of_any_batch, recorded_calls
    from tests.cases.log import logged_of_first

    case, whole = given
    first, second, x, packing = build_two(case, tp, cp)
    first.hands_on_selection = True
    handed_on = []

    def layers(x):
        out, _ = first(x, None, packed_seq_params=packing)
        handed_on.append(first.used_selection.pack())
        second.shared_selection = TopKIndices.unpack(handed_on[-1])
        return second(x + out, None, packed_seq_params=packing)[0]

    def step():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = tensor_parallel.checkpoint(layers, False, x) if whole else layers(x)
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        out.square().sum().backward()
        return out.detach(), list(storages.values())

    reset_report()
    with recorded_calls() as ran:
        out, kept = step()
    divided, trained = report().get("tensor_parallel_attention"), logged_of_first()
    with torch.no_grad(), recorded_calls() as evaluated:
        first.eval(), second.eval()
        layers(x)
    declared = [
        each
        for core in (first.core_attention, second.core_attention)
        for each in called_ops(core.required_ops(), core.options.policy)
    ]
    gradients = summed_gradients(torch.nn.ModuleList((first, second)), tp, cp)
    return {
        "out": out, "dx": x.grad, "gradients": gradients, "trained": trained,
        "evaluated": logged_of_first(), "kept": kept,
        "undeclared": of_any_batch(ran + evaluated) ^ of_any_batch(declared),
        "late": delayed_linears(first), "lists": handed_on[0], "divided": divided,
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(request, tmp_path_factory, backend):
    """``results(grid)``: results of every rank."""

    @functools.cache
    def found(grid):
        tp, cp, mode = grid
        cases = {
            name: (sharing_layers(name, mode), name == "full recompute")
            for name, other in cases_run(request, "name", "grid")
            if grid in (other, ONE)
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
    tp, cp, mode = grid
    assert len(one["gradients"]) > 15
    check_parts(sharing_layers(name), one, several, 1e-12, tp, cp)
    for index, rank in enumerate(several):
        if cp == 1:  # only local lists are passed on
            assert rank["lists"].equal(one["lists"].chunk(tp)[index])
        assert tp == 1 or list(rank["divided"]) == [mode]
    # If latents are gathered, autograd has the gradient of the up projection's weight.
    for found, ranks in ((one, 1), (several[0], cp)):
        assert "linear_q_up_proj" in found["late"]
        assert ("linear_kv_up_proj" in found["late"]) == (ranks == 1)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_log_says_the_same_as_on_one_rank(name, grid, results):
    one, several = of_case(results, grid, name)
    # By heads a rank has only its heads' attention.
    same = ["indexer loss"] + ["dsa attention mass captured"] * (grid[0] == 1)
    for rank in several:
        for figure in same:
            assert rank["trained"][figure] == pytest.approx(one["trained"][figure], rel=1e-6)
        assert rank["trained"].keys() == one["trained"].keys()
        assert 0 < rank["trained"]["dsa attention mass captured"] < 1
        # The same loss, from an evaluation pass.
        assert rank["evaluated"].keys() == one["evaluated"].keys() and len(one["evaluated"]) == 1
        for figure, value in one["evaluated"].items():
            assert rank["evaluated"][figure] == pytest.approx(value, rel=1e-6)
    assert one["trained"]["indexer loss"] > 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_runs_is_declared_and_recomputed_keys_are_not_kept(name, grid, results):
    case, (tp, *_) = sharing_layers(name), grid
    size = case.rows * case.batch * 4 // tp * (12 + 10) * 8
    expected = 0 if "recompute" in name else 2
    for rank in results(grid):
        assert not rank[name]["undeclared"]
        assert rank[name]["kept"].count(size) == expected


HEADS, KEYS, WIDTH, INDEX_HEADS = 4, 24, 6, 2


def _tensors():
    """Draw q, kv, k_pe, the indexer's tensors, and lists in any order with lengths; of all
    tokens.
    """
    generator = torch.Generator().manual_seed(9)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tensors = [draw(KEYS, HEADS, 7), draw(KEYS, HEADS, 9), draw(KEYS, 3)]
    tensors += [draw(KEYS, INDEX_HEADS, 5), draw(KEYS, 5), draw(KEYS, INDEX_HEADS).abs()]
    last = torch.arange(KEYS, dtype=torch.int32)[:, None]
    lists = (last - 2 * torch.arange(WIDTH, dtype=torch.int32)).clamp_min(-1)
    return tensors, lists, (last[:, 0] % 5 + 1).int()


def _attend(policy, tp, cp):
    """Return output, head sums, recorded loss and gradients of a rank's heads and tokens."""
    from megatron.core import parallel_state

    from megatron_dsa.ops.layout.sharding import KeyOwnership, Sharding, sharded_layout

    group = parallel_state.get_tensor_model_parallel_group() if tp > 1 else None
    rank = 0 if group is None else group.rank()
    device = torch.device("cuda", rank) if torch.distributed.get_backend() == "nccl" else "cpu"
    tensors, lists, length = _tensors()
    tensors, lists, length = [x.to(device) for x in tensors], lists.to(device), length.to(device)
    q, kv, k_pe, index_q, index_k, weights = tensors
    heads, own = (slice(rank * n // tp, (rank + 1) * n // tp) for n in (HEADS, KEYS))
    layout = bshd_layout(KEYS, 1, q.device)
    if group is not None:
        sharding = Sharding(sp=tp, sp_rank=rank)
        table = sharding.global_positions(KEYS, None, q.device)
        layout = sharded_layout(layout, sharding, KeyOwnership(sharding, table, 1))
    leaves = [q[:, heads], kv[:, heads], k_pe, index_q[own], index_k, weights[own]]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    recorded = []
    training = IndexerTraining(IndexerInputs(*leaves[3:]), layout, lambda: 0.7, recorded.append)
    out, lse, p_sum = masked_attention(
        *leaves[:3], key_bits(lists[own], length[own], KEYS), softmax_scale=0.3, topk=WIDTH,
        want_p_sum=True, indexer=training, group=group, policy=policy,
    )  # fmt: skip
    kept = [x for x in out.grad_fn.saved_tensors if x is not None and x.dtype == torch.int32]
    grads = torch.autograd.grad(
        (out * torch.arange(1, 1 + out.shape[2], device=device)).sum(), leaves
    )
    return {
        "out": out.detach(),
        "lse": lse,
        "p_sum": p_sum,
        "loss": recorded[0],
        "grads": grads,
        "kept": kept,
    }


@pytest.fixture(scope="module")
def attended(tmp_path_factory, backend):
    folder = tmp_path_factory.mktemp("masked")
    cases = {"one block": Policy(), "blocks": Policy(workspace_bytes=4000)}
    return {tp: spawn(_attend, cases, tp, folder, backend=backend) for tp in (1, 2)}


@pytest.mark.parametrize("name", ["one block", "blocks"])
def test_the_operation_equals_one_rank(name, attended):
    (one,), several = ([rank[name] for rank in attended[n]] for n in (1, 2))

    def equals(got, expected):
        assert expected.norm() > 0
        assert relative_error(got, expected) < 1e-12

    q, kv, k_pe, *index = one["grads"]
    for rank, found in enumerate(several):
        # Bits of local tokens, and no lists.
        assert [x.shape for x in found["kept"]] == [(KEYS // 2, groups(KEYS), WORDS)]
        equals(found["out"], one["out"].chunk(2, 1)[rank])
        equals(found["lse"], one["lse"].chunk(2, 1)[rank])
        equals(found["p_sum"], one["p_sum"].chunk(2)[rank])
        equals(found["grads"][0], q.chunk(2, 1)[rank])
        equals(found["grads"][1], kv.chunk(2, 1)[rank])
        equals(found["grads"][3], index[0].chunk(2)[rank])
        equals(found["grads"][5], index[2].chunk(2)[rank])
    for place, expected in ((2, k_pe), (4, index[1])):  # of local heads, of local tokens
        equals(sum(found["grads"][place] for found in several), expected)
    assert math.isclose(sum(f["loss"] for f in several), one["loss"], rel_tol=1e-12)


class Group:
    """Two ranks without communication."""

    def size(self):
        return 2

    def rank(self):
        return 1


@pytest.mark.parametrize(
    ("tokens", "lists", "head_group", "message"),
    [
        (5, 2, None, "q must have equally many tokens for each of the 2 ranks of group, got 5"),
        (4, 4, None, "bits must be .2, 1, 4., got shape .4, 1, 4."),
        (4, 2, Group(), "indexer.head_group must be None with group"),
    ],
)
def test_wrong_arguments_are_named(tokens, lists, head_group, message):
    inputs = IndexerInputs(torch.zeros(lists, 1, 2), torch.zeros(9, 2), torch.zeros(lists, 1))
    layout = bshd_layout(lists, 1, torch.device("cpu"))
    training = IndexerTraining(inputs, layout, lambda: 1.0, head_group=head_group)
    with pytest.raises(ConfigError, match=message):
        masked_attention(
            torch.zeros(tokens, 2, 8), torch.zeros(9, 2, 10), torch.zeros(9, 3),
            torch.zeros(lists, 1, 4, dtype=torch.int32), softmax_scale=1.0, topk=3,
            indexer=training, group=Group(),
        )  # fmt: skip


def _draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.bfloat16)


def test_gradients_of_latents_are_not_rounded():
    """Products of bf16 operands must arrive in fp32; the weight's gradient is rounded once."""
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
    # With a frozen weight, and with nothing trained below it.
    frozen = gathered_product(x, proxy, weight.detach())
    assert torch.autograd.grad(frozen, proxy, grad)[0].equal(dx)
    above = gathered_product(x, proxy.detach(), weight)
    assert torch.autograd.grad(above, weight, grad)[0].equal(dweight)


def test_gradients_of_rope_keys_are_not_rounded():
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
