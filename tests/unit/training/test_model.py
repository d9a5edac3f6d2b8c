"""The table of a model's implementations, and the ranks with its embedding."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import Candidate, Choice, Reason, Support
from megatron_dsa.training.model import (
    DSAModelBuilder,
    DSAModelConfig,
    embedding_ranks,
    print_start_table,
    start_table,
)
from tests.host import small_config, start

FUSED = Candidate("fast", "", Support(""))
TORCH = Candidate("torch", "", Support(""), fused=False)
WHY = (
    ("fast", Reason("missing: it is not installed", "; pip install it")),
    ("other", Reason("has no sink")),
)


def test_a_line_for_each_implementation_of_an_operation():
    choices = [
        Choice("two", FUSED, WHY[1:]),
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


def model_of(layout, tied=False, **changes):
    config = small_config(
        num_layers=4, mtp_num_layers=1, pipeline_model_parallel_size=4,
        pipeline_dtype=torch.float64, pipeline_model_parallel_layout=layout, **changes,
    )  # fmt: skip
    return DSAModelConfig(
        transformer=config, vocab_size=64, share_embeddings_and_output_weights=tied
    )


@pytest.mark.parametrize(
    ("layout", "tied", "expected"),
    [
        (None, False, [2, 8]),
        ("Et|t|tt|mL", False, [2, 8]),
        ("Ett|tt|m|L", False, [2, 6]),
        ("Ett|tt|m|L", True, [2, 6, 8]),
        ("Et|tttm||L", False, [2, 4]),
    ],
)
def test_ranks_with_the_embedding(layout, tied, expected):
    assert embedding_ranks(model_of(layout, tied))([2, 4, 6, 8]) == expected


def test_another_group_of_embeddings_is_refused(monkeypatch):
    """Megatron's includes the last stage, whose output layer's gradient would be added."""
    embd, pp = (torch.distributed.ProcessGroup(0, 4) for _ in range(2))
    members = {id(embd): [0, 3], id(pp): [0, 1, 2, 3]}
    monkeypatch.setattr(
        torch.distributed, "get_process_group_ranks", lambda group: members[id(group)]
    )
    groups = SimpleNamespace(embd=embd, pp=pp)
    builder = DSAModelBuilder(model_of("Ett|tt|m|L"))
    with pytest.raises(ConfigError, match=r"must have the ranks \[0, 2\], got \[0, 3\]"):
        builder.build_distributed_models(groups)


@pytest.mark.parametrize("repeated", [False, True])
def test_linears_that_are_called_again_are_not_told_of_a_first_call(repeated, monkeypatch):
    """transformer-engine's overwrite the main gradient in the first call's backward."""

    class Linear(torch.nn.Module):
        disable_parameter_transpose_cache = False

    model = torch.nn.Module()
    model.decoder, model.mtp = Linear(), torch.nn.Sequential(Linear())
    parent = DSAModelBuilder.__mro__[2]
    monkeypatch.setattr(parent, "build_model", lambda *_args: model)
    config = DSAModelConfig(
        transformer=small_config(mtp_num_layers=2, mtp_use_repeated_layer=repeated),
        vocab_size=64,
    )  # fmt: skip
    assert DSAModelBuilder(config).build_model() is model
    assert model.mtp[0].disable_parameter_transpose_cache == repeated
    assert not model.decoder.disable_parameter_transpose_cache
