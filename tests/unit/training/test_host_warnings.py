"""Warnings of the host: the listed ones are silenced, all others and on request all are shown."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megatron_dsa.training import host_warnings
from megatron_dsa.training.host_warnings import RECORDS, WARNINGS, silence_host_warnings

ROOT = Path(__file__).resolve().parents[3]
#: A module of each kind that a pattern of :data:`WARNINGS` stands for.
MODULES = {
    r"megatron\.": "megatron.core.optimizer",
    r".*[/\\]megatron[/\\]core[/\\]": "/site-packages/megatron/core/inference/allocator",
    r"torch\.utils\.data": "torch.utils.data.dataloader",
    r"torch\.distributed\.": "torch.distributed.checkpoint.utils",
    "": "anywhere",
}


@pytest.fixture
def as_started(monkeypatch):
    """A process that has just started: no filters of ours, no ``-W``; yields the shown warnings."""
    monkeypatch.setattr(sys, "warnoptions", [])
    for name, _ in RECORDS:
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        yield shown


def give(message, category, module):
    warnings.warn_explicit(message, category, "file.py", 1, module=module, registry={})


@pytest.mark.parametrize("beginning, category, module", WARNINGS)
def test_only_the_message_is_silenced_and_only_from_its_module(
    beginning, category, module, as_started
):
    give(f"{beginning} and so on", category, MODULES[module])
    assert len(as_started) == 1  # shown before
    silence_host_warnings()
    give(f"{beginning} and so on", category, MODULES[module])
    assert len(as_started) == 1
    give(f"not {beginning}", category, MODULES[module])
    give(f"{beginning} and so on", RuntimeWarning, MODULES[module])
    expected = 3
    if module:
        give(f"{beginning} and so on", category, "my_project.megatron_like")
        expected = 4
    assert len(as_started) == expected


@pytest.mark.parametrize("name, beginning", RECORDS)
def test_only_the_record_is_dropped(name, beginning, as_started, caplog):
    silence_host_warnings()
    logging.getLogger(name).warning(f"{beginning} %s", "and so on")
    logging.getLogger(name).warning("result is wrong")
    assert [record.getMessage() for record in caplog.records] == ["result is wrong"]


@pytest.mark.parametrize("option, shown", [("default", True), ("i", False), ("ignore", False)])
def test_the_user_sees_them_on_request(option, shown, as_started, monkeypatch, caplog):
    monkeypatch.setattr(sys, "warnoptions", [option])
    silence_host_warnings()
    beginning, category, module = WARNINGS[0]
    give(beginning, category, MODULES[module])
    logging.getLogger(RECORDS[0][0]).warning(RECORDS[0][1])
    assert [len(as_started), len(caplog.records)] == ([1, 1] if shown else [0, 0])


def test_filters_of_the_program_go_first(as_started):
    beginning, category, module = WARNINGS[0]
    warnings.filterwarnings("error", category=category)
    silence_host_warnings()
    with pytest.raises(category):
        give(beginning, category, MODULES[module])


def test_a_second_call_changes_nothing(as_started):
    silence_host_warnings()
    before = list(warnings.filters)
    silence_host_warnings()
    assert warnings.filters == before
    for name, _ in RECORDS:
        assert logging.getLogger(name).filters.count(host_warnings._is_shown) == 1


def test_a_command_prints_nothing_on_the_standard_error(tmp_path):
    """As a user starts it, without settings that silence warnings."""
    text = tmp_path / "text.txt"
    text.write_text("some text\n", encoding="utf-8")
    command = ["prepare-data", "--input", str(text), "--output", str(tmp_path / "data")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dsa", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "byte tokens" in done.stdout and not done.stderr
