"""Data sets of ``prepare-data``: tokens compared with transformers, rejected input, kills and
resumes.
"""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_dsa.errors import ConfigError, FileError, VersionError
from megatron_dsa.extras import cli
from megatron_dsa.extras.prepare_data.command import _Pool
from megatron_dsa.extras.prepare_data.inputs import Reader, cut, python_documentation
from megatron_dsa.extras.prepare_data.shards import Workspace, write_byte_dataset
from megatron_dsa.extras.prepare_data.tokens import byte_tokens, hugging_face_tokens
from megatron_dsa.training.data import BYTE_EOD
from tests.cases.tokenizers import END, write_tokenizer
from tests.helpers import no_room

ROOT = Path(__file__).resolve().parents[4]
#: Line ends that JSON escapes, blanks, several scripts, text like a special token.
TEXTS = [
    "one\r\ntwo\rthree\n", "  blanks  \t", "déjà vu: ÷ ∑ 深度 🙂", f"{END} in a text", "\u2028",
    *(text[:3000] for text in python_documentation()[:40]),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEXTS)


def json_lines(texts, end="\n", **more):
    return "".join(
        json.dumps(more | {"id": i, "text": text}, ensure_ascii=i % 2 == 0) + end
        for i, text in enumerate(texts)
    ).encode()


def documents(prefix):
    data = IndexedDataset(str(prefix))
    assert len(data.document_indices) == len(data) + 1  # a sequence is a document
    return [data[i].tolist() for i in range(len(data))]


def contents(prefix):
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


def prepare(prefix, *paths, **flags):
    words = [word for name, value in flags.items() for word in _flag(name, value)]
    cli.main(["prepare-data", "--output", str(prefix), "--input", *map(str, paths), *words])


def _flag(name, value):
    flag = f"--{name.replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


def write_parquet(path, texts, rows=7):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    parquet.write_table(table, path, row_group_size=rows)


def files_of(folder, kind, texts):
    """Write texts in a format; return the paths."""
    path = folder / f"data.{kind}"
    if kind == "parquet":
        write_parquet(path, texts)
    elif kind == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i}.txt").write_bytes(text.encode())
        return [folder / f"{i}.txt" for i in range(len(texts))]
    else:
        end = "\r\n" if kind == "crlf.jsonl" else "\n"
        lines = json_lines(texts, end)
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return [path]


@pytest.mark.parametrize("kind", ["jsonl", "crlf.jsonl", "jsonl.gz", "parquet", "txt"])
@pytest.mark.parametrize("workers, shard_mb", [(1, 32), (3, 0.004)])
def test_tokens_are_those_of_transformers(kind, workers, shard_mb, tokenizer, tmp_path, capfd):
    from transformers import AutoTokenizer

    paths = files_of(tmp_path, kind, TEXTS)
    flags = {"tokenizer": tokenizer, "workers": workers, "shard_mb": shard_mb}
    prepare(tmp_path / "data", *paths, append_eod=True, **flags)
    reference = AutoTokenizer.from_pretrained(tokenizer)
    end = reference.convert_tokens_to_ids(END)
    expected = [[*reference(text)["input_ids"], end] for text in TEXTS]
    assert documents(tmp_path / "data") == expected and expected[0][0] == 0
    said = capfd.readouterr()
    tokens, longest = sum(map(len, expected)), max(map(len, expected))
    assert said.out.startswith(
        f"{len(TEXTS)} documents, {tokens} tokens (uint16), longest {longest}, in "
    )
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}" in said.out
    assert said.err.count("CRLF") == (kind == "txt") and "Token indices" not in said.err
    assert not (tmp_path / "data.shards").exists()
    prepare(tmp_path / "without", *paths, **flags)
    assert documents(tmp_path / "without") == [ids[:-1] for ids in expected]
    assert "no token marks where documents end (--append-eod" in capfd.readouterr().out


def test_ids_of_the_training(tokenizer, tmp_path):
    """Megatron builds its tokenizer from the printed flags."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    from tests.functional.launch import TINY, command_line
    from tests.host import parsed

    tokens = hugging_face_tokens(str(tokenizer), append_eod=True)
    with pytest.MonkeyPatch.context() as patch:
        args = parsed([*command_line(TINY), *tokens.flags.split()], 1, patch)
    trained = build_tokenizer(args)
    assert tokens.vocabulary == trained.vocab_size
    for text in TEXTS:
        assert tokens.document(text).tolist() == [*trained.tokenize(text), trained.eod]


def test_another_tokenizer_has_another_identity(tokenizer, tmp_path):
    """The identity decides which finished shards are kept."""
    same, other = tmp_path / "same", tmp_path / "other"
    shutil.copytree(tokenizer, same)
    shutil.copytree(tokenizer, other)
    model = json.loads((other / "tokenizer.json").read_text())
    model["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(model))
    (same / "model.safetensors").write_bytes(b"weights")
    found = [
        hugging_face_tokens(str(folder), append_eod=eod).identity
        for folder, eod in ((tokenizer, True), (same, True), (other, True), (same, False))
    ]
    assert found[0] == found[1] and len(set(found)) == 3


def test_large_vocabularies_take_four_bytes():
    assert replace(byte_tokens(), vocabulary=65500).document("a").dtype == numpy.int32
    narrow = replace(byte_tokens(), encode=lambda text: [65536])
    with pytest.raises(OverflowError):  # an id above the vocabulary must not wrap
        narrow.document("a")


@pytest.mark.parametrize("most", [1, 2, 3, 10, 50, 10**6])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_record_is_in_one_piece(kind, most, tmp_path):
    texts = ["a" * (i * i % 37 + 1) for i in range(40)]
    (path,) = files_of(tmp_path, kind, texts)
    pieces = cut(str(path), most, Reader("text"))
    reader = Reader("text")
    assert [text for piece in pieces for text, _ in reader.read(piece)] == texts
    assert len(pieces) > 1 or most == 10**6
    if kind == "jsonl":
        assert sum(piece.size for piece in pieces) == path.stat().st_size


def test_bytes_are_the_default(tmp_path, capsys):
    text, empty, prefix = tmp_path / "text", tmp_path / "empty", tmp_path / "data"
    text.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    empty.write_bytes(b"")
    prepare(prefix, text, empty)
    assert documents(prefix) == [[*b"one\r\ntwo\rthree\n", BYTE_EOD]]
    said = capsys.readouterr()
    assert f"{text} begins with a byte order mark, left out" in said.err
    assert f"{text} has ends of lines as on Windows (CRLF), kept" in said.err
    assert f"{empty} is empty, left out" in said.err
    assert "1 documents, 16 byte tokens (uint16), longest 16" in said.out
    with pytest.raises(SystemExit):
        cli.main(["prepare-data", "--output", str(prefix), "--input"])


def test_python_documentation_without_input(tmp_path):
    cli.main(["prepare-data", "--output", str(tmp_path / "data")])
    expected = [[*text.encode(), BYTE_EOD] for text in python_documentation()]
    assert documents(tmp_path / "data") == expected


def test_what_is_left_out_is_counted(tmp_path, capsys):
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "first"}', b"", b'{"text": ""}', b'{"text": 3}', b"{", b"[1]",
        b'{"text": "\\ud800"}', b'{"words": "x"}', b'{"text": "\xff"}', b'{"text": null}',
        b'{"text": "last"}',
    ]  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(lines))
    prepare(tmp_path / "data", path, skip_broken=True)
    assert documents(tmp_path / "data") == [[*b"first", BYTE_EOD], [*b"last", BYTE_EOD]]
    said = capsys.readouterr()
    assert "byte order mark" in said.err
    assert re.search("left out: 1 blank lines, 1 empty documents, 7 broken records", said.out)
    assert f"  {path}:4 holds no text at 'text' but a number\n" in said.out
    assert f"  {path}:5 is no JSON (" in said.out and f"  {path}:6 must hold a JSON obj" in said.out
    assert "  and 4 others\n" in said.out


BAD = {
    "chat.jsonl": (b'{"messages": [], "id": 1}\n', r":1 has no key 'text': .*\(messages, id\); c"),
    "number.jsonl": (b'{"text": "a"}\n{"text": 1}', ":2 holds no text at 'text' but a number"),
    "object.jsonl": (b'{"text": {}}', ":1 holds no text at 'text' but an object"),
    "broken.jsonl": (b'{"text": "a"}\r\n{"text": "b"\r\n', r":2 is no JSON \("),
    "array.json": (b'[\n{"text": "a"}\n]', r":1 is no JSON \("),
    "latin.jsonl": ('{"text": "é"}'.encode("latin-1"), r":1 is not UTF-8 \("),
    "half.jsonl": (b'{"text": "\\udc00"}', ":1 holds half of a surrogate pair"),
    "text.jsonl": (b"plain text\n", r":1 is no JSON \("),
    "cut.jsonl.gz": (gzip.compress(json_lines(TEXTS))[:-9], " cannot be decompressed"),
    "none.txt.gz": (b"no gzip", " cannot be decompressed"),
    "latin.txt": ("é".encode("latin-1"), " must be a text file in UTF-8"),
    "none.parquet": (b"no parquet", " is no whole parquet file"),
    "a.parquet.gz": (b"", ": parquet has its own compression"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_file_line_and_fix(name, tmp_path):
    data, says = BAD[name]
    if name == "none.parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^--input {path}{says}"):
        prepare(tmp_path / "data", path)
    assert os.listdir(tmp_path) == [name]


def test_a_column_that_is_not_there(tmp_path):
    path = tmp_path / "data.parquet"
    write_parquet(path, ["a", None])
    with pytest.raises(ConfigError, match=r"has no key 'content': give one .*\(id, text\)"):
        prepare(tmp_path / "data", path, jsonl_key="content")
    with pytest.raises(ConfigError, match=f"--input {path}: row 2 holds no text .* but null"):
        prepare(tmp_path / "data", path)


@pytest.mark.parametrize("lines", [b"", b"\n\n", b'{"text": ""}'])
def test_no_documents(lines, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(lines)
    with pytest.raises(ConfigError, match="the text is empty: give a file with at least one doc"):
        prepare(tmp_path / "data", path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(VersionError, match=r"needs the package pyarrow: pip install 'megatron-dsa"):
        prepare(tmp_path / "data", tmp_path / "a.parquet")


def test_tokenizers_that_do_not_do(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    text = tmp_path / "text"
    text.write_text("text")
    with pytest.raises(ConfigError, match="--tokenizer nowhere is no folder: give the one of tok"):
        prepare(tmp_path / "data", text, tokenizer="nowhere")
    other = AutoTokenizer.from_pretrained(tokenizer)
    other.eos_token = None
    other.save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match="endless has no end-of-document token: name one as eos"):
        prepare(tmp_path / "data", text, tokenizer=tmp_path / "endless", append_eod=True)
    ending = tmp_path / "ending"
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(ending)
    model = json.loads((ending / "tokenizer.json").read_text())
    template = model["post_processor"]
    template["single"].append({"SpecialToken": {"id": END, "type_id": 0}})
    template["special_tokens"][END] = {"id": END, "ids": [1], "tokens": [END]}
    (ending / "tokenizer.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match="ends every text with its end-of-document token 1"):
        prepare(tmp_path / "data", text, tokenizer=ending, append_eod=True)


def test_files_of_a_data_set_are_replaced_whole(tmp_path):
    target, prefix, text = tmp_path / "target", tmp_path / "data", tmp_path / "text"
    target.write_text("kept")
    text.write_text("text" * 1000)
    write_byte_dataset(["text"], prefix)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(UnicodeEncodeError):
        write_byte_dataset(["other text", "\ud800"], prefix)
    with no_room(1000), pytest.raises(FileError):
        prepare(prefix, text, target)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    for ending in ("bin", "idx"):
        link = tmp_path / f"linked.{ending}"
        link.symlink_to(target)
        with pytest.raises(ConfigError, match=f"linked.{ending} is a link or no file"):
            write_byte_dataset(["text"], tmp_path / "linked")
        with pytest.raises(ConfigError, match=f"linked.{ending} is a link or no file"):
            prepare(tmp_path / "linked", text)
        link.unlink()
    assert target.read_text() == "kept"


@pytest.fixture
def lines(tmp_path):
    """Return a file of JSON lines that takes a few seconds, and its data set."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(json_lines(python_documentation() * 6))
    return path


def shards_of(prefix):
    return sorted(Path(f"{prefix}.shards").glob("*.json"))


def test_a_killed_run_resumes_to_the_same_bytes(lines, tokenizer, tmp_path, capsys):
    flags = {"tokenizer": tokenizer, "append_eod": True, "shard_mb": 0.1, "workers": 2}
    prepare(tmp_path / "whole", lines, **flags)
    prefix = tmp_path / "killed"
    words = [word for name, value in flags.items() for word in _flag(name, value)]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_dsa", "prepare-data", *words]
    command += ["--output", str(prefix), "--input", str(lines)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        while process.poll() is None and len(shards_of(prefix)) < 3:
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -signal.SIGKILL and not Path(f"{prefix}.idx").exists()
    deadline = time.monotonic() + 60
    while _in_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _in_session(process.pid)
    finished = {path: path.stat().st_mtime_ns for path in shards_of(prefix)}
    half = Path(f"{prefix}.shards/incomplete-other")
    half.mkdir(exist_ok=True)
    (half / f"{shards_of(prefix)[0].stem}.bin").write_bytes(b"half")
    capsys.readouterr()
    written = []
    with pytest.MonkeyPatch.context() as patch:
        original = _Pool.write
        patch.setattr(_Pool, "write", lambda self, new: written.extend(new) or original(self, new))
        prepare(prefix, lines, **flags)
    said = capsys.readouterr()
    total = len(written) + len(finished)
    assert f"> {len(finished)} of {total} shards are kept from before" in said.err
    assert not {path.stem for path in finished} & {shard.name for shard in written}
    assert contents(prefix) == contents(tmp_path / "whole")
    assert not Path(f"{prefix}.shards").exists()


def _in_session(session):
    """Return the processes of a session that are not zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        found += [path] if int(own) == session and state != "Z" else []
    return found


@pytest.mark.parametrize("shard_mb", [32, 0.3])
@pytest.mark.parametrize("moved", [0, 1])
def test_a_stop_while_results_are_moved(shard_mb, moved, lines, tmp_path, monkeypatch):
    prepare(tmp_path / "whole", lines)
    prefix, replace_file = tmp_path / "data", os.replace
    write_byte_dataset(["an earlier data set"], prefix)
    done = []

    def stop(source, target):
        if Path(target).parent == tmp_path:
            if len(done) == moved:
                raise KeyboardInterrupt
            done.append(target)
        replace_file(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", stop)
        prepare(prefix, lines, shard_mb=shard_mb)
    assert not Path(f"{prefix}.idx").exists()  # no trainable half data set
    prepare(prefix, lines, shard_mb=shard_mb)
    assert contents(prefix) == contents(tmp_path / "whole")


@pytest.mark.parametrize("change", ["input", "key", "tokenizer", "cut off"])
def test_shards_of_another_command_are_not_kept(change, lines, tmp_path, monkeypatch, capsys):
    prefix, flags = tmp_path / "data", {"shard_mb": 0.3}
    lines.write_bytes(json_lines(["a" * 1000] * 500, body="b"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Workspace, "join", _interrupt)
        prepare(prefix, lines, **flags)
    kept = shards_of(prefix)
    assert len(kept) == 2
    if change == "input":
        lines.write_bytes(json_lines(["c" * 1000] * 500, body="b"))
    elif change == "key":
        flags["jsonl_key"] = "body"
    elif change == "tokenizer":
        flags["tokenizer"] = tmp_path.parent
        other = replace(byte_tokens(), identity="other", encode=lambda text: [1])
        module = "megatron_dsa.extras.prepare_data.command.hugging_face_tokens"
        monkeypatch.setattr(module, lambda *_: other)
    else:
        data = kept[0].with_suffix(".bin")
        data.write_bytes(data.read_bytes()[:-2])
    capsys.readouterr()
    prepare(prefix, lines, **flags)
    said = capsys.readouterr().err
    assert said.count("> 1 of 2 shards are kept") == (change == "cut off") and "> 2" not in said
    prepare(tmp_path / "new", lines, **flags)
    assert contents(prefix) == contents(tmp_path / "new")


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_worker_that_is_killed(lines, tmp_path):
    def encode(text):
        if text.startswith("killer"):
            os.kill(os.getpid(), signal.SIGKILL)
        return [1]

    lines.write_bytes(json_lines(["text"] * 1000 + ["killer"] + ["text"] * 1000))
    tokens = replace(byte_tokens(), encode=encode)
    workspace = Workspace(str(tmp_path / "data"), tokens, "text")
    shards = workspace.plan([str(lines)], 10**4)
    with (
        pytest.raises(ConfigError, match=r"a worker of --workers 2 was killed.* with fewer --"),
        workspace,
        _Pool(workspace, 2) as pool,
    ):
        pool.write(shards)


def test_progress(lines, tmp_path, monkeypatch, capsys):
    counts = []
    with Workspace(str(tmp_path / "counted"), byte_tokens(), "text") as workspace:
        for shard in workspace.plan([str(lines)], 5000):
            workspace.write(shard, counts.append)
    assert min(counts) >= 0 and sum(counts) == lines.stat().st_size
    monkeypatch.setattr("megatron_dsa.extras.prepare_data.command._EVERY", (0.01, 0.01))
    tokens = replace(byte_tokens(), encode=lambda text: time.sleep(0.002) or [1])
    workspace = Workspace(str(tmp_path / "data"), tokens, "text")
    size = lines.stat().st_size
    with workspace, _Pool(workspace, 2) as pool:
        pool.write(workspace.plan([str(lines)], size // 3))
        assert pool._consumed.value == size
    said = capsys.readouterr().err.splitlines()
    pattern = rf"> (\S+) of {size / 1e6:.1f} MB, [0-4] of \d shards(, \S+ MB/s, \S+ \w+ left)?"
    read = [float(re.fullmatch(pattern, line)[1]) for line in said]
    assert read == sorted(read) and 0 < read[-1] < size / 1e6 + 0.05


def test_files_of_others_stay_in_the_folder_of_shards(tmp_path):
    folder = tmp_path / "data.shards"
    folder.mkdir()
    path = folder / "a.jsonl"
    path.write_bytes(json_lines(["one", "two"]))
    prepare(tmp_path / "data", path)
    assert [each.name for each in folder.iterdir()] == ["a.jsonl"]
    assert len(documents(tmp_path / "data")) == 2


@pytest.mark.parametrize("ending", [".json", ".bin", ".idx"])
def test_a_shard_that_is_cut_off_is_done_again(ending, tmp_path):
    """Like after a loss of power."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["one", "two"]))
    workspace = Workspace(str(tmp_path / "data"), byte_tokens(), "text")
    (shard,) = workspace.plan([str(path)], 10**6)
    with workspace:
        record = workspace.write(shard, lambda _: None)
        assert workspace.record(shard) == record
        (workspace.folder / f"{shard.name}{ending}").write_bytes(b"")
        assert workspace.record(shard) is None
