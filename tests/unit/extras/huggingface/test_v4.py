"""DeepSeek-V4 checkpoints: attention, its surroundings, and unsupported parts."""

import json

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.config_json import read_config
from megatron_dsa.extras.huggingface.convert import export_model, import_model, model_tensors
from megatron_dsa.extras.huggingface.files import CheckpointReader, CheckpointWriter
from megatron_dsa.extras.huggingface.names import V4
from megatron_dsa.ops import dispatch
from tests.cases.released_formats import write_v4
from tests.helpers import relative_error
from tests.tiny_models import (
    assert_equal_tensors,
    logits_of,
    tensors_of,
    there_and_back,
    tiny_config,
    tiny_model,
    tiny_v4,
    tokens,
    transformers_classes,
    transformers_v4,
)

pytest.importorskip("safetensors")

MTP = {"num_nextn_predict_layers": 1}


def test_names_are_those_of_released_checkpoints():
    """Names come from a released V4-Flash file, not from our table."""
    attention = "decoder.layers.2.self_attention."
    core = f"{attention}core_attention."
    expected = {
        "embedding.word_embeddings.weight": ["embed.weight"],
        "output_layer.weight": ["head.weight"],
        "decoder.final_layernorm.weight": ["norm.weight"],
        f"{attention}kv_layernorm.weight": ["layers.2.attn.kv_norm.weight"],
        f"{attention}linear_o_group_proj.weight": ["layers.2.attn.wo_a.weight"],
        f"{core}attn_sink": ["layers.2.attn.attn_sink"],
        f"{core}compressor.ape": ["layers.2.attn.compressor.ape"],
        f"{core}indexer.compressor.linear_wgate.weight": [
            "layers.2.attn.indexer.compressor.wgate.weight"
        ],
        "decoder.layers.2.mlp.router.expert_bias": ["layers.2.ffn.gate.bias"],
        "decoder.layers.2.mlp.experts.linear_fc1.weight31": [
            "layers.2.ffn.experts.31.w1.weight",
            "layers.2.ffn.experts.31.w3.weight",
        ],
        "decoder.layers.2.hc_attn_fn": ["layers.2.hc_attn_fn"],
        "decoder.layers.2.hc_ffn_scale": ["layers.2.hc_ffn_scale"],
        "decoder.final_layernorm.hc_head_base": ["hc_head_base"],
        "decoder.layers.2.mlp.router.tid2eid": ["layers.2.ffn.gate.tid2eid"],
        "mtp.layers.0.eh_proj.weight": ["mtp.0.e_proj.weight", "mtp.0.h_proj.weight"],
        "mtp.layers.0.h_proj.weight": ["mtp.0.h_proj.weight"],
        "mtp.layers.0.final_layernorm.hc_head_fn": ["mtp.0.hc_head_fn"],
        "mtp.layers.0.mtp_model_layer.hc_ffn_base": ["mtp.0.hc_ffn_base"],
        "mtp.layers.0.final_layernorm.weight": ["mtp.0.norm.weight"],
        "mtp.layers.0.mtp_model_layer.self_attention.linear_q_down_proj.weight": [
            "mtp.0.attn.wq_a.weight"
        ],
    }
    for name, names in expected.items():
        assert list(V4.match(name, 43).hf) == names
        assert all(V4.locate(x, 43).is_mtp == name.startswith("mtp") for x in names)
    connections = ["hc_head_base", "layers.0.hc_attn_fn", "mtp.0.hc_head_scale"]
    table = "layers.0.ffn.gate.tid2eid"
    assert V4.by_feature([table, *reversed(connections), "layers.0.hc_attn_fns"]) == {
        "hyper-connections": connections,
        "hash-routing": [table],
        "multi-token-prediction": connections[2:],
    }


@pytest.mark.parametrize("config", [tiny_config(), tiny_v4()], ids=["V3.2", "V4"])
def test_conversions_choose_no_kernels(config, tmp_path, monkeypatch, caplog):
    there = tmp_path / "hf"
    export_model(tiny_model(config), there, config)
    monkeypatch.setattr(dispatch.choice_log, "_logged", set())
    dispatch.forget_choices()
    caplog.set_level("INFO", dispatch.choice_log.logger.name)
    caplog.clear()

    def said():
        return [x.getMessage() for x in caplog.records if x.name == dispatch.choice_log.logger.name]

    there_and_back(there, tmp_path)
    assert not said()
    tiny_model(config)
    chosen = "sparse_attention_forward: " if torch.cuda.is_available() else "no GPU: torch runs"
    assert any(chosen in line for line in said())


def add_tensors(folder, tensors):
    with CheckpointWriter(folder / "more") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "more/model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_predictions_of_another_kind_are_refused_or_left_out(tmp_path, capsys):
    """Stages of DSpark, as in DeepSeek-V4-Flash-0731: more ratios than counted layers."""
    config = tiny_v4()
    model = tiny_model(config)
    export_model(model, tmp_path, config)
    layers = config["num_hidden_layers"]
    config |= MTP | {"compress_ratios": [*config["compress_ratios"][:layers], 0, 0, 0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    add_tensors(tmp_path, {f"mtp.{stage}.markov_head": torch.zeros(3) for stage in range(3)})
    there, out = str(tmp_path), str(tmp_path / "megatron")
    plain = ["--without", "hyper-connections"]
    refusal = f"compress_ratios has {layers + 3} entries, .* counts {layers} layers and 1 of multi"
    for command in (["flags", there], ["import-hf", "--input", there, "--output", out]):
        with pytest.raises(ConfigError, match=refusal):
            main([*command, *plain])
        assert main([*command, *plain, "multi-token-prediction"]) == 0
        assert "--mtp-num-layers" not in capsys.readouterr().out
    other = tiny_model(config, seed=6)
    import_model(other, there, without=["multi-token-prediction", "hyper-connections"])
    assert_equal_tensors(model, other)
    with pytest.raises(ConfigError, match=refusal):
        import_model(tiny_model(config, mtp_num_layers=1), there, without=["hyper-connections"])


def test_what_megatron_lacks_is_refused_and_named(tmp_path):
    config = tiny_v4()
    model = tiny_model(config)
    export_model(model, tmp_path, config)
    add_tensors(
        tmp_path,
        {
            "layers.0.ffn.gate.tid2eid": torch.zeros(70, 4, dtype=torch.int32),
            "layers.1.hc_ffn_scale": torch.tensor([0.0, 0.1, 0.0]),
        },
    )
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["layers.0.ffn.gate.bias"]
    index.write_text(json.dumps(content))
    other = tiny_model(config, seed=6)
    with pytest.raises(ConfigError) as error:
        import_model(other, tmp_path)
    assert "- 27 tensors of hyper-connections, as hc_head_base" in str(error.value)
    assert "- 1 tensors of hash-routing, as layers.0.ffn.gate.tid2eid" in str(error.value)
    assert "--without hash-routing hyper-connections" in str(error.value)
    with pytest.raises(ConfigError, match="27 tensors of hyper-connections"):
        import_model(other, tmp_path, without=["hash-routing"])
    with pytest.raises(ConfigError, match="--without experts: DeepSeek-V4 has hyper-connections"):
        import_model(other, tmp_path, without=["experts"])
    both = ["hash-routing", "hyper-connections"]
    report = import_model(other, tmp_path, without=both)
    assert report.fresh == ("decoder.layers.0.mlp.router.expert_bias",)
    before, after = tensors_of(model), tensors_of(other)
    assert all(torch.equal(before[name], after[name]) for name in report.filled)
    # The command writes a start for a whole model.
    command = ["import-hf", "--input", str(tmp_path), "--output", str(tmp_path / "megatron")]
    assert main([*command, "--without", *both]) == 0


def test_released_formats_are_dequantised(tmp_path):
    config = tiny_v4()
    model = tiny_model(config)
    export_model(model, tmp_path / "wide", config)
    expected = write_v4(config, tmp_path / "wide", tmp_path / "small")
    assert sum(".experts." in name for name in expected) == 4 * 8 * 3 and len(expected) > 120
    assert not import_model(model, tmp_path / "small").unused
    for name, tensor in model_tensors(model):
        names = V4.match(name, 4).hf
        if names[0] in expected:
            assert torch.equal(tensor, torch.cat([expected[x] for x in names]).float()), name
    hf = read_config(tmp_path / "small")
    reader = CheckpointReader(tmp_path / "small", hf.quantisation)
    for name in ("layers.1.ffn.experts.3.w2.weight", "layers.1.attn.wq_b.weight"):
        part = reader.read(name, (slice(3, 23), slice(5, 18)))  # begins in the middle of a byte
        assert torch.equal(part, expected[name][3:23, 5:18])
        assert reader.shape(name) == expected[name].shape


def test_logits_equal_those_of_transformers(tmp_path):
    """transformers' hyper-connections keep our export's residuals plain."""
    _, model_class = transformers_classes("deepseek_v4")
    config = transformers_v4(hc_eps=0.0)
    ours = tiny_model(config)
    with torch.no_grad():
        for layer in ours.decoder.layers:  # without it other experts are chosen
            layer.mlp.router.expert_bias.mul_(3)
    export_model(ours, tmp_path, config, shard_bytes=40_000)
    theirs = model_class.from_pretrained(tmp_path, attn_implementation="eager").float()
    ids = tokens(1, 37)
    with torch.no_grad():
        reference = theirs.eval()(ids).logits
    error = relative_error(logits_of(ours, ids), reference)
    assert error < 1e-5
    print(f"logits of deepseek_v4: {error:.1e}")
    for module in ours.modules():
        if hasattr(module, "config"):  # experts have copies
            module.config.activation_func_clamp_value = None
    assert relative_error(logits_of(ours, ids), reference) > 1e-3
