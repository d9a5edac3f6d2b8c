"""A tiny checkpoint in one file, modified by tests."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_config, tiny_model


@dataclass
class Checkpoint:
    """A checkpoint of a DeepSeek-V3.2 with multi-token prediction, written on demand."""

    folder: Path
    config: dict
    tensors: dict
    model: torch.nn.Module

    def write(self):
        """Write config.json and model.safetensors; return the directory."""
        from safetensors.torch import save_file

        save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))
        return self.folder

    def load(self, model=None):
        """Write the checkpoint and load it into a model, by default its source."""
        from megatron_dsa.extras.huggingface.convert import import_model

        return import_model(self.model if model is None else model, self.write())


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Return config.json, tensors and model, made once."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    from megatron_dsa.extras.huggingface.convert import export_model

    folder = tmp_path_factory.mktemp("exported")
    model = tiny_model(tiny_config(num_nextn_predict_layers=1), mtp_num_layers=1)
    export_model(model, folder, tiny_config(num_nextn_predict_layers=1))
    (shard,) = folder.glob("*.safetensors")
    return json.loads((folder / "config.json").read_text()), load_file(shard), model


@pytest.fixture
def checkpoint(exported, tmp_path):
    """Return a copy that a test may change."""
    config, tensors, model = exported
    return Checkpoint(
        tmp_path, copy.deepcopy(config), {name: x.clone() for name, x in tensors.items()}, model
    )
