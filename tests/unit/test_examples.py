"""The launch scripts of V4: their flags are valid and give the model the shapes of its preset."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsa.csa_config import CSA_PRESETS, HybridTransformerConfig
from tests.host import start

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: What the user has to fill in, with made-up values.
VARIABLES = {
    "ROTARY_BASE": "10000",
    "COMPRESS_ROTARY_BASE": "12345",
    "YARN_FACTOR": "7",
    "YARN_ORIGINAL_LENGTH": "1024",
    "MOE_LAYER_FREQ": "1",
    "NUM_EXPERTS": "16",
    "EXPERTS_PER_TOKEN": "2",
    "EXPERT_SIZE": "64",
    "SHARED_EXPERT_SIZE": "64",
    "DATA_PATH": "data",
    "TOKENIZER": "tokenizer",
    "CHECKPOINTS": "checkpoints",
    "TRAIN_STEPS": "10",
    "GLOBAL_BATCH": "8",
    "LR": "1e-4",
}


def launch(script, folder, variables):
    """Run a launch script with a Python that only writes its arguments down; return them."""
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], sys.stdout)\n"
    )
    python.chmod(0o755)
    return subprocess.run(
        [EXAMPLES / script],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_launch_script(name, tmp_path, monkeypatch):
    done = launch(f"v4_{name}.sh", tmp_path, VARIABLES)
    assert done.returncode == 0, done.stderr
    launcher = json.loads(done.stdout)
    module = launcher.index("megatron_dsa.pretrain")
    launcher, flags = launcher[:module], launcher[module + 1 :]
    assert launcher[:2] == ["-m", "torch.distributed.run"] and "--nproc-per-node" in launcher

    start()
    from megatron.training import arguments

    from megatron_dsa import pretrain
    from megatron_dsa.arguments import add_dsa_arguments

    monkeypatch.setattr(sys, "argv", ["pretrain", *flags])
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    # Grouped expert GEMMs are refused without a GPU; a Hopper GPU is what the scripts are for.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    pretrain.preset_flags(sys.argv)
    args = arguments.parse_args(add_dsa_arguments)
    arguments.validate_args(args)
    args.padded_vocab_size = 1024  # the tokenizer's
    config = pretrain.model_config_from_args(args).transformer
    assert isinstance(config, HybridTransformerConfig)
    for field, value in CSA_PRESETS[f"deepseek-v4-{name}"].items():
        assert getattr(config, field) == value, field
    assert (config.rotary_base, config.csa_compress_rotary_base) == (10000, 12345)
    assert (config.rotary_scaling_factor, config.original_max_position_embeddings) == (7, 1024)
    assert config.rope_type == "yarn" and config.num_moe_experts == 16


@pytest.mark.parametrize("variable", VARIABLES)
def test_variables_have_no_default(variable, tmp_path):
    """Nothing that public sources do not agree on, or do not give, is made up."""
    others = {name: value for name, value in VARIABLES.items() if name != variable}
    done = launch("v4_flash.sh", tmp_path, others)
    assert done.returncode != 0 and variable in done.stderr and not done.stdout
