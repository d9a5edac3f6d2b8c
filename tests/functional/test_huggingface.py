"""A Hugging Face checkpoint imported, trained and exported by commands."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.functional.launch import DENSE, REPOSITORY, SPARSE, TINY, flags_in, launch, train

pytest.importorskip("safetensors")


@pytest.fixture
def command(python):
    """Return a function that runs ``python -m megatron_dsa`` and returns its output."""

    def run(*arguments):
        call = [python, "-m", "megatron_dsa", *map(str, arguments)]
        done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


#: Experts with 101 MB of weights.
LARGE = DENSE | {
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
}

#: Makes glibc return freed memory at once instead of keeping tens of MB.
RETURNED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

#: Runs commands and prints their peak memory above the start, without mapped files.
WATCHED = """
import json, re, sys, threading, time
from pathlib import Path
from megatron_dsa.extras.cli import main
from tests.host import start

def held():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def watch():
    while not done.is_set():
        peak.append(max(peak.pop(), held()))
        time.sleep(1e-3)

start()
import megatron_dsa.extras.huggingface.build, megatron_dsa.extras.huggingface.streaming
import megatron_dsa.specs
before, done = held(), threading.Event()
peak = [before]
watcher = threading.Thread(target=watch)
watcher.start()
try:
    for command in json.loads(sys.argv[1]):
        assert main(command) == 0
finally:
    done.set()
    watcher.join()
print(peak[0] - before)
"""


def write_dense(folder, config=DENSE):
    """Write a random dense checkpoint; return its tensors."""
    from megatron_dsa.extras.huggingface.files import CheckpointWriter

    layer = {
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
        "self_attn.q_a_proj.weight": (32, 64),
        "self_attn.q_a_layernorm.weight": (32,),
        "self_attn.q_b_proj.weight": (96, 32),
        "self_attn.kv_a_proj_with_mqa.weight": (40, 64),
        "self_attn.kv_a_layernorm.weight": (32,),
        "self_attn.kv_b_proj.weight": (128, 32),
        "self_attn.o_proj.weight": (64, 64),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    experts, width = config.get("n_routed_experts", 0), config.get("moe_intermediate_size", 0)
    if experts:
        mlp = "model.layers.1.mlp."
        for name in ("gate_proj", "up_proj", "down_proj"):
            del shapes[f"{mlp}{name}.weight"]
            shape = (64, width) if name == "down_proj" else (width, 64)
            shapes |= {f"{mlp}experts.{i}.{name}.weight": shape for i in range(experts)}
        shapes |= {f"{mlp}gate.weight": (experts, 64)}
        shapes |= {f"{mlp}gate.e_score_correction_bias": (experts,)}
    shapes |= {"model.embed_tokens.weight": (257, 64), "lm_head.weight": (257, 64)}
    shapes |= {"model.norm.weight": (64,)}
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)
        for name, shape in shapes.items()
    }
    with CheckpointWriter(folder, shard_bytes=10**7 if experts else 30_000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["command", "flag"])
def test_dense_checkpoint_to_warmed_up_sparse_checkpoint(way, command, data, tmp_path):
    from megatron_dsa.extras.huggingface.files import CheckpointReader

    before = write_dense(tmp_path / "dense")
    load = {"--dsa-load-hf": tmp_path / "dense"}
    if way == "command":
        printed = command("import-hf", "--input", tmp_path / "dense", "--output", tmp_path / "mg")
        assert f"--load {tmp_path / 'mg'} --dsa-stage dense" in printed
        load = {"--load": tmp_path / "mg"}
    run = train(
        {"--tensor-model-parallel-size": 2, "--sequence-parallel": True, "--data-path": data}
        | {
            "--save": tmp_path / "run",
            "--dsa-stage": "warmup",
            "--train-iters": 2,
            "--save-interval": 2,
        }
        | {"--dsa-indexer-use-sparse-loss": None, "--norm-epsilon": 1e-6}
        | load,
        ranks=2,
    )
    assert "has no indexers: 10 tensors keep their initial values" in run.log
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    command(
        *("export-hf", "--input", tmp_path / "run", "--config", tmp_path / "config.json"),
        *("--output", tmp_path / "sparse", "--shard-gb", "0.00003"),
    )
    reader = CheckpointReader(tmp_path / "sparse")
    indexers = {name for name in reader.names() if ".indexer." in name}
    assert len(indexers) == 10 and set(reader.names()) == indexers | set(before)
    for name, tensor in before.items():
        assert torch.equal(reader.read(name), tensor), name
    assert all(reader.read(name).any() for name in indexers if not name.endswith("bias"))


def test_example_from_dense_to_sparse(tmp_path, python):
    done = subprocess.run(
        [REPOSITORY / "examples" / "dense_to_sparse.sh"],
        env=os.environ
        | {"RUN_DIR": str(tmp_path / "run"), "STEPS": "4 2 2", "PYTHON": python},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = next(x for x in done.stdout.splitlines() if x.startswith("validation loss: dense"))
    dense, sparse, again = (float(x) for x in re.findall(r"\d\.\d+E[+-]\d+", result))
    assert sparse == again < dense < 5.6
    log = (tmp_path / "run" / "train.log").read_text()
    assert "has no indexers: 20 tensors keep their initial values" in log
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("quantise", [False, True], ids=["wide", "fp8"])
def test_commands_hold_a_file_and_not_the_model(quantise, tmp_path):
    from megatron_dsa.extras.huggingface.config_json import read_config
    from megatron_dsa.extras.huggingface.convert import open_checkpoint
    from megatron_dsa.extras.huggingface.files import CheckpointReader

    there, megatron, back = (str(tmp_path / name) for name in ("hf", "megatron", "back"))
    before = write_dense(tmp_path / "hf", LARGE)
    size = sum(tensor.nbytes for tensor in before.values())
    assert size > 100e6
    commands = [
        ["import-hf", "--input", there, "--output", megatron, "--shard-gb", "0.01"],
        ["export-hf", "--input", megatron, "--output", back, "--config", there]
        + ["--shard-gb", "0.01"]
        + (["--quantise", "fp8"] if quantise else []),
    ]
    call = [sys.executable, "-c", WATCHED, json.dumps(commands)]
    done = subprocess.run(
        call, env=os.environ | RETURNED_AT_ONCE, cwd=REPOSITORY, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < int(done.stdout.split()[-1]) < size / 4
    if quantise:
        reader = open_checkpoint(back, read_config(back))
        assert set(reader.names()) == set(before)
        up = "model.layers.1.mlp.experts.63.up_proj.weight"
        assert reader.scales(up) is not None
        error = (reader.read(up).float() - before[up]).abs()
        assert 0 < error.max() < before[up].abs().max() / 16
        return
    reader = CheckpointReader(back)
    assert set(reader.names()) == set(before)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in before.items())


#: Parallel layouts of two ranks.
LAYOUTS = {
    "TP": {"--tensor-model-parallel-size": 2, "--sequence-parallel": True},
    "PP": {"--pipeline-model-parallel-size": 2},
    "EP": {"--expert-model-parallel-size": 2},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("layout", "whole"),
    [("TP", False), ("TP", True), ("PP", True), ("EP", True)],
    ids=["TP, plain", "TP", "PP", "EP"],
)
def test_v4_checkpoint_through_two_ranks(layout, whole, command, data, tmp_path):
    from megatron_dsa.extras.huggingface.config_json import read_config
    from megatron_dsa.extras.huggingface.convert import export_model, open_checkpoint
    from megatron_dsa.extras.huggingface.names import HASH_ROUTING, PREDICTION, V4
    from tests.cases.released_formats import stored_bytes, write_v4
    from tests.tiny_models import tiny_model, tiny_v4

    features = V4.features.keys() if whole else {PREDICTION}
    mtp = 1 if PREDICTION in features else None
    config = tiny_v4(
        vocab_size=264,
        max_position_embeddings=96,
        num_nextn_predict_layers=mtp or 0,
        num_hash_layers=2 if HASH_ROUTING in features else 0,
    )
    model = tiny_model(config, vocab=264, features=features, mtp_num_layers=mtp)
    there, back = tmp_path / "there", tmp_path / "back"
    if whole:
        export_model(model.bfloat16(), tmp_path / "wide", config)
        write_v4(config, tmp_path / "wide", there)
    else:
        export_model(model, there, config)
    without = [] if whole else ["--without", "hyper-connections"]
    launch(
        TINY
        | flags_in(command("flags", there, *without))
        | LAYOUTS[layout]
        | {
            "--data-path": data,
            "--dsa-load-hf": there,
            "--save": tmp_path / "run",
            "--save-interval": 1,
            "--train-iters": 1,
            "--lr": 0,
            "--min-lr": 0,
            "--moe-router-bias-update-rate": 0,
        },
        ranks=2,
    )
    quantise = ["--quantise", "released"] if whole else []
    paths = ["--config", there, "--output", back]
    command("export-hf", "--input", tmp_path / "run", *paths, *quantise)
    before, after = stored_bytes(there), stored_bytes(back)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    # Adam turns -0 into 0, another code: compare values and scales.
    assert all(before[name][0] in (torch.float8_e4m3fn, torch.int8) for name in changed)
    readers = [open_checkpoint(x, read_config(x)) for x in (there, back)]
    values = [{name: reader.read(name) for name in changed} for reader in readers]
    assert all(torch.equal(x, values[1][name]) for name, x in values[0].items())
