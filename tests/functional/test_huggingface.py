"""A Hugging Face checkpoint goes in, is trained, and comes out again, with the commands."""

import json
import subprocess
import sys

import pytest
import torch

from tests.functional.launch import REPOSITORY, train

pytest.importorskip("safetensors")

#: A dense DeepSeek-V3 of the shape that ``launch.TINY`` trains.
DENSE = {
    "model_type": "deepseek_v3",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 96,
    "torch_dtype": "float32",
}
SPARSE = DENSE | {
    "model_type": "deepseek_v32",
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
}


def command(*arguments):
    """Run ``python -m megatron_dsa`` with arguments; return what it printed."""
    call = [sys.executable, "-m", "megatron_dsa", *map(str, arguments)]
    done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def write_dense(folder):
    """Write a random dense checkpoint; return its tensors."""
    from megatron_dsa.huggingface.files import CheckpointWriter

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
    shapes |= {"model.embed_tokens.weight": (257, 64), "lm_head.weight": (257, 64)}
    shapes |= {"model.norm.weight": (64,)}
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)
        for name, shape in shapes.items()
    }
    with CheckpointWriter(folder, shard_bytes=30_000) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    (folder / "config.json").write_text(json.dumps(DENSE))
    return tensors


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["command", "flag"])
def test_dense_checkpoint_to_warmed_up_sparse_checkpoint(way, data, tmp_path):
    """Warm-up on two tensor-parallel ranks trains new indexers and leaves the rest as it was."""
    from megatron_dsa.huggingface.files import CheckpointReader

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
        | {"--dsa-indexer-use-sparse-loss": None}
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
