"""Launcher variables are checked: wrong numbers hang the other processes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.training.launching import check_launch, remove_stale_build_lock

TWO = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1234"
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Set the variables of :data:`TWO` with changes; ``None`` unsets one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def launch(**changes):
        for name, value in (TWO | changes).items():
            monkeypatch.setenv(name, value or "")  # restored even if the call sets it
            if value is None:
                monkeypatch.delenv(name)
        check_launch()

    return launch


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"RANK": "2"}, "RANK must be less than WORLD_SIZE 2, got 2"),
        ({"RANK": "-1"}, "RANK must be a number of at least 0, got '-1'"),
        ({"RANK": "one"}, "RANK must be a number"),
        ({"RANK": None}, "RANK must be set with WORLD_SIZE 2"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK must be set with WORLD_SIZE 2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be less than WORLD_SIZE 2, got 2"),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "3"}, r"number of GPUs that this process sees \(2\)"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a number of at least 1, got '0'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number"),
        ({"WORLD_SIZE": None, "RANK": "1"}, "RANK must be less than WORLD_SIZE 1, got 1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR must be set: torchrun sets it"),
        ({"MASTER_PORT": None}, "MASTER_PORT must be set"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT must be a number of at least 0, got 'abc'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be less than 65536"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_is_refused(changes, says, launched):
    with pytest.raises(ConfigError, match=says):
        launched(**changes)


def test_rank_0_says_where_it_waits(launched, capsys):
    launched()
    assert capsys.readouterr().out.startswith("> waiting for 2 processes (WORLD_SIZE) at host:1234")
    launched(RANK="1", LOCAL_RANK="1")
    launched(RANK=None, LOCAL_RANK=None, WORLD_SIZE=None, MASTER_PORT="0")
    assert not capsys.readouterr().out


ALONE = dict.fromkeys(TWO)


def test_one_process_needs_no_launcher(launched, capsys):
    launched(**ALONE)
    found = {name: os.environ[name] for name in TWO}
    expected = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    assert found == expected | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "FLUX_JOB_SIZE"])
@pytest.mark.parametrize("more", [{}, {"MASTER_ADDR": "h", "MASTER_PORT": "5"}])
def test_several_processes_of_another_launcher_are_no_jobs_of_one(name, more, launched):
    launched(**ALONE | {name: "1"})
    for several in ({name: "2"}, {"PMIX_RANK": "0"}):
        with pytest.raises(ConfigError, match="WORLD_SIZE must be set where another launcher"):
            launched(**ALONE | more | several)


def test_a_launcher_that_shows_every_process_one_gpu(launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launched(RANK="1", LOCAL_RANK=None)


@pytest.mark.parametrize("flag", ["--help", "--help-dsa"])
def test_help_needs_no_launcher(flag):
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dsa.pretrain", flag]
    unset = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert "--dsa-stage" in done.stdout


@pytest.mark.parametrize("folder", [".", "py312_cpu"])
def test_a_stale_lock_of_a_build_goes(folder, tmp_path, monkeypatch, capsys):
    """A build in progress must keep its lock."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / folder / "share_storage_ext" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    remove_stale_build_lock()
    assert lock.exists() and not capsys.readouterr().out
    os.utime(lock, (time.time() - 700,) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", mock.Mock(side_effect=PermissionError("not yours")))
        remove_stale_build_lock()
    said = capsys.readouterr().out
    assert lock.exists() and "will wait for" in said and f"{lock}" in said and "not yours" in said
    remove_stale_build_lock()
    assert not lock.exists() and str(lock) in capsys.readouterr().out
    remove_stale_build_lock()
    assert not capsys.readouterr().out
