"""import-hf and export-hf without a dtype in config.json: weights keep theirs."""

import json

import pytest
import torch

from megatron_dsa.errors import ConfigError, FileError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.config_json import parse_config
from megatron_dsa.extras.huggingface.convert import export_model, open_checkpoint
from megatron_dsa.training.checkpoint_files import TRACKER
from tests.helpers import no_room
from tests.tiny_models import tensors_of, tiny_config, tiny_model

pytest.importorskip("safetensors")

UP = "model.layers.0.mlp.up_proj.weight"


def megatron_dtypes(folder):
    from megatron.core.dist_checkpointing.serialization import load_tensors_metadata

    return {name: x.dtype for name, x in load_tensors_metadata(str(folder / "release")).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_dtype_weights_keep_theirs(dtype, tmp_path, capsys):
    """fp32 parameters of every model must not widen the others."""
    config, there, out, back = tiny_config(), *(tmp_path / x for x in ("hf", "out", "back"))
    export_model(tiny_model(config, dtype=dtype), there, config)
    written = json.loads((there / "config.json").read_text())
    assert written.pop("torch_dtype") == str(dtype).removeprefix("torch.")
    (there / "config.json").write_text(json.dumps(written))
    assert main(["import-hf", "--input", str(there), "--output", str(out)]) == 0
    assert f"config.json has no dtype (torch_dtype): weights are written as {dtype}" in (
        capsys.readouterr().err
    )
    stored = megatron_dtypes(out)
    bias = {name for name in stored if name.endswith("router.expert_bias")}
    assert bias and {stored[name] for name in bias} == {torch.float32}
    assert {stored[name] for name in stored.keys() - bias} == {dtype}
    paths = ["--config", str(there), "--output", str(back)]
    assert main(["export-hf", "--input", str(out), *paths]) == 0
    before, after = (open_checkpoint(x, parse_config(written)) for x in (there, back))
    for name in before.names():
        ours = after.read(name)
        assert ours.dtype == before.read_dtype(name) and torch.equal(ours, before.read(name)), name


def test_the_widest_dtype_rounds_nothing(checkpoint, tmp_path):
    del checkpoint.config["torch_dtype"]
    narrow = {name: x.bfloat16() for name, x in checkpoint.tensors.items() if name != UP}
    checkpoint.tensors |= narrow
    checkpoint.write()
    out = tmp_path / "out"
    assert main(["import-hf", "--input", str(tmp_path), "--output", str(out)]) == 0
    assert set(megatron_dtypes(out).values()) == {torch.float32}
    checkpoint.load()
    up = tensors_of(checkpoint.model)["decoder.layers.0.mlp.linear_fc1.weight"][48:]
    assert torch.equal(up, checkpoint.tensors[UP])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("bug")])
def test_an_import_that_fails_leaves_nothing(error, checkpoint, tmp_path, monkeypatch):
    from megatron_dsa.extras.huggingface import commands as commands

    def write(directory, *_arguments):
        (directory / "__0_0.distcp").write_bytes(b"part")
        raise error

    monkeypatch.setattr(commands, "write_checkpoint", write)
    folder, out = checkpoint.write(), tmp_path / "deep" / "out"
    said = FileError if isinstance(error, OSError) else RuntimeError
    with pytest.raises(said, match=r"release: No space left on device: make room|bug"):
        main(["import-hf", "--input", str(folder), "--output", str(out)])
    assert not out.parent.exists()
    out.mkdir(parents=True)
    (out / TRACKER).symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="holds a checkpoint already"):
        main(["import-hf", "--input", str(folder), "--output", str(out)])
    assert not (tmp_path / "target").exists()


def test_an_export_writes_through_no_link(tmp_path):
    out, target = tmp_path / "out", tmp_path / "target"
    out.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        (out / name).symlink_to(target)
        with pytest.raises(ConfigError, match=r"is a link or no file|holds a checkpoint already"):
            export_model(tiny_model(tiny_config()), out, tiny_config())
        (out / name).unlink()
    with (
        no_room(50_000),
        pytest.raises(FileError, match=r"model-00001.safetensors: File too large"),
    ):
        export_model(tiny_model(tiny_config()), out, tiny_config())
    assert not list(out.iterdir()) and not target.exists()
