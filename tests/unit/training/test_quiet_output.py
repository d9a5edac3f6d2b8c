"""What Megatron prints at every start is left out, and shown at level DEBUG."""

import argparse
import logging

import pytest
from megatron.training import arguments, training

from megatron_dsa.training.quiet_output import quiet_output

BUCKETS = logging.getLogger("megatron.core.distributed.param_and_grad_buffer")
DATA = logging.getLogger("megatron.core.datasets.indexed_dataset")


def start_of(args, monkeypatch, root):
    """Do what Megatron does at a start."""
    monkeypatch.setattr(logging.getLogger(), "level", root)
    logging.getLogger().manager._clear_cache()
    arguments._print_args("arguments", args)
    BUCKETS.info("Number of buckets for gradient all-reduce: 1\nParams for bucket 1:\n\tlayer")
    BUCKETS.info("another\nof two lines")
    DATA.info("\tExtract the sequence lengths")
    DATA.info("total number")


@pytest.mark.parametrize("way", ["flag", "variable", None])
def test_start(way, monkeypatch, capsys, caplog):
    args = argparse.Namespace(logging_level=None, one=1, two="a value")
    monkeypatch.delenv("MEGATRON_LOGGING_LEVEL", raising=False)
    if way == "flag":
        args.logging_level = logging.DEBUG
    elif way == "variable":
        monkeypatch.setenv("MEGATRON_LOGGING_LEVEL", str(logging.DEBUG))
    with quiet_output():
        start_of(args, monkeypatch, logging.INFO if way is None else logging.DEBUG)
    out, records = capsys.readouterr().out, [r.getMessage() for r in caplog.records]
    if way is None:
        assert "a value" not in out and out.count("\n") == 1
        assert "3 arguments" in out and "--logging-level 10" in out
        first = "Number of buckets for gradient all-reduce: 1"
        assert records == [first, "another\nof two lines", "total number"]
    else:
        assert "a value" in out and "not printed" not in out
        assert len(records) == 4 and "\n\tlayer" in records[0]


def test_nothing_is_changed_afterwards():
    before = arguments._print_args, training.report_theoretical_memory
    filters = list(BUCKETS.filters), list(DATA.filters)
    with pytest.raises(KeyError), quiet_output():
        assert arguments._print_args is not before[0]
        assert training.report_theoretical_memory is not before[1]
        raise KeyError
    assert (arguments._print_args, training.report_theoretical_memory) == before
    assert (BUCKETS.filters, DATA.filters) == filters


def test_other_ranks_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr("megatron_dsa.training.quiet_output.this_rank", lambda: 1)
    monkeypatch.delenv("MEGATRON_LOGGING_LEVEL", raising=False)
    with quiet_output():
        arguments._print_args("arguments", argparse.Namespace(logging_level=None))
    assert not capsys.readouterr().out
