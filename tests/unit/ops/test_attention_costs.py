"""Costs of attention to selected keys, and their crossover lengths."""

from pathlib import Path

import pytest

from benchmarks.rows import latest, read_csv
from megatron_dsa.ops.attention_costs import (
    MASKED_PS,
    SPARSE_PS,
    TEACHER_PS,
    AttentionCosts,
    PairDims,
    attention_costs,
    expansion_ps,
)

MEASURED = Path(__file__).resolve().parents[3] / "benchmarks"
#: Operations of masked dense attention whose time enters the costs.
PARTS = ("forward", "backward", "probabilities")


@pytest.mark.parametrize(
    ("heads", "length", "topk", "masked"),
    [
        (128, 1, 2048, True),
        (128, 2048, 2048, True),
        (128, 8192, 2048, True),
        (128, 16384, 2048, False),
        (128, 131072, 2048, False),
        (64, 12288, 2048, True),
        (64, 13312, 2048, False),
        (32, 16384, 2048, True),
        (32, 24576, 2048, False),
        (16, 24576, 2048, True),
        (16, 32768, 2048, True),  # 93.3 ms of a layer, 113 by sparse attention
        (16, 40960, 2048, False),
        (8, 24576, 2048, True),
        (128, 4096, 512, False),
    ],
)
def test_which_is_cheaper(heads, length, topk, masked):
    assert attention_costs(heads).masked_is_cheaper(length, topk) == masked


@pytest.mark.parametrize(
    ("heads", "taught", "least", "most"),
    [
        (128, 1.0, 12000, 13000),
        (128, 1 / 8, 14000, 15000),  # 72 ms of a layer at 12k, 83 by sparse; 115 and 113 at 16k
        (64, 1.0, 12000, 13000),
        (32, 1.0, 21500, 22500),
        (16, 1.0, 28000, 40000),
    ],
)
def test_crossover_of_2048_keys(heads, taught, least, most):
    assert least < attention_costs(heads, taught=taught).crossover(2048) < most


@pytest.mark.parametrize("heads", [1, 16, 24, 48, 64, 128])
@pytest.mark.parametrize("topk", [1, 7, 512, 2048])
def test_crossover_is_the_last_length_that_is_cheaper(heads, topk):
    costs = attention_costs(heads)
    length = costs.crossover(topk)
    assert costs.masked_is_cheaper(length, topk)
    assert not costs.masked_is_cheaper(length + 1, topk)


def test_costs_are_those_of_pairs_one_by_one():
    costs = AttentionCosts(masked=2.0, sparse=5.0)
    for length in range(1, 60):
        visible = sum(t + 1 for t in range(length))
        selected = sum(min(t + 1, 6) for t in range(length))
        assert costs.masked_is_cheaper(length, 6) == (2.0 * visible < 5.0 * selected)


@pytest.mark.parametrize("expansion", [0.0, 2.9, 3.1, 10.6, 11.6, 11.65, 11.7, 20.0])
def test_expansion_counts_once_per_token(expansion):
    """The longest length must be found even if short sequences, or all, are dearer."""
    costs = AttentionCosts(masked=2.0, sparse=5.0, expansion=expansion)
    cheaper = []
    for length in range(1, 200):
        visible = sum(t + 1 for t in range(length))
        selected = sum(min(t + 1, 6) for t in range(length))
        wins = 2.0 * visible + expansion * length < 5.0 * selected
        assert costs.masked_is_cheaper(length, 6) == wins
        cheaper += [length] * wins
    assert costs.crossover(6) == max(cheaper, default=0)
    assert (not cheaper) == (expansion > 195 / 9 - 10)  # at 9 tokens
    assert (1 in cheaper) == (expansion < 3)


def test_expansion_of_v3_2():
    """Six operations for each of 512 x 256 weights at 600 of them per picosecond."""
    one = expansion_ps(512, 128 + 128)
    assert one == pytest.approx(1310.72)
    crossovers = [attention_costs(128, expansion=n * one).crossover(2048) for n in (0, 1, 3, 7)]
    assert crossovers == sorted(crossovers, reverse=True)
    assert 8500 < crossovers[3] < crossovers[1] < crossovers[0] < 13000
    # From 13 other ranks on, their keys cost more than masked dense attention saves at best.
    best = [attention_costs(128, expansion=n * one).crossover(2048) for n in (12, 13)]
    assert best[0] > 2048 and best[1] == 0


def test_heads_between_two_measurements():
    sparse = [attention_costs(heads).sparse for heads in (1, 16, 24, 32, 48, 64, 128)]
    assert sparse == sorted(sparse, reverse=True)
    assert sparse[0] == sparse[1] == SPARSE_PS[16] and sparse[5] == sparse[6] == SPARSE_PS[64]
    assert SPARSE_PS[16] > sparse[2] > sparse[3] == SPARSE_PS[32] > sparse[4] > SPARSE_PS[64]


def test_wider_heads_cost_more():
    wide = attention_costs(64, dims=PairDims(256 + 256, 576 + 512))
    assert wide.masked == pytest.approx((MASKED_PS + TEACHER_PS) * 1.6)
    assert wide.sparse == SPARSE_PS[64]
    assert 2048 < wide.crossover(2048) < attention_costs(64).crossover(2048)


@pytest.mark.parametrize(
    ("heads", "tokens", "way"),
    [
        (128, 8192, "all-queries"),
        (128, 12288, "ours"),
        (64, 8192, "ours"),
        (16, 8192, "masked-rank"),
    ],
)
def test_cost_of_a_visible_pair_is_that_of_a_measured_layer(heads, tokens, way):
    """Shorter sequences have a clear choice, and a dearer pair."""
    rows = {
        row["part"]: row["value"]
        for row in latest(read_csv(MEASURED / "layer.csv"))
        if (row["way"], row["metric"]) == (way, "ms")
        and (row["case"].get("heads"), row["case"]["tokens"]) == (heads, tokens)
    }
    ms = sum(rows[f"step/masked_attention_{part}"] for part in PARTS)
    found = ms * 1e9 / (heads * tokens * (tokens + 1) / 2)
    taught = 1.0 if way == "all-queries" else 1 / 8
    assert attention_costs(heads, taught=taught).masked == pytest.approx(found, rel=0.06)


@pytest.mark.parametrize(("nope", "v", "teacher_ms"), [(128, 128, 1.68), (192, 256, 0.0)])
def test_cost_of_a_visible_pair_is_that_of_measured_kernels(nope, v, teacher_ms):
    case = {"heads": 64, "nope": nope, "v": v, "tokens": 8192, "distribution": "random"}
    calls = {
        row["part"]: row["value"]
        for row in latest(read_csv(MEASURED / "masked.csv"))
        if (row["way"], row["metric"]) == ("tilelang", "ms") and case.items() <= row["case"].items()
    }
    teacher = calls.get("teacher", teacher_ms)
    ms = calls["forward"] + calls["backward"] + teacher
    found = ms * 1e9 / (64 * 8192 * 8193 / 2)
    dims = PairDims(nope + 64 + v, 576 + 512)
    assert attention_costs(64, dims=dims).masked == pytest.approx(found, rel=0.1)


def test_alternating_sequences_are_computed_against_each_other():
    one, two, four = (attention_costs(128, count) for count in (1, 2, 4))
    assert two.masked == 2 * (MASKED_PS + TEACHER_PS)
    assert one.crossover(2048) > two.crossover(2048) > 2048
    assert four.crossover(2048) == 0 and not four.masked_is_cheaper(100, 2048)
