"""Checkpoints with wrong layers, experts, dtypes, scales, vocabulary or values."""

import math

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.convert import export_model, import_model
from megatron_dsa.extras.huggingface.ranks import ParallelRank
from tests.tiny_models import tiny_config, tiny_model

pytest.importorskip("safetensors")

LAST_OF_TP = ParallelRank(tensor=(1, 2), first_layer=1, num_experts=8)
WEIGHT = "model.layers.0.self_attn.q_a_proj.weight"  # [24, 32]
SCALE = f"{WEIGHT}_scale_inv"
UP = "model.layers.0.mlp.up_proj.weight"  # the second half of a parameter


def copy_layer(tensors, source, target):
    for name in [name for name in tensors if name.startswith(f"model.layers.{source}.")]:
        new = name.replace(f"layers.{source}.", f"layers.{target}.", 1)
        tensors[new] = tensors[name].clone()


@pytest.mark.parametrize(("source", "number"), [(1, 3), (2, 3), (0, 7)])
def test_layers_beyond_the_count_are_refused(source, number, checkpoint, tmp_path):
    copy_layer(checkpoint.tensors, source, number)
    message = (
        rf"tensors are of layers that config\.json does not count \(model\.layers\.{number}\): it "
        "says num_hidden_layers = 2 and num_nextn_predict_layers = 1"
    )
    with pytest.raises(ConfigError, match=message):
        checkpoint.load()
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=message):
        main(["import-hf", "--input", str(tmp_path), "--output", str(out)])
    assert not out.exists()
    with pytest.raises(ConfigError, match=message):
        import_model(checkpoint.model, tmp_path, LAST_OF_TP)


@pytest.mark.parametrize("said", [0, None])
def test_prediction_layers_have_to_be_counted(said, checkpoint):
    checkpoint.config["num_nextn_predict_layers"] = said
    with pytest.raises(ConfigError, match=r"\(model\.layers\.2\).* num_nextn_predict_layers = 0"):
        checkpoint.load()


def test_prediction_layers_may_be_left_out(checkpoint, caplog):
    trunk = tiny_model(checkpoint.config, seed=6)
    assert any(name.startswith("model.layers.2.") for name in checkpoint.load(trunk).unused)
    assert "tensors of multi-token prediction were not read" in caplog.text
    caplog.clear()
    for name in [name for name in checkpoint.tensors if name.startswith("model.layers.2.")]:
        del checkpoint.tensors[name]
    assert not checkpoint.load(trunk).unused
    assert "num_nextn_predict_layers = 1, and the checkpoint has no such layers" in caplog.text


def test_experts_beyond_the_count_are_refused_on_every_rank(checkpoint):
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    checkpoint.tensors[name.format(8)] = checkpoint.tensors[name.format(7)].clone()
    for parallel_rank in (ParallelRank(), LAST_OF_TP):
        with pytest.raises(ConfigError, match=r"of experts .*experts\.8\..* n_routed_experts = 8"):
            import_model(checkpoint.model, checkpoint.write(), parallel_rank)


def test_a_rank_notices_experts_in_its_dense_layer(checkpoint):
    expert = "model.layers.0.mlp.experts.0.up_proj.weight"
    checkpoint.tensors[expert] = torch.ones(20, 32)
    checkpoint.write()
    checkpoint.model.post_process = False
    try:
        with pytest.raises(ConfigError, match=r"1 tensors .* of no use .*layers\.0\.mlp\.experts"):
            import_model(checkpoint.model, checkpoint.folder, ParallelRank(num_experts=8))
    finally:
        checkpoint.model.post_process = True


@pytest.mark.parametrize("name", [WEIGHT, UP])
@pytest.mark.parametrize(
    ("dtype", "called"),
    [
        (torch.int64, "I64"),
        (torch.int32, "I32"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
        (torch.float8_e8m0fnu, "F8_E8M0"),
    ],
)
def test_dtypes_of_no_weight_are_refused(name, dtype, called, checkpoint):
    checkpoint.tensors[name] = checkpoint.tensors[name].abs().to(dtype)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"{name} is {called}[ ,]"):
            checkpoint.load()
        checkpoint.tensors[f"{name}_scale_inv"] = torch.ones(1, 1)


def test_scales_beside_plain_weights_are_refused(checkpoint):
    checkpoint.tensors[SCALE] = torch.full((2, 2), 3.0)
    with pytest.raises(ConfigError, match=f"{WEIGHT} is F32, .* {SCALE} lies beside it"):
        checkpoint.load()


def fp8(checkpoint, scale, block=(16, 8)):
    quantised = {"quant_method": "fp8", "weight_block_size": list(block)}
    checkpoint.config["quantization_config"] = quantised
    checkpoint.tensors |= {WEIGHT: torch.ones(24, 32).to(torch.float8_e4m3fn), SCALE: scale}


def test_scales_are_as_many_as_blocks(checkpoint):
    """Blocks twice as large would take every other scale, and fit."""
    scale = torch.arange(8.0).reshape(2, 4)
    fp8(checkpoint, scale)
    checkpoint.load()
    wide = scale.repeat_interleave(16, 0)[:24].repeat_interleave(8, 1)
    assert torch.equal(
        checkpoint.model.decoder.layers[0].self_attention.linear_q_down_proj.weight, wide
    )
    for block, wrong in (
        ((32, 16), scale),
        ((16, 8), scale[:, :3]),
        ((16, 8), torch.ones(3, 4)),
        ((16, 8), scale.flatten()),
        ((16, 8), scale.int()),
    ):
        fp8(checkpoint, wrong.contiguous(), block)
        with pytest.raises(ConfigError, match=f"{WEIGHT}: "):
            checkpoint.load()


@pytest.mark.parametrize("words", [60, 75])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_vocabularies_of_another_size_are_refused(name, words, checkpoint, tmp_path):
    weight = checkpoint.tensors[name]
    checkpoint.tensors[name] = torch.cat([weight, weight])[:words].contiguous()
    message = rf"{name} is \({words}, 32\), and by config\.json vocab_size = 70"
    with pytest.raises(ConfigError, match=message):
        checkpoint.load()
    with pytest.raises(ConfigError, match=message):
        main(["import-hf", "--input", str(tmp_path), "--output", str(tmp_path / "out")])


def test_values_that_are_no_numbers_are_counted_and_named(checkpoint, tmp_path):
    checkpoint.tensors[WEIGHT][3, :5] = math.nan
    checkpoint.tensors[WEIGHT][4, 2] = -math.inf
    checkpoint.tensors[UP][0, 0] = math.inf
    out = tmp_path / "out"
    command = ["import-hf", "--input", str(tmp_path), "--output", str(out)]
    for load in (checkpoint.load, lambda: main(command)):
        with pytest.raises(ConfigError) as error:
            load()
        said = str(error.value)
        assert "2 tensors hold values that are no numbers" in said
        assert f"{WEIGHT}: 5 NaN, 1 infinite of 768 values" in said
        assert f"{UP}: 1 infinite of 1536 values" in said
    assert not (out / "latest_checkpointed_iteration.txt").exists()
    # The same directory accepts the complete checkpoint.
    for name in (WEIGHT, UP):
        checkpoint.tensors[name].nan_to_num_(0, 0, 0)
    checkpoint.write()
    assert main(command) == 0


def test_an_export_of_nan_is_no_checkpoint(tmp_path):
    model = tiny_model(tiny_config())
    with torch.no_grad():
        model.decoder.final_layernorm.weight[3] = math.nan
    with pytest.raises(ConfigError, match=r"final_layernorm\.weight: 1 NaN of 32 values"):
        export_model(model, tmp_path, tiny_config())
    assert not list(tmp_path.glob("*.json"))
