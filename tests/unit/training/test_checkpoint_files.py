"""Damaged checkpoints are reported, with file and fix, before Megatron reads them."""

import argparse
import json

import pytest
import torch
from torch.distributed import checkpoint

from megatron_dsa.errors import ConfigError
from megatron_dsa.patches.tracker_file import keep_tracker_file_whole
from megatron_dsa.training.checkpoint_files import TRACKER, check_files, read_tracker
from megatron_dsa.training.checkpoints import checkpoint_directory, distributed_checkpoint


@pytest.fixture
def root(tmp_path):
    """Write two iterations of torch's distributed checkpoints; return their folder."""
    for step in (1, 2):
        directory = tmp_path / f"iter_{step:07d}"
        checkpoint.save(
            {"weight": torch.randn(64, 16), "bias": torch.randn(16)},
            storage_writer=checkpoint.FileSystemWriter(directory),
            no_dist=True,
        )
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (directory / "metadata.json").write_text(json.dumps(config))
    (tmp_path / TRACKER).write_text("2")
    return tmp_path


def found(root, step=None):
    args = argparse.Namespace(load=str(root), pretrained_checkpoint=None, ckpt_step=step)
    return checkpoint_directory(args)


def test_whole_checkpoints_are_found(root):
    assert found(root) == root / "iter_0000002"
    assert found(root, step=1) == root / "iter_0000001"
    (root / "iter_0000002").rename(root / "release")
    (root / TRACKER).write_text("release\n")
    assert found(root, step=1) == root / "release"
    (root / TRACKER).unlink()
    assert found(root) is None


DAMAGED = [("", "is empty"), ("abc", "'abc'"), ("-3", "'-3'"), ("\0\0", r"'\x00\x00'")]


@pytest.mark.parametrize("content, says", DAMAGED)
def test_a_damaged_tracker_stands_for_the_last_whole_checkpoint(content, says, root, capsys):
    """Rank 0 must report it once, and every rank find the same one."""
    (root / TRACKER).write_text(content)
    (root / "iter_0000003").mkdir()  # a save had begun
    assert found(root) == found(root) == root / "iter_0000002"
    (line,) = capsys.readouterr().out.splitlines()
    assert says in line and f"it stands for the last whole checkpoint of {root}, 2 (" in line
    assert found(root, step=1) == root / "iter_0000001"


def test_what_a_damaged_tracker_falls_back_to(root):
    (root / TRACKER).write_text("")
    cut(root / "iter_0000002" / "__0_0.distcp")
    assert found(root) == root / "iter_0000001"
    (root / "iter_0000001").rename(root / "release")
    (root / TRACKER).write_text("x")
    assert found(root) == root / "release"
    cut(root / "release" / "__0_0.distcp")
    (root / TRACKER).write_text("y")
    with pytest.raises(ConfigError, match=r"holds 'y'.* no whole checkpoint to take"):
        found(root)


def test_megatron_reads_and_writes_the_tracker_whole(root, monkeypatch):
    """Megatron's own writing left an empty file when killed."""
    from megatron.training import checkpointing

    monkeypatch.setattr(checkpointing, "maybe_msc", checkpointing.maybe_msc)
    keep_tracker_file_whole(read_tracker)
    tracker = root / TRACKER
    tracker.write_text("")
    assert checkpointing.read_metadata(str(tracker)) == (2, False)
    tracker.write_text("1")
    with checkpointing.maybe_msc.open(str(tracker), "w") as file:
        file.write("2")
        assert tracker.read_text() == "1"
    assert checkpointing.read_metadata(str(tracker)) == (2, False)
    with pytest.raises(KeyboardInterrupt), checkpointing.maybe_msc.open(str(tracker), "w") as file:
        file.write("3")
        raise KeyboardInterrupt
    assert tracker.read_text() == "2"
    # Other files as before.
    with checkpointing.maybe_msc.open(str(root / "other"), "w") as file:
        file.write("text")
    assert (root / "other").read_text() == "text"


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def replace(path):
    """Write a pickle of an unknown module."""
    path.write_bytes(b"cno_such_module\nx\n.")


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "name, damage, says",
    [
        (".metadata", lambda path: path.unlink(), ".metadata is missing"),
        (".metadata", cut, ".metadata is damaged"),
        (".metadata", empty, ".metadata is damaged"),
        (
            ".metadata",
            lambda path: path.write_bytes(b"cno_such_module\nx\n."),
            ".metadata is damaged",
        ),
        ("metadata.json", empty, "metadata.json is not JSON"),
        ("metadata.json", lambda path: path.unlink(), "metadata.json is missing"),
        ("__0_0.distcp", cut, "__0_0.distcp is cut off: "),
        ("__0_0.distcp", empty, "__0_0.distcp is cut off: 0 bytes of "),
        ("__0_0.distcp", lambda path: path.unlink(), "__0_0.distcp is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files(name, damage, says, root):
    damage(root / "iter_0000002" / name)
    with pytest.raises(ConfigError) as raised:
        found(root)
    assert f"iter_0000002/{says}" in str(raised.value)
    assert "add --ckpt-step 1 to take iteration 1, or copy it again" in str(raised.value)
    assert found(root, step=1) == root / "iter_0000001"


def test_iteration_that_is_not_there(root):
    (root / TRACKER).write_text("77")
    message = "iter_0000077, which .* does not hold. Saved there: 1, 2. Name one of them"
    with pytest.raises(ConfigError, match=message):
        found(root)


def test_commands_name_their_own_flag(root):
    with pytest.raises(ConfigError, match=r"or --step names .* Name one of them with --step"):
        distributed_checkpoint(str(root), 77, "--load")


def test_the_only_checkpoint_has_no_other_beside_it(root):
    (root / "iter_0000001").rename(root.parent / "elsewhere")
    empty(root / "iter_0000002" / "__0_0.distcp")
    with pytest.raises(ConfigError, match="there is no other beside it"):
        check_files(root / "iter_0000002")


def test_another_one_that_is_damaged_is_not_recommended(root):
    empty(root / "iter_0000001" / "__0_0.distcp")
    cut(root / "iter_0000002" / "__0_0.distcp")
    with pytest.raises(ConfigError, match="there is no other beside it: copy it again"):
        found(root)


def test_other_formats_are_left_to_megatron(tmp_path):
    (tmp_path / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    check_files(tmp_path / "iter_0000002")
    (tmp_path / "iter_0000003").mkdir()
    with pytest.raises(ConfigError, match=r"iter_0000003 holds no checkpoint.*--ckpt-step 2"):
        check_files(tmp_path / "iter_0000003")


def test_one_rank_looks_at_the_files(root, monkeypatch):
    """Thousands of ranks would query the file system for the same files."""
    empty(root / "iter_0000002" / "__0_0.distcp")
    monkeypatch.setattr("megatron_dsa.training.checkpoints.this_rank", lambda: 3)
    assert found(root) == root / "iter_0000002"
