"""Origin and files of a run on the page, and the page in a browser."""

import argparse
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")

import torch
from torch.utils.tensorboard import SummaryWriter

from megatron_dsa.extras.cli import main
from megatron_dsa.extras.report import facts
from megatron_dsa.extras.report.events import RunLog, read_run
from megatron_dsa.training import provenance
from tests.cases.chromium import WIDTHS, opened, windows

#: Unix time of 2026-01-02 03:04:05 UTC.
BEGUN = 1767323045
ROOT = Path(__file__).resolve().parents[4]


def write_run(folder):
    """Write a run of two starts: 100 s, then 65 s half an hour later."""
    arguments = {
        "seq_length": 100, "save": str(folder / "check points"), "dsa_stage": "dense",
        "data_path": ["0.3", "data/a", "0.7", "data/b"], "dsa_machine": "8 x NVIDIA H200",
        "dsa_software": "megatron_dsa 1.0 (commit abc)",
        "is_global_batch_size_explicitly_specified_and_longer": "no",
    }  # fmt: skip
    for begun, steps, seconds in ((BEGUN, range(1, 11), 10), (BEGUN + 1800, range(11, 24), 5)):
        with SummaryWriter(str(folder / "events")) as writer:
            for name, value in arguments.items():
                writer.add_text(name, str(value), steps[0] - 1, walltime=begun)
            for number, step in enumerate(steps, 1):
                for tag in ("lm loss", "grad-norm", "learning-rate"):
                    writer.add_scalar(tag, 1 / step, step, walltime=begun + number * seconds)
    (folder / "check points/iter_0000023").mkdir(parents=True)
    for name in ("train.log", "measures.csv", "other.txt"):
        (folder / name).touch()


def test_origin_of_a_run(tmp_path):
    write_run(tmp_path)
    run = read_run("run", tmp_path / "events")
    assert facts.origin(run) == {
        "began": "2026-01-02 03:04 UTC", "took": "2 min 45 s, 2 starts",
        "machine": "8 x NVIDIA H200", "data": "0.3 data/a 0.7 data/b",
        "software": "megatron_dsa 1.0 (commit abc)",
    }  # fmt: skip
    assert set(facts.origin(RunLog("run", {}, {}, {})).values()) == {""}
    assert [facts._duration(x) for x in (7.4, 3599, 5000)] == ["7 s", "59 min 59 s", "1 h 23 min"]


def test_files_of_a_run(tmp_path):
    write_run(tmp_path)
    folder = tmp_path / "events"
    assert facts.files(read_run("run", folder)) == {
        "events": folder, "checkpoints": tmp_path / "check points",
        "train.log": tmp_path / "train.log", "measures.csv": tmp_path / "measures.csv",
    }  # fmt: skip
    elsewhere = RunLog("run", {}, {}, {"save": "nowhere"}, folder=folder)
    assert facts.files(elsewhere) == {"events": folder}


def test_what_the_entry_point_writes(monkeypatch):
    """Equal on all ranks, as Megatron requires of arguments."""
    args = argparse.Namespace(tensorboard_dir=None, wandb_project="")
    provenance.record_provenance(args)
    assert not hasattr(args, provenance.MACHINE)
    args.tensorboard_dir = "x"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("WORLD_SIZE", "3")
    provenance.record_provenance(args)
    assert getattr(args, provenance.MACHINE) == "3 x NVIDIA H200"
    software = getattr(args, provenance.SOFTWARE)
    assert f"torch {torch.__version__}" in software
    git = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    if head:
        assert f"(commit {head}" in software
    monkeypatch.setattr(provenance.megatron_dsa, "__file__", "/site-packages/megatron_dsa/x.py")
    assert "commit" not in provenance.software()


@pytest.mark.parametrize("width", WIDTHS)
def test_page_in_a_browser(width, tmp_path):
    write_run(tmp_path)
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "events"), "--output", str(page)]) == 0
    with windows() as context:
        shown, defects = opened(context, page.as_uri(), width)
        assert shown.locator("svg").count() == 3
        links = shown.evaluate("[...document.links].map(link => decodeURI(link.pathname))")
        assert len(links) == 4 and all(Path(link).exists() for link in links)
        assert not defects
