"""The comparison with float64 shared by doctor, tests and benchmarks."""

import math

import pytest
import torch

from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.testing.cases import Shape, full_lists, sampled_tokens
from megatron_dsa.testing.comparison import (
    Comparison,
    comparison_at_model_shapes,
    relative_error,
)
from megatron_dsa.testing.indexer_topk import SelectionCase, random_index_inputs
from megatron_dsa.testing.sparse_attention import attention_case, expected_attention

CPU = torch.device("cpu")
SHAPE = Shape(2, 12, 8, 3, 8, 10, 80, 20, dtype=torch.float32)


def test_relative_error():
    one = torch.ones(4)
    assert relative_error(1.5 * one, one) == 0.5
    assert math.isnan(relative_error(one * math.nan, one))
    # Errors are relative to any result, unless it is only rounding.
    assert relative_error(2e-9 * one.double(), 1e-9 * one.double()) == pytest.approx(1)
    assert relative_error(1e-3 * one, 1e-16 * one.double()) == pytest.approx(1e-3)
    assert relative_error(one[:0], one[:0]) == 0


def test_results_in_fp32_are_held_to_less():
    found = comparison_at_model_shapes(torch.bfloat16)
    for figure, error in (("out", 4e-3), ("lse", 2e-4), ("p_sum", 2e-3), ("loss", 5e-4)):
        found.keep_worst(figure, error)
    assert found.wrong() == ["lse 2.0e-04", "p_sum 2.0e-03"] and found.worst_error == 4e-3
    found = comparison_at_model_shapes(torch.float32)
    found.keep_worst("lse", 2e-5)
    assert found.wrong() == ["lse 2.0e-05"]
    assert Comparison(5e-3, errors={"out": math.nan}).worst_error == math.inf


def test_a_selection_without_the_best_key_is_found():
    tokens = torch.arange(80)
    inputs, layout = random_index_inputs(SHAPE, 80, CPU), bshd_layout(80, 1, CPU)
    case = SelectionCase(inputs, layout, tokens, SHAPE.topk)
    length = case.best.sum(-1)
    hidden = case.scores.masked_fill(~case.visible, -math.inf)
    ranked = hidden.argsort(dim=-1, descending=True, stable=True)

    def compared(first):
        lists = torch.full((80, SHAPE.topk), -1)
        for token, count in enumerate(length.tolist()):
            begin = first if token >= SHAPE.topk else 0
            lists[token, :count] = ranked[token, begin : begin + count].sort().values
        found = Comparison(5e-3)
        case.compare(found, lists, length)
        return found

    assert not compared(0).wrong()
    assert compared(1).errors["score inversion"] > 0.1


def test_some_queries_of_a_case_have_its_results():
    case = attention_case(SHAPE, full_lists(SHAPE, CPU))
    tokens = sampled_tokens(len(case.q), 5, CPU)
    assert tokens[0] == 0 and tokens[-1] == len(case.q) - 1
    whole, some = expected_attention(case), expected_attention(case.take(tokens))
    for name in ("out", "lse", "p_sum", "dq"):
        torch.testing.assert_close(getattr(whole, name)[tokens], getattr(some, name))
