"""Listed warnings and records are hidden; all others, and on request all, are shown."""

import argparse
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from megatron.training import arguments, checkpointing, global_vars, training

from megatron_dsa.training import quiet_output as quiet
from megatron_dsa.training.quiet_output import (
    LONG_RECORDS,
    RECORDS,
    WARNINGS,
    quiet_output,
    silence_host_warnings,
)

ROOT = Path(__file__).resolve().parents[3]
#: A module for each pattern of :data:`WARNINGS`.
MODULES = {
    r"megatron\.": "megatron.core.optimizer",
    r".*[/\\]megatron[/\\]core[/\\]": "/site-packages/megatron/core/inference/allocator",
    r"torch\.utils\.data": "torch.utils.data.dataloader",
    r"torch\.distributed\.": "torch.distributed.checkpoint.utils",
    "": "anywhere",
}


@pytest.fixture
def as_started(monkeypatch):
    """Imitate a new process: no filters of ours, no ``-W``; yields the shown warnings."""
    monkeypatch.setattr(sys, "warnoptions", [])
    for name, _ in RECORDS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        yield shown


def give(message, module, category=UserWarning):
    warnings.warn_explicit(message, category, "file.py", 1, module=module, registry={})


@pytest.mark.parametrize("beginning, module", WARNINGS)
def test_only_the_message_is_silenced_and_only_from_its_module(beginning, module, as_started):
    give(f"{beginning} and so on", MODULES[module])
    assert len(as_started) == 1  # shown before
    silence_host_warnings()
    give(f"{beginning} and so on", MODULES[module])
    assert len(as_started) == 1
    give(f"not {beginning}", MODULES[module])
    give(f"{beginning} and so on", "my_project.megatron_like")
    assert len(as_started) == (3 if module else 2)


def test_only_the_records_are_dropped(as_started, caplog):
    for _ in range(2):  # a second call changes nothing
        silence_host_warnings()
    for name, beginning in RECORDS:
        logging.getLogger(name).warning(f"{beginning} %s", "and so on")
        logging.getLogger(name).warning("result is wrong")
        assert logging.getLogger(name).filters.count(quiet._is_shown) == 1
    assert {record.getMessage() for record in caplog.records} == {"result is wrong"}


@pytest.mark.parametrize("option, shown", [("default", True), ("i", False), ("ignore", False)])
def test_the_user_sees_them_on_request(option, shown, as_started, monkeypatch, caplog):
    monkeypatch.setattr(sys, "warnoptions", [option])
    silence_host_warnings()
    beginning, module = WARNINGS[0]
    give(beginning, MODULES[module])
    logging.getLogger(RECORDS[0][0]).warning(RECORDS[0][1])
    assert [len(as_started), len(caplog.records)] == ([1, 1] if shown else [0, 0])


def test_filters_of_the_program_go_first(as_started):
    beginning, module = WARNINGS[0]
    warnings.filterwarnings("error", category=UserWarning)
    silence_host_warnings()
    with pytest.raises(UserWarning):
        give(beginning, MODULES[module])


def test_a_command_prints_nothing_on_the_standard_error(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text\n", encoding="utf-8")
    command = ["prepare-data", "--input", str(text), "--output", str(tmp_path / "data")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dsa", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "byte tokens" in done.stdout and not done.stderr


def start_of(args, monkeypatch, root):
    """Imitate Megatron's start."""
    monkeypatch.setattr(logging.getLogger(), "level", root)
    logging.getLogger().manager._clear_cache()
    arguments._print_args("arguments", args)
    for name, beginning in LONG_RECORDS:
        logging.getLogger(name).info(f"{beginning}\n\tmore")
        logging.getLogger(name).info("another")


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
        assert records == ["another", "another"]
    else:
        assert "a value" in out and "not printed" not in out and len(records) == 4


@pytest.mark.parametrize("save", ["here", "there"])
def test_a_first_start_needs_no_warning(save, monkeypatch, capsys):
    args = argparse.Namespace(
        load="here", save=save, logging_level=None, non_persistent_global_ckpt_dir=None,
        non_persistent_ckpt_type=None, exit_on_missing_checkpoint=False,
    )  # fmt: skip
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.delenv("MEGATRON_LOGGING_LEVEL", raising=False)
    with quiet_output():
        checkpointing._load_base_checkpoint("here", args, rank0=False)
        checkpointing.print_rank_0("another line")
    first, *rest = capsys.readouterr().out.splitlines()
    assert rest[-1] == "another line"
    if save == "here":
        assert first == "> no checkpoint in here yet: this run begins" and len(rest) == 1
    else:
        assert first.startswith("WARNING: could not find the metadata file") and len(rest) == 2


@pytest.mark.parametrize("gpu", [False, True])
def test_memory_of_a_gpu_that_is_there(gpu, monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        training, "report_memory", lambda name, process_group=None: said.append(name)
    )
    with quiet_output():
        training.report_memory("after", process_group=None)
    assert said == ["after"] * gpu


def test_nothing_is_changed_afterwards():
    loggers = [logging.getLogger(name) for name, _ in LONG_RECORDS]
    changed = (
        (arguments, "_print_args"), (training, "report_theoretical_memory"),
        (training, "report_memory"), (checkpointing, "print_rank_0"),
    )  # fmt: skip
    before = [getattr(*each) for each in changed]
    filters = [list(logger.filters) for logger in loggers]
    with pytest.raises(KeyError), quiet_output():
        assert all(getattr(*each) is not was for each, was in zip(changed, before, strict=True))
        raise KeyError
    assert [getattr(*each) for each in changed] == before
    assert [logger.filters for logger in loggers] == filters


def test_other_ranks_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(quiet, "this_rank", lambda: 1)
    monkeypatch.delenv("MEGATRON_LOGGING_LEVEL", raising=False)
    with quiet_output():
        arguments._print_args("arguments", argparse.Namespace(logging_level=None))
    assert not capsys.readouterr().out
