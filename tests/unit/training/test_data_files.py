"""Damaged data sets and file-system errors end in a message."""

import contextlib
import errno
from types import SimpleNamespace

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dsa.errors import ConfigError, FileError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.generate import evaluate
from megatron_dsa.extras.prepare_data.shards import write_byte_dataset
from megatron_dsa.training import data, flag_rules
from megatron_dsa.training.data_files import check_data_set
from megatron_dsa.training.entry_errors import explain
from megatron_dsa.training.files.system_errors import naming


@pytest.fixture
def prefix(tmp_path):
    write_byte_dataset(["one document", "another"], str(tmp_path / "data"))
    return tmp_path / "data"


def test_whole_data_sets(prefix):
    assert check_data_set(str(prefix)) == len("one document") + len("another") + 2


@pytest.mark.parametrize("ending", [".idx", ".bin"])
@pytest.mark.parametrize("kept", [0, 5, -1])
def test_truncated_files(ending, kept, prefix):
    file = prefix.with_suffix(ending)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=f"^--data-path .*{file.name}.*copy it again"):
        check_data_set(str(prefix))


@pytest.mark.parametrize("place", [3, 17])  # magic, dtype code
def test_damaged_headers(place, prefix):
    file = prefix.with_suffix(".idx")
    data = bytearray(file.read_bytes())
    data[place] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"^--data-path"):
        check_data_set(str(prefix))


def test_any_damaged_byte_of_an_index(prefix):
    file, refused = prefix.with_suffix(".idx"), 0
    whole = file.read_bytes()
    for place in range(len(whole)):
        for flip in (0x80, 0x7F):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            file.write_bytes(damaged)
            try:
                check_data_set(str(prefix))
            except ConfigError:
                refused += 1
    assert refused > 1.5 * len(whole)  # of two kinds of damage


def test_arrays_that_are_cut_off():
    """numpy's error of a full disk has no errno."""
    message = explain(OSError("200000 requested and 38400 written")).message
    assert message.startswith("standard output or a file: only part") and "make room" in message


@pytest.mark.parametrize("code", ["ENOSPC", "EACCES", "EROFS", "ENOTDIR", "EISDIR", "ENAMETOOLONG"])
def test_errors_of_the_file_system(code):
    with pytest.raises(OSError) as raised, naming("there/file"):
        raise OSError(getattr(errno, code), "reason")
    ending = explain(raised.value)
    assert ending.code == 2 and ending.message.startswith("there/file: reason: ")


@pytest.mark.parametrize("documents", [["x"], []])
def test_too_few_tokens_to_evaluate(documents, tmp_path, monkeypatch):
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in documents:
        builder.add_document(torch.tensor([120, 256]), [2])
    builder.finalize(f"{prefix}.idx")
    loaded = SimpleNamespace(
        args=SimpleNamespace(dsa_sft=False, seq_length=96, full_validation=True)
    )
    monkeypatch.setattr(evaluate, "trained_model", lambda *_: contextlib.nullcontext(loaded))
    says = f"^--data-path {prefix} must have more tokens than a .* got {2 * len(documents)}: give"
    with pytest.raises(ConfigError, match=says):
        main(["evaluate", "--load", ".", "--data-path", prefix])
    with pytest.raises(ConfigError, match=r"there is no file .*other\.idx"):
        main(["evaluate", "--load", ".", "--data-path", f"{tmp_path}/other"])


@pytest.mark.parametrize(
    "content",
    [
        '{"train": [',
        "[]",
        '{"train": ["a"], "valid": ["b"]}',
        '{"train": 1, "valid": [], "test": []}',
    ],
)
def test_files_that_list_no_data_sets(content, tmp_path, monkeypatch):
    flag = "per_split_data_args_path"
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    names += ("data_args_path", "per_split_data_args_path")
    path = tmp_path / "list"
    path.write_text(content)
    args = SimpleNamespace(**dict.fromkeys(names) | {flag: str(path)}, mock_data=False)
    monkeypatch.setattr(data, "get_args", lambda: args)
    with pytest.raises(ConfigError, match=f"^--{flag.replace('_', '-')} {path} must hold "):
        data.train_valid_test_datasets([1, 0, 0])


@pytest.mark.parametrize("code", ["EACCES", "EROFS", "ENOSPC"])
def test_folders_that_cannot_be_written(code, tmp_path, monkeypatch):
    """Before the first step, not after hours."""

    def refuse(dir):
        raise OSError(getattr(errno, code), "reason", f"{dir}/tmp1")

    with pytest.raises(OSError) as raised:
        flag_rules._require_writable(f"{__file__}/save")
    assert explain(raised.value).message.endswith(": Not a directory: check the path")
    monkeypatch.setattr(flag_rules.tempfile, "TemporaryFile", refuse)
    with pytest.raises(FileError, match=f"^{tmp_path}: reason: "):
        flag_rules._require_writable(str(tmp_path))


def test_other_system_errors_keep_their_traceback():
    assert explain(BrokenPipeError(errno.EPIPE, "reason")) is None


def test_another_schedule_at_resume():
    scheduler = OptimizerParamScheduler.__new__(OptimizerParamScheduler)
    scheduler.override_opt_param_scheduler = False
    scheduler.use_checkpoint_opt_param_scheduler = False
    with pytest.raises(AssertionError) as raised:
        scheduler._check_and_set(4, 8, "total number of iterations")
    message = explain(raised.value).message
    assert "total number of iterations" in message
    assert "--train-iters" in message and "--override-opt-param-scheduler" in message
