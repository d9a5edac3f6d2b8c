"""Damaged files of data sets, and errors of the file system, end in a sentence."""

import errno

import pytest

from megatron_dsa.errors import ConfigError
from megatron_dsa.files.system_errors import naming
from megatron_dsa.training.data import write_byte_dataset
from megatron_dsa.training.data_files import check_data_set
from megatron_dsa.training.entry_errors import explain


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


@pytest.mark.parametrize("code", ["ENOSPC", "EACCES", "EROFS", "ENOTDIR", "EISDIR", "ENAMETOOLONG"])
def test_errors_of_the_file_system(code):
    with pytest.raises(OSError) as raised, naming("there/file"):
        raise OSError(getattr(errno, code), "reason")
    ending = explain(raised.value)
    assert ending.code == 2 and ending.message.startswith("there/file: reason: ")


def test_other_system_errors_keep_their_traceback():
    assert explain(BrokenPipeError(errno.EPIPE, "reason")) is None


def test_another_schedule_at_resume():
    def _check_and_set():
        raise AssertionError("class input value 4 and checkpoint value 8 do not match")

    with pytest.raises(AssertionError) as raised:
        _check_and_set()
    assert "--override-opt-param-scheduler" in explain(raised.value).message
