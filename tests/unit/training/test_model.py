"""The table of what runs the operations of a model."""

import torch

from megatron_dsa.dispatch import Candidate, Choice, Support
from megatron_dsa.training.model import print_start_table, start_table
from tests.host import start

FUSED = Candidate("fast", "", Support(""))
TORCH = Candidate("torch", "", Support(""), fused=False)
WHY = (("fast", "missing: it is not installed; pip install it"), ("other", "has no sink"))


def test_a_line_for_each_implementation_of_an_operation():
    choices = [
        Choice("two", FUSED, (("other", "has no sink"),)),
        Choice("one_with_a_name", TORCH, WHY),
        Choice("one_with_a_name", TORCH, WHY[1:]),
        Choice("two", TORCH, named=True),
        Choice("three", FUSED, never_run=True),
    ]
    assert start_table(choices) == [
        "operation        implementation  reason",
        "one_with_a_name  torch           fast: missing: it is not installed",
        "three            fast            compiled for this GPU, not run on one",
        "two              fast",
        "two              torch           named by --dsa-impl or MEGATRON_DSA_IMPL",
    ]


def test_a_model_without_operations_has_no_table(capsys):
    print_start_table([])
    assert not capsys.readouterr().out


def test_other_ranks_print_nothing(capsys, monkeypatch):
    start()
    print_start_table([Choice("one", TORCH, WHY)])
    assert capsys.readouterr().out.count("megatron_dsa runs") == 1
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    print_start_table([Choice("one", TORCH, WHY)])
    assert not capsys.readouterr().out
