"""Figures of the selection against plain Python, on any layout; averages in a log line."""

import dataclasses
import math

import pytest
import torch

from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_attention
from megatron_dsa.errors import ConfigError
from megatron_dsa.metrics.health import Attended, sample_queries, selection_health
from megatron_dsa.metrics.quality import (
    Mean,
    adjacent_overlap,
    captured_mass,
    query_scores,
    recall,
)
from megatron_dsa.ops.layout.compressed import compressed_keys
from tests.cases.layouts import LAYOUTS, SPREADS, TOTAL, indexer_inputs, layouts, sequence_places
from tests.cases.models import CORE, MODELS, SELECTING, forward, full, gpt
from tests.helpers import leaf, relative_error
from tests.host import start


@pytest.fixture(autouse=True)
def log():
    """Let models allocate the log for their layers."""
    from megatron_dsa.metrics.log import IndexerLog

    IndexerLog._state.sums = None
    yield IndexerLog
    IndexerLog._state.sums = None


def random_lists(rows, keys, width, seed):
    """Return unordered distinct lists, with negative entries."""
    generator = torch.Generator().manual_seed(seed)
    lists = torch.stack([torch.randperm(keys, generator=generator)[:width] for _ in range(rows)])
    none = torch.rand(lists.shape, generator=generator) < 0.2
    return torch.where(none, -1, lists).int().to(start())


def as_sets(lists):
    return [{x for x in row if x >= 0} for row in lists.tolist()]


def share(part, of):
    return len(part & of) / len(of) if of else math.nan


def same(got, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(got.double().cpu(), expected, atol=1e-6, equal_nan=True)


def test_recall_of_lists_in_any_order():
    selected, reference = random_lists(9, 12, 5, 1), random_lists(9, 12, 7, 2)
    reference[3] = -1
    selected[4] = -1
    selected[5, :5] = reference[5, :5]
    expected = [share(a, b) for a, b in zip(as_sets(selected), as_sets(reference), strict=True)]
    assert math.isnan(expected[3]) and expected[4] == 0 and 0 < expected[5] < 1.01
    same(recall(selected, reference), expected)
    same(recall(reference, reference), [1.0] * 3 + [math.nan] + [1.0] * 5)


@pytest.mark.parametrize(
    ("selected", "reference", "match"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32), "selected must be int32"),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), "reference must"),
        (
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(1, 3, dtype=torch.int32),
            "same queries",
        ),
    ],
)
def test_recall_refuses_what_is_no_list(selected, reference, match):
    with pytest.raises(ConfigError, match=match):
        recall(selected, reference)


@pytest.mark.parametrize("sharding", SPREADS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_compared_with_the_row_before_of_their_sequence(name, sharding):
    """First tokens, padding, and tokens whose neighbour is on another rank have no figure."""
    compared = 0
    for layout in layouts(name, sharding):
        lists = random_lists(layout.num_queries, layout.num_keys, 9, 3)
        sets, places = as_sets(lists), sequence_places(layout)
        rows = {place[:2]: row for row, place in enumerate(places) if place[2]}
        expected = []
        for row, (sequence, position, real) in enumerate(places):
            before = rows.get((sequence, position - 1)) if real else None
            expected.append(math.nan if before is None else share(sets[before], sets[row]))
        same(adjacent_overlap(lists, layout), expected)
        some = sample_queries(layout.num_queries, 5, lists.device)
        same(adjacent_overlap(lists, layout, some), [expected[i] for i in some.tolist()])
        compared += sum(not math.isnan(x) for x in expected)
    assert compared > TOTAL // 2


def test_query_scores_of_bf16_stay_exact_products():
    (layout,) = layouts("one", "alone")
    inputs = indexer_inputs(layout, layout.num_keys, torch.bfloat16)
    rows = sample_queries(layout.num_queries, 7, start())
    got = query_scores(inputs, rows, workspace_bytes=3000)
    q, k, w = (x.double() for x in (inputs.q[rows], inputs.k, inputs.weights[rows]))
    expected = torch.einsum("qhk,qh->qk", torch.einsum("qhd,kd->qhk", q, k).relu(), w)
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("workspace_bytes", [1, 2**28])
def test_captured_mass_of_queries_that_are_not_absorbed(workspace_bytes):
    (layout,) = layouts("packed", "alone")
    draw = lambda *shape, seed: leaf(  # noqa: E731
        *shape, seed=seed, device=start(), dtype=torch.float64
    ).detach()
    q, kv, w_uk = draw(TOTAL, 3, 7, seed=4), draw(TOTAL, 11, seed=5), draw(3, 4, 8, seed=6)
    absorbed = torch.cat([torch.einsum("qha,har->qhr", q[..., :4], w_uk), q[..., 4:]], -1)
    indices, _ = indexer_topk(indexer_inputs(layout, TOTAL), layout, 4)
    lse = sparse_attention(absorbed, kv, indices, softmax_scale=0.2, v_dim=8).lse
    settings = {"softmax_scale": 0.2, "workspace_bytes": workspace_bytes}
    got = captured_mass(q, kv, indices, lse, layout, w_uk=w_uk, **settings)
    expected = captured_mass(absorbed, kv, indices, lse, layout, **settings)
    assert torch.equal(got.isnan(), expected.isnan())
    assert relative_error(got.nan_to_num(), expected.nan_to_num()) < 1e-12


@pytest.mark.parametrize("workspace_bytes", [1, 5000, 2**28])
def test_captured_mass_in_any_budget(workspace_bytes):
    (layout,) = layouts("packed", "alone")
    q = leaf(TOTAL, 3, 8, seed=4, device=start(), dtype=torch.float64).detach()
    kv = leaf(TOTAL, 8, seed=5, device=start(), dtype=torch.float64).detach()
    inputs = indexer_inputs(layout, TOTAL)
    indices, _ = indexer_topk(inputs, layout, 4)
    lse = sparse_attention(q, kv, indices, softmax_scale=0.4, v_dim=8).lse
    got = captured_mass(
        q, kv, indices, lse, layout, softmax_scale=0.4, workspace_bytes=workspace_bytes
    )
    p = (torch.einsum("qhd,kd->qhk", q, kv) * 0.4).exp().cpu()
    for row, (first, last) in enumerate(
        zip(layout.start.tolist(), layout.end.tolist(), strict=True)
    ):
        chosen = [i for i in indices[row].tolist() if i >= 0]
        if first == last:
            assert got[row].isnan().all()
        else:
            expected = p[row][:, chosen].sum(-1) / p[row][:, first:last].sum(-1)
            assert relative_error(got[row], expected) < 1e-12


def test_the_log_weighs_by_what_a_mean_is_over(log):
    """A rank or microbatch with more tokens must weigh more; without tokens it must not count."""
    log.create(1, start())
    values = torch.tensor([0.5, math.nan, 1.0], device=start())
    log.record(0, {"dsa query overlap": Mean.of(values)})
    log.record(0, {"dsa query overlap": Mean.of(values[1:2])})
    log.record(0, {"dsa query overlap": Mean.of(values[:1])})
    log.record(0, {"indexer loss": Mean.of(values[1:2])})
    figures = log.reduce()
    assert float(figures["dsa query overlap"].value[0]) == pytest.approx(2 / 3)
    assert figures["indexer loss"].count.eq(0).all()


def test_an_attention_that_is_nan_is_not_left_out():
    """NaN means "no figure" only for queries without keys."""
    (layout,) = layouts("packed", "alone")
    tokens, count = layout.num_queries, 12

    def draw(*shape, seed):
        return leaf(*shape, seed=seed, device=start()).detach()

    inputs = IndexerInputs(
        draw(tokens, 2, 8, seed=1), draw(tokens, 8, seed=2), draw(tokens, 2, seed=3)
    )
    q, kv = draw(tokens, 3, 8, seed=4), draw(tokens, 8, seed=5)
    indices, length = indexer_topk(inputs, layout, 4)
    rows = sample_queries(tokens, count, start())
    real = layout.real[rows]
    assert 0 < real.sum() < count
    for wrong in (False, True):
        if wrong:
            q[rows[real][0], 1] = math.nan
        lse = sparse_attention(q, kv, indices, topk_length=length, softmax_scale=0.3, v_dim=8).lse
        attended = Attended(inputs, layout, 4, layout, q, kv, indices, lse, 0.3)
        mean = selection_health(attended, count, 2**20)["dsa attention mass captured"]
        assert mean.value.isnan() == wrong and mean.count == real.sum() * 3


@pytest.mark.parametrize("recompute", [{}, full(1), CORE], ids=["", "1", "core"])
@pytest.mark.parametrize("kind", MODELS)
def test_figures_of_layers(kind, recompute, log):
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.extras.rl.replay import IndexCapture

    config, arguments, changes = MODELS[kind]
    options = dataclasses.replace(changes.get("options", DSAOptions()), health_tokens=9)
    config = config(*arguments, **changes | recompute | {"options": options})
    model = gpt(config)
    with IndexCapture().on(model) as capture:
        losses = [forward(model, seed) for seed in (0, 1)]
        for loss in losses:
            loss.backward()
    figures = {name: mean.value.tolist() for name, mean in log.reduce().items()}
    ratio, topk = (4 if kind == "hybrid" else 1), config.dsa_indexer_topk
    rows = [r for r in sample_queries(64, 9, "cpu").tolist() if (r + 1) // ratio > topk]
    assert len(rows) > 4 and len(capture.microbatches) == 2
    for layer in range(1, config.num_layers + 1):
        overlap, mass = (
            figures[f"dsa {name}"][layer - 1]
            for name in ("query overlap", "attention mass captured")
        )
        if layer not in SELECTING[kind]:
            assert math.isnan(overlap)
            continue
        own = as_sets(capture.microbatches[0][layer])
        shares = [share(own[r - 1], own[r]) for r in rows]
        assert overlap == pytest.approx(sum(shares) / len(shares), abs=1e-5)
        assert 0 < mass < 1


def test_a_selection_is_judged_once_per_iteration(log):
    log.create(2, "cpu")
    assert [log.samples_selection(i) for i in (0, 1, 0)] == [True, True, False]
    log.reduce()
    assert log.samples_selection(0)


def test_nothing_is_judged_outside_of_the_training_loop(log):
    assert not log.is_on() and not log.samples_selection(0)
    log.create(2, "cpu")
    assert log.is_on() and log.samples_selection(0)


def test_compressed_lists_take_the_layout_of_positions():
    (layout,) = layouts("packed", "alone")
    keys = compressed_keys(layout, 4)
    inputs = indexer_inputs(layout, keys.count)
    indices, length = indexer_topk(inputs, keys.layout, 2)
    got = adjacent_overlap(indices, layout)
    sets = as_sets(indices)
    for row, (_, position, real) in enumerate(sequence_places(layout)):
        if real and position > 0 and length[row] > 0:
            assert float(got[row]) == pytest.approx(share(sets[row - 1], sets[row]))
        else:
            assert got[row].isnan()
