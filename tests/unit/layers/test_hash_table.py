"""Tables of hash routing: balanced, different experts per token, rejected if wrong."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.v4.hash_table import balanced_table, check_table

SHAPES = [(1000, 6, 256), (1001, 6, 64), (97, 3, 5), (97, 4, 5), (50, 5, 5), (64, 1, 7), (3, 2, 9)]


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_stand_equally_often(shape):
    vocabulary, topk, experts = shape
    for seed in range(5):
        table = balanced_table(vocabulary, topk, experts, seed)
        assert table.shape == (vocabulary, topk) and table.dtype == torch.int32
        check_table(table, topk, experts, "table")  # different experts per token
        counts = table.flatten().bincount(minlength=experts)
        assert counts.max() - counts.min() <= 1 and counts.sum() == vocabulary * topk


def test_seeds_tell_tables_apart():
    one, again, other = (balanced_table(500, 6, 64, seed) for seed in (1, 1, 2))
    assert one.equal(again) and not one.equal(other)
    rows = one.long().sort(1).values @ (64 ** torch.arange(6))
    assert len(rows.unique()) > 490  # entries are independent


def test_default_device_is_not_taken():
    """Models are planned and read inside of torch.device("meta")."""
    with torch.device("meta"):
        assert balanced_table(20, 2, 4, 0).device.type == "cpu"


WRONG = {
    r"experts from 0 to --num-experts - 1 = 4, got \[1, 5\] for token 2 \(2 such": {2: 5, 4: 7},
    r"experts from 0 .* got \[1, -1\] for token 0": {0: -1},
    r"experts from 0 .* got \[1, 4294967299\] for token 2": {2: 2**32 + 3},
    r"must not name an expert twice for a token, got \[1, 1\] for token 3 \(1 such": {3: 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values_are_refused(message):
    table = torch.tensor([[1, 2]] * 6)
    check_table(table, 2, 5, "table")
    for row, value in WRONG[message].items():
        table[row, 1] = value
    with pytest.raises(ConfigError, match=message):
        check_table(table, 2, 5, "table")


@pytest.mark.parametrize("table", [torch.zeros(4, 3).int(), torch.rand(4, 2), torch.ones(4).int()])
def test_wrong_forms_are_refused(table):
    with pytest.raises(ConfigError, match=r"must hold integers .vocabulary, --moe-router-topk = 2"):
        check_table(table, 2, 5, "table")


def test_more_experts_of_a_token_than_there_are():
    with pytest.raises(ConfigError, match="experts must be at least topk = 4, got 3"):
        balanced_table(10, 4, 3, 0)
