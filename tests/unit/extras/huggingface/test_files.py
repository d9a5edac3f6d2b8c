"""Files of a checkpoint: damaged ones are named; only JSON and safetensors are read."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.files import INDEX, SINGLE, CheckpointReader
from megatron_dsa.extras.huggingface.names import V4

pytest.importorskip("safetensors")

WEIGHT = "model.layers.0.self_attn.q_a_proj.weight"


def index(folder, shard_of):
    (folder / INDEX).write_text(json.dumps({"weight_map": shard_of}))


def test_an_index_does_not_lead_out_of_its_directory(checkpoint, tmp_path):
    folder = checkpoint.write()
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    shutil.copy(folder / "config.json", inside)
    for shard in (f"../{SINGLE}", str(folder / SINGLE), f"a/../../{SINGLE}", f"./../{SINGLE}"):
        index(inside, dict.fromkeys(checkpoint.tensors, shard))
        with pytest.raises(ConfigError, match="leads out of the directory") as error:
            CheckpointReader(inside)
        assert str(inside / INDEX) in str(error.value) and repr(shard) in str(error.value)


def test_links_and_folders_are_followed(checkpoint, tmp_path):
    folder = checkpoint.write()
    cache = tmp_path / "snapshot"
    (cache / "shards").mkdir(parents=True)
    (cache / "shards" / SINGLE).symlink_to(folder / SINGLE)
    index(cache, dict.fromkeys(checkpoint.tensors, f"shards/{SINGLE}"))
    read = CheckpointReader(cache).read(WEIGHT)
    assert torch.equal(read, checkpoint.tensors[WEIGHT])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ('{"weight_map": {', "is not valid JSON"),
        ("\ufeff{}", "is not valid JSON"),
        ("[]", "holds a list"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": ["a.safetensors"]}', "has no weight_map"),
        ('{"weight_map": {"x": 3}}', "has no weight_map"),
        ('{"weight_map": {"x": "lost.safetensors"}}', r"not there \(lost\.safetensors\)"),
        ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', "'x' is given twice"),
    ],
)
def test_broken_indices_are_named(content, message, tmp_path):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        CheckpointReader(tmp_path)
    assert str(tmp_path / INDEX) in str(error.value)


def lying(content):
    """Double a tensor's size in the header."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header[WEIGHT]["shape"][0] *= 2
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _content: b"",
        lambda content: content[:5],
        lambda content: content[:300],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"\xff" * len(content),
        lying,
    ],
    ids=["empty", "length cut", "header cut", "data cut", "data added", "noise", "lying header"],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_damaged_shards_are_named(damage, indexed, checkpoint):
    shard = checkpoint.write() / SINGLE
    if indexed:
        index(checkpoint.folder, dict.fromkeys(checkpoint.tensors, SINGLE))
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(ConfigError, match=r"is no whole safetensors file .*: download it") as error:
        CheckpointReader(checkpoint.folder).read(WEIGHT)
    assert str(shard) in str(error.value)


def test_a_shard_without_the_tensor_is_named(checkpoint):
    from safetensors.torch import save_file

    folder = checkpoint.write()
    save_file({"other": torch.ones(1)}, folder / "other.safetensors")
    index(folder, dict.fromkeys(checkpoint.tensors, SINGLE) | {WEIGHT: "other.safetensors"})
    with pytest.raises(ConfigError, match=rf"{WEIGHT} is in other\.safetensors, which does not"):
        CheckpointReader(folder).read(WEIGHT)


def test_two_names_of_one_tensor_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"embed.weight": torch.ones(1)}, tmp_path / SINGLE)
    assert CheckpointReader(tmp_path, rename=V4.rename).names() == ["embed.weight"]
    both = {"embed.weight": torch.ones(1), "model.embed_tokens.weight": torch.zeros(1)}
    save_file(both, tmp_path / SINGLE)
    message = r"embed\.weight and model\.embed_tokens\.weight are two names of one tensor"
    with pytest.raises(ConfigError, match=message):
        CheckpointReader(tmp_path, rename=V4.rename)


class Bomb:
    """An object whose pickle creates a file when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickle_files_are_refused(checkpoint, tmp_path):
    folder, made = checkpoint.write(), tmp_path / "made"
    (folder / SINGLE).unlink()
    command = ["import-hf", "--input", str(folder), "--output", str(tmp_path / "out")]
    torch.save({WEIGHT: Bomb(made)}, folder / "pytorch_model.bin")
    (folder / "model.pt").write_bytes(pickle.dumps(Bomb(made)))
    with pytest.raises(ConfigError, match=r"but model\.pt, a pickle file, which is not read"):
        main(command)
    for name in ("pytorch_model.bin", "model.pt"):
        index(folder, dict.fromkeys(checkpoint.tensors, name))
        with pytest.raises(ConfigError, match=f"'{name}' is no safetensors file"):
            main(command)
        index(folder, dict.fromkeys(checkpoint.tensors, "model-1.safetensors"))
        shutil.copy(folder / name, folder / "model-1.safetensors")
        with pytest.raises(ConfigError, match="is no whole safetensors file"):
            main(command)
    assert not made.exists() and not (tmp_path / "out").exists()


def test_import_unpickles_nothing(checkpoint, monkeypatch):
    folder = checkpoint.write()
    torch.save({}, folder / "pytorch_model.bin")
    torch.save({}, folder / "training_args.bin")

    def refused(*_args, **_kwargs):
        raise AssertionError("a pickle is loaded")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr(pickle, "Unpickler", refused)
    checkpoint.load()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.main_original_inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
    ],
)
def test_buffers_of_rope_are_no_weights(name, checkpoint):
    checkpoint.tensors[name] = torch.full((4,), torch.nan)
    report = checkpoint.load()
    assert not report.fresh and name not in report.unused
    assert name not in CheckpointReader(checkpoint.folder).names()


def test_other_tensors_of_a_rope_are_named(checkpoint):
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.scale"] = torch.ones(4)
    with pytest.raises(ConfigError, match=r"no place .*rotary_emb\.scale"):
        checkpoint.load()
