"""Result files: complete or absent, never written through a link, errors in a message."""

import os
import sys

import pytest
import torch

from megatron_dsa.errors import ConfigError, FileError
from megatron_dsa.extras.prepare_data.shards import write_byte_dataset
from megatron_dsa.training.entry_errors import explain
from tests.helpers import no_room


def contents(folder):
    return {
        str(x.relative_to(folder)): x.read_bytes() if x.is_file() else None
        for x in folder.rglob("*")
    }


def prepared(folder):
    write_byte_dataset(["text " * 1000], folder / "name")


def page(folder):
    pytest.importorskip("tensorboard")
    from megatron_dsa.extras.report.events import RunLog
    from megatron_dsa.extras.report.page import write_html

    write_html(
        [RunLog("run", {"lm loss": [(1, 1.0), (2, 0.5)]}, {}, {})], "title", folder / "a.html"
    )


def picture(folder):
    pytest.importorskip("tensorboard")
    from megatron_dsa.extras.report.events import RunLog
    from megatron_dsa.extras.report.page import write_png

    write_png([RunLog("run", {"lm loss": [(1, 1.0), (2, 0.5)]}, {}, {})], "title", folder / "a.png")


def shards(folder):
    from megatron_dsa.extras.huggingface.files import CheckpointWriter

    with CheckpointWriter(folder, shard_bytes=500) as writer:
        writer.add("x", torch.zeros(40))
        writer.add("y", torch.zeros(4000))


WRITERS = {
    "prepare-data": (prepared, ["name.bin", "name.idx"]),
    "page": (page, ["a.html"]),
    "picture": (picture, ["a.png"]),
    "shards": (shards, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_nothing(name, tmp_path):
    write, files = WRITERS[name]
    folder = tmp_path / "folder" if name != "page" else tmp_path
    with no_room(1000), pytest.raises(FileError) as raised:
        write(folder)
    message = explain(raised.value).message
    assert message.startswith(str(folder)) and "File too large: raise the limit" in message
    assert contents(tmp_path) == {}
    write(folder)
    assert set(files) <= set(contents(folder))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_names_that_are_taken(name, kind, tmp_path):
    write, files = WRITERS[name]
    target = tmp_path / "target"
    target.write_text("kept")
    for each in files:
        folder = tmp_path / each
        folder.mkdir()
        if kind == "folder":
            (folder / each).mkdir()
        else:
            (folder / each).symlink_to(target if kind == "link" else tmp_path / "nothing")
        before = contents(folder)
        with pytest.raises(ConfigError, match=f"{each} is a link or no file: remove it"):
            write(folder)
        assert contents(folder) == before
    assert target.read_text() == "kept" and not (tmp_path / "nothing").exists()


def test_output_on_a_full_disk(monkeypatch, capsys):
    from megatron_dsa.__main__ import main

    monkeypatch.setattr(sys, "argv", ["megatron_dsa", "flags", "glm-5"])
    with open("/dev/full", "w") as full, pytest.raises(SystemExit) as leaving:
        monkeypatch.setattr(sys, "stdout", full)
        main()
    assert leaving.value.code == 2
    assert capsys.readouterr().err == (
        "error: standard output: No space left on device: make room, and start again\n"
    )


def test_words_that_are_not_utf_8(monkeypatch):
    from megatron_dsa.__main__ import main
    from megatron_dsa.extras import cli

    monkeypatch.setattr(cli, "main", lambda: print(os.fsdecode(b"caf\xe9")) or 0)
    with open(os.devnull, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main() == 0
