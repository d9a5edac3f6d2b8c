"""Printed output of a run: few lines, and one table of implementations."""

import itertools
import re

import pytest
import torch

from megatron_dsa.ops import OPERATIONS
from tests.functional.launch import train

#: Lines of the guide's five steps without training lines, mostly Megatron's.
LINES = 67
HYBRID = {
    "--num-layers": 3, "--csa-compress-ratios": [0, 4, 16], "--csa-window-size": 12,
    "--csa-compress-rotary-base": 160000, "--o-groups": 2, "--o-lora-rank": 16,
    "--kv-lora-rank": 24, "--qk-head-dim": 24, "--qk-pos-emb-head-dim": 8, "--v-head-dim": 32,
    "--dsa-indexer-topk": 6, "--dsa-indexer-rope-interleaved": True,
}  # fmt: skip


def rows(log, beginning):
    """Return the lines ``>   ...`` after the line with this beginning."""
    lines = log[log.index(beginning) :].splitlines()[1:]
    block = itertools.takewhile(lambda line: line.startswith(">   "), lines)
    return [line.removeprefix(">   ") for line in block]


def test_few_lines_besides_those_of_the_training(data):
    # Includes importing.
    log = train({"--data-path": data, "--train-iters": 5}, as_users_do=True).log
    others = [line for line in log.splitlines() if not re.match(r" *\[.*(iteration|memory)", line)]
    assert len(others) <= LINES, log
    (left_out,) = (line for line in others if "not printed" in line)
    assert "arguments" in left_out and "--logging-level 10" in left_out
    assert "training ..." in log and "number of parameters" in log  # Megatron's


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"--dsa-selected-attention": "masked"},
        {"--dsa-stage": "dense"},
        {"--dsa-stage": "warmup"},
        {"--attention-backend": "dsa_unfused"},
        HYBRID,
        HYBRID | {"--dsa-stage": "dense"},
    ],
    ids=["sparse", "masked", "dense", "warmup", "unfused", "hybrid", "hybrid dense"],
)
def test_the_table_names_every_operation_that_ran(changes, data):
    log = train({"--data-path": data, "--train-iters": 1} | changes).log
    assert log.count("> megatron_dsa runs") == 1
    header, *table = rows(log, "> megatron_dsa runs")
    assert header.split() == ["operation", "implementation", "reason"]
    chosen = {tuple(row.split()[:2]) for row in table}
    ran = set()
    for row in rows(log, "> megatron_dsa ran,"):
        operation, counts = row.split(": ")
        if operation in OPERATIONS:
            ran |= {(operation, count.split()[0]) for count in counts.split(", ")}
    assert ran and ran <= chosen
    attention = [line for line in log.splitlines() if "selected keys: " in line]
    if changes.get("--dsa-stage") or "--csa-compress-ratios" in changes:
        assert not attention
    else:
        masked = "--dsa-selected-attention" in changes
        assert f"selected keys: {'masked dense' if masked else 'sparse'} attention" in attention[0]
        assert ("masked_attention_forward", "torch") in ran or not masked
    if changes.get("--attention-backend") == "dsa_unfused":
        assert "WARNING:megatron_dsa" not in log
        assert all("not asked for: dsa_unfused" in row for row in table)
    elif not torch.cuda.is_available():
        assert log.count("no GPU: torch runs everything") == 1
        assert "WARNING:megatron_dsa" not in log and all(len(row.split()) == 2 for row in table)


@pytest.mark.ranks(2)
def test_only_rank_0_prints_the_table(data):
    log = train({"--data-path": data, "--train-iters": 1}, ranks=2).log
    assert log.count("> megatron_dsa runs") == log.count("> megatron_dsa ran,") == 1
    assert log.count("not printed") == 1


def test_all_candidates_on_request(data):
    log = train({"--data-path": data, "--train-iters": 1, "--dsa-log-dispatch": True}).log
    assert log.count("> megatron_dsa runs") == 1
    for row in rows(log, "> megatron_dsa runs")[1:]:
        operation, implementation = row.split()[:2]
        line = next(x for x in log.splitlines() if f"dispatch:{operation}: " in x)
        named = [line.split("(rejected: ", 1)[0], *re.split(r"; | rejected: |\(rejected: ", line)]
        assert f"{operation}: {implementation}" in named[0]
        if implementation == "torch":
            for candidate in OPERATIONS[operation].candidates[:-1]:
                assert any(part.startswith(f"{candidate.name}: ") for part in named), line
    assert "rejected: " not in train({"--data-path": data, "--train-iters": 1}).log
