"""Whole DeepSeek-V4 checkpoints: hyper-connections, hash routing, prediction on the streams."""

import json

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.config_json import read_config
from megatron_dsa.extras.huggingface.convert import (
    export_model,
    import_model,
    model_tensors,
    open_checkpoint,
)
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, PREDICTION
from tests.cases.released_formats import stored_bytes, write_v4
from tests.helpers import relative_error
from tests.tiny_models import (
    logits_of,
    published,
    tensors_of,
    there_and_back,
    tiny_config,
    tiny_model,
    tiny_v4,
    tokens,
    transformers_v4,
)

pytest.importorskip("safetensors")

STREAMS, HASHED, PREDICTED = [HYPER_CONNECTIONS], [HASH_ROUTING], [PREDICTION]
NO_YARN = {"rope_scaling": {"type": "default"}}
HASH_LAYERS = {"mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]}


def built(*features):
    names = [x for group in features for x in group]
    return pytest.param(names, id=" and ".join(names))


#: Models with streams, by further features.
WHOLE = [built(STREAMS), built(STREAMS, HASHED), built(STREAMS, PREDICTED)]
WHOLE += [built(STREAMS, HASHED, PREDICTED)]


def whole(features, **changes):
    more = {"num_hash_layers": 2} if HASH_ROUTING in features else {}
    if PREDICTION in features:
        more |= {"num_nextn_predict_layers": 1}
    config = tiny_v4(**more | changes)
    return config, model_of(config, features)


def model_of(config, features, **settings):
    mtp = {"mtp_num_layers": 1} if PREDICTION in features else {}
    return tiny_model(config, features=features, **mtp | settings)


def check_equal(there, back):
    """Compare all tensors of two checkpoints by released names; return their number."""
    before, after = (open_checkpoint(x, read_config(x)) for x in (there, back))
    assert set(before.names()) == set(after.names())
    for name in before.names():
        ours, theirs = after.read(name), before.read(name)
        assert ours.dtype == theirs.dtype or "tid2eid" in name
        assert torch.equal(ours.to(theirs.dtype), theirs), name
    return len(before.names())


@pytest.mark.parametrize("streams", [3, 4])
@pytest.mark.parametrize("rope", [{}, NO_YARN], ids=["yarn", "plain"])
@pytest.mark.parametrize("features", [built(STREAMS), built(STREAMS, HASHED)])
def test_logits_equal_those_of_transformers(features, rope, streams, tmp_path):
    hashed = HASH_LAYERS if HASH_ROUTING in features else {}
    theirs = published(transformers_v4(hc_mult=streams, **rope, **hashed), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    ours = model_of(config, features)
    report = import_model(ours, tmp_path)
    assert not report.rounded and not report.unused
    assert all(name.endswith("router.expert_bias") for name in report.fresh)
    ids = tokens(2, 37)
    with torch.no_grad():
        reference = theirs(ids).logits
    error = relative_error(logits_of(ours, ids), reference)
    print(f"logits of deepseek_v4, {streams} streams, {sorted(rope)}, {features}: {error:.1e}")
    assert error < 1e-5
    plain = tiny_model(config)
    import_model(plain, tmp_path, without=features)
    assert relative_error(logits_of(plain, ids), reference) > 1e-2


def test_connections_are_those_of_transformers(tmp_path):
    """Equal logits would not show all exchanged parameters."""
    theirs = published(transformers_v4(hc_mult=4), tmp_path)
    ours = tiny_model(json.loads((tmp_path / "config.json").read_text()), features=STREAMS)
    import_model(ours, tmp_path)
    expected = {}
    for layer, their_layer in enumerate(theirs.model.layers):
        for kind, module in (("attn", their_layer.attn_hc), ("ffn", their_layer.ffn_hc)):
            for part, tensor in module.named_parameters():
                expected[f"decoder.layers.{layer}.hc_{kind}_{part}"] = tensor
    for name, tensor in theirs.model.hc_head.named_parameters():
        expected["decoder.final_layernorm." + name.replace("hc_", "hc_head_")] = tensor
    mine = {name: x for name, x in model_tensors(ours) if "hc_" in name}
    assert mine.keys() == expected.keys() and len(mine) == 4 * 6 + 3
    assert all(torch.equal(mine[name].cpu(), expected[name]) for name in mine)


@pytest.mark.parametrize("features", [built(STREAMS), built(STREAMS, HASHED)])
def test_checkpoint_of_transformers_there_and_back(features, tmp_path):
    there = tmp_path / "hf"
    hashed = HASH_LAYERS if HASH_ROUTING in features else {}
    published(transformers_v4(**hashed), there)
    back = there_and_back(there, tmp_path)
    print(f"{check_equal(there, back)} tensors of deepseek_v4 with {features} back to the bit")
    before, after = read_config(there), read_config(back)
    assert after.fields == before.fields and after.fields["hc_mult"] == 3


@pytest.mark.parametrize("features", [built(PREDICTED), *WHOLE])
def test_models_come_back_to_the_bit(features, tmp_path):
    config, model = whole(features)
    export_model(model, tmp_path, config, shard_bytes=50_000)
    other = model_of(config, features, seed=6)
    report = import_model(other, tmp_path)
    assert not report.rounded and not report.unused
    assert len(report.fresh) == 2 * (HASH_ROUTING in features) * (
        "expert_bias" in str(report.fresh)
    )
    before, after = tensors_of(model), tensors_of(other)
    assert before.keys() == after.keys()
    for name in before:
        rows = 70 if "tid2eid" in name else None
        assert torch.equal(before[name][:rows], after[name][:rows]), name


@pytest.mark.parametrize("features", WHOLE)
def test_commands_there_and_back(features, tmp_path):
    there = tmp_path / "hf"
    config, model = whole(features)
    export_model(model, there, config)
    back = there_and_back(there, tmp_path)
    count = check_equal(there, back)
    streams = 27 + 9 * (PREDICTION in features)
    assert sum("hc_" in x for x in stored_bytes(back)) == streams and count > 150
    described = json.loads((back / "config.json").read_text())
    assert described["hc_mult"] == 3 and "quantization_config" not in described
    assert described["num_hash_layers"] == 2 * (HASH_ROUTING in features)


@pytest.mark.parametrize("features", [built(HASHED), built(STREAMS, HASHED)])
def test_tables_are_padded_with_the_vocabulary(features, tmp_path):
    """80 entries for 70 tokens: padding names existing experts, each once."""
    config, model = whole(features)
    export_model(model, tmp_path, config)
    stored = stored_bytes(tmp_path)["layers.1.ffn.gate.tid2eid"]
    assert stored[1] == (70, 4)
    import_model(model, tmp_path)
    table = model.decoder.layers[1].mlp.router.tid2eid
    assert table.shape == (80, 4)
    assert torch.equal(table[70:].cpu().long(), torch.arange(4).expand(10, 4))


def write_tables(config, folder, table):
    """Write a random plain model whose first two layers have this table, without a bias."""
    from safetensors.torch import load_file, save_file

    plain = {**config, "num_hash_layers": 0}
    export_model(tiny_model(plain), folder, plain)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    for layer in (0, 1):
        del tensors[f"layers.{layer}.ffn.gate.bias"]
        tensors[f"layers.{layer}.ffn.gate.tid2eid"] = table.clone()
    shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.full((70, 4), 8), r"tid2eid must hold experts from 0 to --num-experts - 1 = 7, got"),
        (torch.full((70, 4), -1), r"tid2eid must hold experts from 0 .*got \[-1, -1, -1, -1\]"),
        (torch.ones(70, 4, dtype=torch.int64), r"tid2eid must not name an expert twice"),
        (torch.zeros(69, 4, dtype=torch.int64), r"tid2eid is \(69, 4\), .* vocab_size = 70"),
        (
            torch.zeros(70, 3, dtype=torch.int64),
            r"tid2eid must hold integers .*topk = 4\], got .*\[70, 3\]",
        ),
        (torch.zeros(70, 4), r"tid2eid is F32, and is a table of experts: it must be I64 or I32"),
        (torch.zeros(70, 4, dtype=torch.uint8), r"tid2eid is U8, and is a table"),
    ],
)
def test_wrong_tables_are_refused(table, message, tmp_path):
    write_tables(tiny_v4(num_hash_layers=2), tmp_path, table)
    with pytest.raises(ConfigError, match=message):
        import_model(tiny_model(tiny_v4(num_hash_layers=2), features=HASHED), tmp_path)


def test_the_plain_model_is_still_imported(tmp_path):
    config, model = whole(STREAMS)
    export_model(model, tmp_path / "hf", config)
    back = there_and_back(tmp_path / "hf", tmp_path, without=STREAMS)
    check_equal(back, there_and_back(back, tmp_path / "again"))  # nothing has to be omitted
    before, after = (open_checkpoint(x, read_config(x)) for x in (tmp_path / "hf", back))
    assert set(before.names()) == set(after.names())
    changed = {x for x in before.names() if not torch.equal(before.read(x), after.read(x))}
    assert changed == {x for x in before.names() if "hc_" in x}


def test_models_and_checkpoints_that_differ_are_refused(tmp_path):
    config, model = whole(STREAMS)
    export_model(model, tmp_path, config)
    plain = tiny_model(config)
    with pytest.raises(ConfigError) as error:
        import_model(plain, tmp_path)
    assert "has more than what the model is built with" in str(error.value)
    assert "- 27 tensors of hyper-connections, as hc_head_base" in str(error.value)
    with pytest.raises(ConfigError, match="--without hyper-connections: the model has it"):
        import_model(model, tmp_path, without=STREAMS)
    for key, value in (("hc_mult", 4), ("hc_eps", 1e-5), ("hc_sinkhorn_iters", 19)):
        other = tiny_model(config, features=STREAMS, **{key: value})
        with pytest.raises(ConfigError, match=f"{key} is {value!r} in the model, .* by config"):
            import_model(other, tmp_path)
    with pytest.raises(ConfigError, match="hc_mult is 3 in the model, 1 by config"):
        export_model(model, tmp_path / "out", {**config, "hc_mult": 1})
    reader = open_checkpoint(tmp_path, read_config(tmp_path))
    tensors = {x: reader.read(x) for x in reader.names() if x != "layers.2.hc_ffn_base"}
    rewrite(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"has no tensor layers\.2\.hc_ffn_base"):
        import_model(model, tmp_path)
    tensors["layers.2.hc_ffn_base"] = torch.zeros(25)
    rewrite(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"layers\.2\.hc_ffn_base gives \(25,\), .* \(15,\)"):
        import_model(model, tmp_path)


def rewrite(folder, tensors):
    """Rewrite a checkpoint's tensors into one file."""
    from safetensors.torch import save_file

    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    save_file(tensors, folder / "model.safetensors")


def test_streams_have_no_place_in_other_models(tmp_path):
    """--hc-mult works with any attention; DeepSeek-V3.2's checkpoints cannot hold streams."""
    config = tiny_config()
    model = tiny_model(config, hc_mult=2)
    with pytest.raises(ConfigError, match=r"hyper-connections, and config\.json, of a deepseek"):
        export_model(model, tmp_path, config)
    export_model(tiny_model(config), tmp_path, config)
    with pytest.raises(ConfigError, match=r"hc_.* has no counterpart in .*DeepSeek-V3"):
        import_model(model, tmp_path)
    with pytest.raises(ConfigError, match=r"--without hyper-connections: .* nothing to"):
        import_model(tiny_model(config), tmp_path, without=STREAMS)


@pytest.mark.parametrize("features", WHOLE)
def test_released_formats_come_back_to_the_byte(features, tmp_path):
    wide, there = tmp_path / "wide", tmp_path / "hf"
    config, model = whole(features)
    export_model(model.bfloat16(), wide, config)
    quantised = write_v4(config, wide, there)
    back = there_and_back(there, tmp_path, "--quantise", "released", "--shard-gb", "0.0001")
    before, after = stored_bytes(there), stored_bytes(back)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert sum(x.endswith(".scale") for x in after) == len(quantised) > 120
    said, again = (json.loads((x / "config.json").read_text()) for x in (there, back))
    assert again == said | {"torch_dtype": "bfloat16"}
