"""Hugging Face checkpoints: names, conventions, fp8, files, round trips."""

import json
import logging
import os
import stat
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa.config.model import is_indexer_parameter
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.config_json import check_model, parse_config, read_config
from megatron_dsa.extras.huggingface.convert import export_model, import_model, model_tensors
from megatron_dsa.extras.huggingface.files import INDEX, CheckpointReader, CheckpointWriter
from megatron_dsa.extras.huggingface.names import V3
from megatron_dsa.extras.huggingface.quantised import dequantise
from tests.tiny_models import assert_equal_tensors, tensors_of, tiny_config, tiny_model

pytest.importorskip("safetensors")

MTP = {"num_nextn_predict_layers": 1}


def test_names_are_those_of_released_checkpoints():
    """Names come from index files of DeepSeek-V3.2 and Megatron-Bridge's tables."""
    layer = "decoder.layers.7."
    indexer = f"{layer}self_attention.core_attention.indexer."
    hf = "model.layers.7."
    expected = {
        "embedding.word_embeddings.weight": ["model.embed_tokens.weight"],
        "output_layer.weight": ["lm_head.weight"],
        f"{layer}self_attention.linear_q_down_proj.weight": [f"{hf}self_attn.q_a_proj.weight"],
        f"{layer}self_attention.linear_q_up_proj.layer_norm_weight": [
            f"{hf}self_attn.q_a_layernorm.weight"
        ],
        f"{layer}self_attention.kv_layernorm.weight": [f"{hf}self_attn.kv_a_layernorm.weight"],
        f"{layer}self_attention.linear_kv_down_proj.weight": [
            f"{hf}self_attn.kv_a_proj_with_mqa.weight"
        ],
        f"{indexer}linear_weights_proj.weight": [f"{hf}self_attn.indexer.weights_proj.weight"],
        f"{indexer}k_norm.bias": [f"{hf}self_attn.indexer.k_norm.bias"],
        f"{layer}mlp.linear_fc1.weight": [f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"],
        f"{layer}mlp.linear_fc1.layer_norm_weight": [f"{hf}post_attention_layernorm.weight"],
        f"{layer}mlp.router.expert_bias": [f"{hf}mlp.gate.e_score_correction_bias"],
        f"{layer}mlp.experts.linear_fc2.weight31": [f"{hf}mlp.experts.31.down_proj.weight"],
        f"{layer}mlp.experts.local_experts.31.linear_fc1.weight": [
            f"{hf}mlp.experts.31.gate_proj.weight",
            f"{hf}mlp.experts.31.up_proj.weight",
        ],
        "mtp.layers.0.eh_proj.weight": ["model.layers.61.eh_proj.weight"],
        "mtp.layers.0.final_layernorm.weight": ["model.layers.61.shared_head.norm.weight"],
        "mtp.layers.0.mtp_model_layer.mlp.router.weight": ["model.layers.61.mlp.gate.weight"],
    }
    for name, names in expected.items():
        assert list(V3.match(name, 61).hf) == names
        assert all(V3.locate(x, 61) is not None for x in names)
    assert V3.locate("model.layers.0.self_attn.q_a_proj.bias", 61) is None
    with pytest.raises(ConfigError, match=r"linear_fc1\.bias has no counterpart"):
        V3.match("decoder.layers.0.mlp.linear_fc1.bias", 61)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_round_trip_is_exact(kind, tmp_path):
    config = tiny_config(kind, **MTP)
    stage = "dense" if kind == "deepseek_v3" else "sparse"
    model = tiny_model(config, stage, mtp_num_layers=1)
    export_model(model, tmp_path, config, shard_bytes=50_000)
    other = tiny_model(config, stage, mtp_num_layers=1, seed=6)
    report = import_model(other, tmp_path)
    assert not report.fresh and not report.rounded
    # Only copies that Megatron lacks.
    assert set(report.unused) == {
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
    }
    assert_equal_tensors(model, other)

    index = json.loads((tmp_path / INDEX).read_text())
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and {x.name for x in shards} == set(index["weight_map"].values())
    assert all(shard.stat().st_size < 60_000 for shard in shards)  # with its header
    assert read_config(tmp_path).raw == config


def test_dense_checkpoint_gets_fresh_indexers(tmp_path, caplog):
    dense = tiny_config("deepseek_v3")
    model = tiny_model(dense, "dense")
    export_model(model, tmp_path, dense)
    other = tiny_model(tiny_config("deepseek_v32"), "warmup", seed=6, dsa_indexer_loss_coeff=1.0)
    before = tensors_of(other)
    with caplog.at_level(logging.WARNING):
        report = import_model(other, tmp_path)
    after, source = tensors_of(other), tensors_of(model)
    assert len(report.fresh) == 10 and all(is_indexer_parameter(name) for name in report.fresh)
    assert all(torch.equal(before[name], after[name]) for name in report.fresh)
    assert all(torch.equal(source[name], after[name]) for name in report.filled)
    assert "10 tensors keep their initial values" in caplog.text


def test_export_wants_the_configuration_of_the_model(tmp_path):
    model = tiny_model(tiny_config())
    with pytest.raises(ConfigError, match="'deepseek_v3' does not fit a model with indexers"):
        export_model(model, tmp_path, tiny_config("deepseek_v3"))
    with pytest.raises(ConfigError, match="does not fit a model with no indexers"):
        export_model(tiny_model(tiny_config(), "dense"), tmp_path, tiny_config())
    with pytest.raises(ConfigError, match=r"has 80 rows, and config\.json says vocab_size = 81"):
        export_model(model, tmp_path / "rows", tiny_config(vocab_size=81))
    model.config.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size is 2"):
        export_model(model, tmp_path, tiny_config())
    model.config.pipeline_model_parallel_size = 1


@pytest.mark.parametrize(("layers", "said"), [(0, 1), (1, 0)])
def test_written_configuration_has_the_prediction_layers_of_the_model(layers, said, tmp_path):
    model = tiny_model(tiny_config(), mtp_num_layers=layers or None)
    export_model(model, tmp_path, tiny_config(num_nextn_predict_layers=said))
    assert read_config(tmp_path).mtp_layers == layers
    names = CheckpointReader(tmp_path).names()
    assert any(name.startswith("model.layers.2.") for name in names) == bool(layers)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_incomplete_and_foreign_tensors_are_refused(tmp_path):
    config = tiny_config()
    model = tiny_model(config)
    export_model(model, tmp_path, config)
    index = tmp_path / INDEX
    complete = index.read_text()
    lost = "model.layers.1.self_attn.indexer.wk.weight"
    edit_json(index, lambda x: x["weight_map"].pop(lost))
    with pytest.raises(ConfigError, match=f"has no tensor {lost}"):
        import_model(model, tmp_path)

    def rename(content):
        shard = content["weight_map"].pop("model.norm.weight")
        content["weight_map"]["model.norm.bias"] = shard

    index.write_text(complete)
    edit_json(index, rename)
    with pytest.raises(ConfigError, match=r"1 tensors have no place.*model\.norm\.bias"):
        import_model(model, tmp_path)
    index.write_text(complete)
    edit_json(index, lambda x: x["weight_map"].update({"lm_head.weight": "lost.safetensors"}))
    with pytest.raises(ConfigError, match=r"shards that are not there \(lost\.safetensors\)"):
        import_model(model, tmp_path)
    index.write_text(complete)
    with pytest.raises(ConfigError, match="vocabulary 60"):
        import_model(tiny_model(config, vocab=60), tmp_path)


def test_rounding_to_a_narrower_dtype_is_reported(tmp_path):
    config = tiny_config()
    model = tiny_model(config)
    export_model(model, tmp_path, config)
    narrow = tiny_model(config, dtype=torch.bfloat16, seed=6)
    report = import_model(narrow, tmp_path)
    # The router's bias is fp32 in every model.
    assert set(report.filled) - set(report.rounded) == {"decoder.layers.1.mlp.router.expert_bias"}
    source, after = tensors_of(model), tensors_of(narrow)
    assert all(torch.equal(source[name].bfloat16(), after[name]) for name in report.rounded)


def fp8_copy(config, source, target):
    """Copy a checkpoint with fp8 linears, one scale per 16 x 8 block."""
    reader = CheckpointReader(source)
    expected = {}
    with CheckpointWriter(target, shard_bytes=30_000) as writer:
        for name in reader.names():
            weight = reader.read(name)
            if "proj" not in name or "weights_proj" in name:
                writer.add(name, weight)
                continue
            blocks = [
                -(-extent // size) for extent, size in zip(weight.shape, (16, 8), strict=True)
            ]
            scale = torch.rand(blocks, generator=torch.Generator().manual_seed(len(name))) + 0.1
            wide = scale.repeat_interleave(16, 0).repeat_interleave(8, 1)
            wide = wide[: weight.shape[0], : weight.shape[1]]
            small = (weight / wide).to(torch.float8_e4m3fn)
            writer.add(name, small)
            writer.add(f"{name}_scale_inv", scale)
            expected[name] = (small.float() * wide).bfloat16()
    quantised = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    config = config | {"quantization_config": quantised, "torch_dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config))
    return expected


def test_fp8_weights_are_dequantised_block_by_block(tmp_path):
    config = tiny_config()
    model = tiny_model(config)
    export_model(model, tmp_path / "wide", config)
    expected = fp8_copy(config, tmp_path / "wide", tmp_path / "fp8")
    assert len(expected) > 30
    report = import_model(model, tmp_path / "fp8")
    assert not report.unused
    for name, tensor in model_tensors(model):
        names = V3.match(name, 2).hf
        if names[0] in expected:
            assert torch.equal(tensor, torch.cat([expected[x] for x in names]).float())
    # Any part of a weight finds its scales.
    hf = read_config(tmp_path / "fp8")
    reader = CheckpointReader(tmp_path / "fp8", hf.quantisation)
    name = "model.layers.0.mlp.gate_proj.weight"
    part = reader.read(name, (slice(13, 47), slice(3, 30)))
    assert part.dtype == torch.bfloat16 and torch.equal(part, expected[name][13:47, 3:30])

    edit_json(tmp_path / "fp8" / "config.json", lambda x: x.pop("quantization_config"))
    with pytest.raises(ConfigError, match="is fp8 and its scales are not known"):
        import_model(model, tmp_path / "fp8")


def test_scales_must_cover_the_weight():
    weight = torch.ones(20, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="do not cover dim 0 up to 20"):
        dequantise(weight, torch.ones(1, 1), (16, 8), torch.float32)


def test_writer_bounds_shards_and_keeps_what_is_there(tmp_path):
    with CheckpointWriter(tmp_path / "a", shard_bytes=100) as writer:
        for i in range(5):
            writer.add(f"x{i}", torch.full((10,), float(i)))  # 40 bytes
        writer.add("large", torch.zeros(50))
        with pytest.raises(ConfigError, match="large is written twice"):
            writer.add("large", torch.zeros(1))
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 400}
    names = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert [index["weight_map"][f"x{i}"] for i in range(5)] == [names[i // 2] for i in range(5)]
    assert index["weight_map"]["large"] == names[3]
    assert sorted(x.name for x in (tmp_path / "a").iterdir()) == [*names, INDEX]
    reader = CheckpointReader(tmp_path / "a")
    assert torch.equal(reader.read("x3"), torch.full((10,), 3.0))
    with pytest.raises(ConfigError, match="holds a checkpoint already"):
        CheckpointWriter(tmp_path / "a")
    with pytest.raises(RuntimeError), CheckpointWriter(tmp_path / "b") as writer:
        writer.add("x", torch.zeros(1))
        raise RuntimeError
    assert not (tmp_path / "b" / INDEX).exists()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_shards_are_as_readable_as_other_files(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        with CheckpointWriter(tmp_path, shard_bytes=4) as writer:
            for name in "xy":
                writer.add(name, torch.zeros(1))
    finally:
        os.umask(before)
    modes = {x.name: stat.S_IMODE(x.stat().st_mode) for x in tmp_path.iterdir()}
    assert len(modes) == 3 and set(modes.values()) == {mode}, modes


def test_the_rope_of_the_indexer_follows_the_model():
    def interleaved(kind, **changes):
        return parse_config(tiny_config(kind, **changes)).fields["dsa_indexer_rope_interleaved"]

    assert interleaved("deepseek_v32") is False
    assert interleaved("glm_moe_dsa") is True
    assert interleaved("glm_moe_dsa", indexer_rope_interleave=False) is False
    assert not any(x.startswith("dsa_") for x in parse_config(tiny_config("deepseek_v3")).fields)


def test_index_sharing_is_read_from_either_form():
    from megatron_dsa.config.model import computes_topk

    def rule(**changes):
        hf = parse_config(tiny_config("glm_moe_dsa", num_hidden_layers=7, **changes))
        return SimpleNamespace(**hf.fields)

    def sharing(**changes):
        fields = rule(**changes)
        return fields.dsa_indexer_topk_freq, fields.dsa_indexer_skip_topk_offset

    assert sharing() == (1, 0)
    assert sharing(index_topk_freq=3, index_skip_topk_offset=2) == (3, 2)
    listed = rule(index_topk_pattern="FFSSFSS")
    assert [computes_topk(listed, layer) for layer in range(1, 8)] == [1, 1, 0, 0, 1, 0, 0]


def test_another_model_is_refused():
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.extras.huggingface.build import transformer_config

    model = tiny_model(tiny_config())
    hf = parse_config(tiny_config(v_head_dim=11, rope_theta=5e5, rms_norm_eps=1e-5))
    with pytest.raises(ConfigError) as error:
        check_model(hf, model.config)
    assert "v_head_dim is 10 in the model, 11 by config.json" in str(error.value)
    assert "rotary_base is 10000.0 in the model, 500000.0 by config.json" in str(error.value)
    assert "--dsa-latent-norm-epsilon is None for the model, 1e-06" in str(error.value)
    hf = parse_config(tiny_config())
    check_model(hf, model.config)
    other = transformer_config(hf, "sparse", dsa=DSAOptions(latent_norm_epsilon=1e-3))
    with pytest.raises(ConfigError, match=r"-latent-norm-epsilon is 0\.001 .* 1e-06 by config"):
        check_model(hf, other)


def test_commands_there_and_back(tmp_path, capsys):
    config = tiny_config(**MTP)
    there, back = tmp_path / "hf", tmp_path / "back"
    export_model(tiny_model(config, mtp_num_layers=1), there, config)
    megatron = ["--output", str(tmp_path / "megatron"), "--input", str(there)]
    assert main(["import-hf", *megatron]) == 0
    with pytest.raises(ConfigError, match="holds a checkpoint already"):
        main(["import-hf", *megatron])
    out = ["export-hf", "--input", str(tmp_path / "megatron"), "--output", str(back)]
    with pytest.raises(ConfigError, match="holds no distributed checkpoint of --step 3"):
        main([*out, "--config", str(there), "--step", "3"])
    with pytest.raises(ConfigError, match="--shard-gb must be finite and at least 1e-09"):
        main([*out, "--config", str(there), "--shard-gb", "-1"])
    assert main([*out, "--config", str(there)]) == 0
    before, after = CheckpointReader(there), CheckpointReader(back)
    assert set(before.names()) == set(after.names())
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.names())
    assert "left out" not in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(
        json.dumps(config | {"num_nextn_predict_layers": 0})
    )
    trunk = ["--config", str(tmp_path / "other"), "--output", str(tmp_path / "trunk")]
    assert main([*out[:3], *trunk]) == 0
    assert "multi-token prediction are left out" in capsys.readouterr().err
    kept = set(CheckpointReader(tmp_path / "trunk").names())
    assert kept == {name for name in before.names() if not name.startswith("model.layers.2.")}
    for change, message in (
        (
            {"moe_intermediate_size": 24},
            r"linear_fc1.weight is \(8, 40, 32\) in the checkpoint and \(8, 48",
        ),
        ({"model_type": "deepseek_v3"}, "deepseek_v3 with no indexers, and .* has indexers"),
        ({"vocab_size": 71}, r"word_embeddings.weight is \(70, 32\) in the checkpoint and \(71"),
    ):
        (tmp_path / "other" / "config.json").write_text(json.dumps(config | change))
        wrong = [
            "--config",
            str(tmp_path / "other"),
            "--output",
            str(tmp_path / next(iter(change))),
        ]
        with pytest.raises(ConfigError, match=message):
            main([*out[:3], *wrong])
    with pytest.raises(ConfigError, match="holds no distributed checkpoint"):
        main(["export-hf", "--input", str(there), "--output", str(back), "--config", str(there)])
