"""Ranks that select for their own tokens and attend with their own heads, beyond one layer's step.

Layers that share a selection, figures of the log, evaluation, and the operation's own arguments.
"""

import dataclasses
import functools
import math

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.dsa_kernels import IndexerInputs, IndexerTraining, key_bits, masked_attention
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.masked_attention.spec import WORDS, groups
from tests.cases.layers import DSA, PACKED, RECOMPUTED
from tests.helpers import relative_error
from tests.ranks import build_two, spawn, summed_gradients

SHARING = {"num_layers": 2, "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 1}
#: All tokens are sampled for the log, so that ranks together sample what one rank does.
OPTIONS = DSAOptions(selected_attention="masked", health_tokens=192, evaluate_indexer=True)
CASES = {
    "two sequences": {"batch": 2},
    "packed": PACKED,
    "recomputed": {"changes": RECOMPUTED},
}


def sharing_layers(name):
    changes = CASES[name].get("changes", {}) | SHARING | {"options": OPTIONS}
    return dataclasses.replace(DSA, **CASES[name] | {"changes": changes})


def _run_layers(case, tp, cp):
    """Two layers, of which the second attends to the keys of the first."""
    from megatron_dsa.layers.dsa_core import TopKIndices
    from megatron_dsa.ops.dispatch import report, reset_report
    from tests.cases.log import logged_of_first

    first, second, x, packing = build_two(case, tp, cp)
    first.hands_on_selection = True

    def run(x):
        out, _ = first(x, None, packed_seq_params=packing)
        packed = first.used_selection.pack()
        second.shared_selection = TopKIndices.unpack(packed)
        return second(x + out, None, packed_seq_params=packing)[0], packed

    reset_report()
    out, packed = run(x)
    out.square().sum().backward()
    ran, trained = report(), logged_of_first()
    with torch.no_grad():
        first.eval(), second.eval()
        run(x)
    gradients = summed_gradients(torch.nn.ModuleList((first, second)), tp, cp)
    return {
        "out": out.detach(), "dx": x.grad, "lists": packed, "gradients": gradients, "report": ran,
        "trained": trained, "evaluated": logged_of_first(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, backend):
    """``results(ranks)``: what every one of them found."""
    cases = {name: sharing_layers(name) for name in CASES}
    folder = tmp_path_factory.mktemp("select")
    return functools.cache(lambda tp: spawn(_run_layers, cases, tp, folder, backend=backend))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_layers_that_share_selections_equal_one_rank(name, tp, results):
    (one,), several = ([rank[name] for rank in results(n)] for n in (1, tp))
    case, size = sharing_layers(name), len(one["lists"]) // tp
    assert len(one["gradients"]) > 15
    for index, rank in enumerate(several):
        for what in ("out", "dx"):
            expected = one[what].chunk(tp)[index]
            assert relative_error(rank[what], expected) < 1e-12, (what, index)
        # Own lists alone are handed on.
        assert rank["lists"].equal(one["lists"][index * size : (index + 1) * size])
        for parameter, full in one["gradients"].items():
            part, expected = rank["gradients"][parameter], case.part(parameter, full, index, tp)
            assert expected.norm() > 0
            assert relative_error(part, expected) < 1e-12, (parameter, index)
        assert list(rank["report"]["tensor_parallel_attention"]) == ["select"]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_log_says_the_same_as_on_one_rank(name, tp, results):
    (one,), several = ([rank[name] for rank in results(n)] for n in (1, tp))
    for rank in several:
        expected = pytest.approx(one["trained"]["indexer loss"], rel=1e-6)
        assert rank["trained"]["indexer loss"] == expected
        assert rank["trained"].keys() == one["trained"].keys()
        assert 0 < rank["trained"]["dsa attention mass captured"] < 1
        # The same loss, of an evaluation pass.
        assert rank["evaluated"].keys() == one["evaluated"].keys() and len(one["evaluated"]) == 1
        for figure, value in one["evaluated"].items():
            assert rank["evaluated"][figure] == pytest.approx(value, rel=1e-6)
    assert one["trained"]["indexer loss"] > 0


# The operation


HEADS, KEYS, WIDTH, INDEX_HEADS = 4, 24, 6, 2


def _tensors():
    """q, kv, k_pe, the indexer's tensors, and lists in any order with lengths; of all tokens."""
    generator = torch.Generator().manual_seed(9)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tensors = [draw(KEYS, HEADS, 7), draw(KEYS, HEADS, 9), draw(KEYS, 3)]
    tensors += [draw(KEYS, INDEX_HEADS, 5), draw(KEYS, 5), draw(KEYS, INDEX_HEADS).abs()]
    last = torch.arange(KEYS, dtype=torch.int32)[:, None]
    lists = (last - 2 * torch.arange(WIDTH, dtype=torch.int32)).clamp_min(-1)
    return tensors, lists, (last[:, 0] % 5 + 1).int()


def _attend(policy, tp, cp):
    """Output, head sums, recorded loss and gradients of a rank's heads and tokens."""
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
        # The bits of its own tokens, and no lists.
        assert [x.shape for x in found["kept"]] == [(KEYS // 2, groups(KEYS), WORDS)]
        equals(found["out"], one["out"].chunk(2, 1)[rank])
        equals(found["lse"], one["lse"].chunk(2, 1)[rank])
        equals(found["p_sum"], one["p_sum"].chunk(2)[rank])
        equals(found["grads"][0], q.chunk(2, 1)[rank])
        equals(found["grads"][1], kv.chunk(2, 1)[rank])
        equals(found["grads"][3], index[0].chunk(2)[rank])
        equals(found["grads"][5], index[2].chunk(2)[rank])
    for place, expected in ((2, k_pe), (4, index[1])):  # of a rank's heads, of its tokens
        equals(sum(found["grads"][place] for found in several), expected)
    assert math.isclose(sum(f["loss"] for f in several), one["loss"], rel_tol=1e-12)


class Group:
    """Two ranks, of which nothing is sent."""

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
