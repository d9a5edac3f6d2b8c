"""The host's warnings that users cannot act on are silent, exactly these, and can be asked for."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from megatron_dsa.quiet import silence_host

ROOT = Path(__file__).resolve().parents[3]
APEX = "Apex is not installed. Falling back to Torch Norm"
DEPRECATED = ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED. GPTModel is only")


@pytest.fixture
def restored(monkeypatch):
    """Filters as they were; no options of the user."""
    monkeypatch.setattr(sys, "warnoptions", [])
    for name in (DEPRECATED[0], "torch.utils.cpp_extension"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def shown(message, category=UserWarning):
    """Whether a warning is shown."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn(message, category, stacklevel=1)
    return bool(seen)


def test_exactly_these_are_silent(restored, caplog):
    assert shown(APEX)
    for _ in range(2):
        silence_host()
    assert not shown(APEX)
    assert shown(APEX, FutureWarning) and shown("your data: " + APEX)
    logger = logging.getLogger(DEPRECATED[0])
    logger.warning(DEPRECATED[1])
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
    assert len(logger.filters) == 1


def test_who_asks_for_warnings_sees_them(restored, monkeypatch):
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    silence_host()
    assert shown(APEX) and not logging.getLogger(DEPRECATED[0]).filters


def test_a_command_prints_nothing_before_its_own_lines(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a line\n")
    command = ["prepare-data", "--input", str(text), "--output", str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dsa", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("8 byte tokens")
