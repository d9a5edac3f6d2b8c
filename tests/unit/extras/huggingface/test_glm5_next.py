"""A whole GLM-5.3-Flash against the class of transformers.

Streams with their mean, clamped SwiGLU, attention without rope, pools of 4 tokens of which 2 of up
to 6 are selected. The peer's indexer has no gradient: ours is frozen.
"""

import copy
import importlib
import json

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.build import transformer_config
from megatron_dsa.extras.huggingface.config_json import differences, parse_config, read_config
from megatron_dsa.extras.huggingface.convert import export_model, import_model
from megatron_dsa.extras.huggingface.names import HYPER_CONNECTIONS
from tests.cases.released_formats import stored_bytes, write_glm_5_3
from tests.helpers import relative_error
from tests.host import packed
from tests.tiny_models import (
    published,
    tensors_of,
    there_and_back,
    tiny_glm_5_3,
    tiny_model,
    tokens,
    transformers_classes,
)

load_file = pytest.importorskip("safetensors.torch").load_file

MTP = "model.language_model.layers.4."
LAYERS = {
    "dsa": {},
    "shared": {"indexer_types": ["full", "shared", "full", "shared"]},
    "whole": {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]},
}
KDA_FIRST = {"layer_types": ["linear_attention"] + ["indexed_attention"] * 3}
#: Lengths that no pool divides, documents without a whole pool.
LENGTHS = {"one": [23], "packed": [3, 9, 1, 22, 2]}


def built(folder, dtype=torch.float32):
    """A Megatron model with the weights in a folder."""
    config = json.loads((folder / "config.json").read_text())
    model = tiny_model(config, dtype=dtype, features=[HYPER_CONNECTIONS])
    report = import_model(model, folder)
    assert not report.fresh and not report.rounded and not report.unused
    return model


@pytest.fixture(scope="module", params=LAYERS)
def released(request, tmp_path_factory):
    """A model of transformers, and the folder where it is saved."""
    folder = tmp_path_factory.mktemp("glm")
    return published(tiny_glm_5_3(**LAYERS[request.param]), folder), folder


def logits_of(model, ids, lengths):
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = packed(*lengths) if len(lengths) > 1 else None
    return model(ids, positions, None, packed_seq_params=documents)[..., :70]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_logits_and_gradients(lengths, released, tmp_path):
    """Gradients of ours in fp64: fp32 rounds sums of hyper-connections that cancel to 2e-4."""
    theirs, folder = released
    theirs.zero_grad()
    ids = tokens(1, sum(lengths))
    expected = torch.cat([theirs(part).logits for part in ids.split(lengths, 1)], 1)
    with torch.no_grad():
        logits = logits_of(built(folder).train(), ids, lengths)
    error = relative_error(logits, expected)
    assert error < 1e-5
    print(f"logits, {len(lengths)} documents: {error:.1e}")
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(upstream)
    ours = built(folder, torch.float64).train()
    logits_of(ours, ids, lengths).backward(upstream.double())

    # Their gradients, saved as a checkpoint, take the way of weights.
    gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        for own, peer in zip(gradients.parameters(), theirs.parameters(), strict=True):
            own.copy_(torch.zeros_like(own) if peer.grad is None else peer.grad)
    gradients.save_pretrained(tmp_path)
    expected = tensors_of(built(tmp_path))
    for name, parameter in ours.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None or not parameter.grad.any()
            continue
        assert parameter.grad.any(), name
        assert relative_error(parameter.grad, expected[name]) < 1e-4, name


@pytest.mark.parametrize(
    "changes",
    [{"activation_func_clamp_value": None}, {"hc_sinkhorn_iters": 1}, {"hc_eps": 1e-3}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_comparison_would_show(changes, released):
    theirs, folder = released
    ours = built(folder)
    vars(ours.config).update(changes)
    with torch.no_grad():
        error = relative_error(logits_of(ours, tokens(), [24]), theirs(tokens()).logits)
    assert error > 1e-4


def test_round_trip(released, tmp_path, capsys):
    """Every tensor of the text model comes back to the bit, from the commands; others are named."""
    _, folder = released
    back = there_and_back(folder, tmp_path)
    assert "copy the tensors of the vision tower" in capsys.readouterr().err
    before, after = (read(x) for x in (folder, back))
    text = {name: x for name, x in before.items() if not name.startswith("model.visual.")}
    assert len(text) < len(before) and text.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in text.items())
    print(f"{len(text)} tensors back to the bit, {len(before) - len(text)} of vision left out")
    config, again = (json.loads((x / "config.json").read_text()) for x in (folder, back))
    assert config == again


def test_released_formats(released, tmp_path):
    """fp8 MLPs, bf16 weights and fp32 gates: the same bytes with ``--quantise released``."""
    there = tmp_path / "there"
    config = json.loads((released[1] / "config.json").read_text())
    write_glm_5_3(config, released[1], there)
    back = there_and_back(there, tmp_path, "--quantise", "released")
    before, after = stored_bytes(there), stored_bytes(back)
    assert after == {x: y for x, y in before.items() if not x.startswith("model.visual.")}
    kinds = {str(dtype) for dtype, *_ in after.values()}
    assert kinds == {"torch.float8_e4m3fn", "torch.float32", "torch.bfloat16"}
    assert read_config(back).raw == read_config(there).raw


def read(folder):
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: x for tensors in files for name, x in tensors.items()}


@pytest.fixture(scope="module")
def predicting(released, tmp_path_factory):
    """A model with a layer of prediction, which transformers skips, and its export."""
    folder = tmp_path_factory.mktemp("prediction")
    config = json.loads((released[1] / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 1
    model = tiny_model(config, mtp_num_layers=1, features=[HYPER_CONNECTIONS])
    export_model(model, folder, config)
    return model, folder


def test_prediction_there_and_back(predicting, tmp_path):
    """Layer 4 has plain residuals, sparse attention and experts."""
    tensors = read(predicting[1])
    own = {x.removeprefix(MTP) for x in tensors if x.startswith(MTP) and ".experts." not in x}
    assert own == {
        *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
        *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
        *(f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"self_attn.{x}_proj.weight" for x in ("q_a", "q_b", "kv_b", "o")),
        "self_attn.kv_a_proj_with_mqa.weight",
        *(f"self_attn.{x}_a_layernorm.weight" for x in ("q", "kv")),
        *(f"self_attn.indexer.{x}.weight" for x in ("wq_b", "wk", "weights_proj", "k_norm")),
        "self_attn.indexer.k_norm.bias",
        *(f"self_attn.indexer.index_kpool_compress_{x}" for x in ("gate", "ape")),
    }
    again = read(there_and_back(predicting[1], tmp_path))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(x, again[name]) for name, x in tensors.items())


def test_prediction(predicting):
    """As vLLM reads the layer: of the output of the final norm and the next token's embedding."""
    model, folder = predicting
    config_class, model_class = transformers_classes("glm5_next")
    config = config_class.from_pretrained(folder)
    theirs = model_class.from_pretrained(folder, attn_implementation="eager").float()
    ids = tokens(1, 23)
    own = {x.removeprefix(MTP): y for x, y in read(folder).items() if x.startswith(MTP)}
    with torch.no_grad():
        expected = predicted_by(theirs.model.language_model, config.text_config, own, ids)
    found = []
    hook = model.mtp.layers[0].register_forward_hook(lambda *call: found.append(call[2][0]))
    with torch.no_grad():
        model(ids, torch.arange(23)[None], None, labels=ids, loss_mask=torch.ones(1, 23))
    hook.remove()
    # The last token has no next one.
    assert relative_error(found[0].transpose(0, 1)[:, :-1], expected) < 1e-5


def predicted_by(text_model, config, weights, ids):
    """Output of the layer of prediction, by modules of transformers: ``[1, tokens - 1, C]``."""
    modeling = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")
    config = copy.deepcopy(config)
    layer, config._attn_implementation = config.num_hidden_layers, "eager"
    config.layer_types, config.indexer_types = ["indexed_attention"] * 5, ["full"] * 5
    attention, experts = (
        modeling.Glm5NextTextAttention(config, layer),
        modeling.Glm5NextTextMoE(config),
    )
    of_attention = {x[10:]: y for x, y in weights.items() if x.startswith("self_attn.")}
    attention.load_state_dict(of_attention)
    pick = [
        [weights[f"mlp.experts.{i}.{x}_proj.weight"] for i in range(8)]
        for x in ("gate", "up", "down")
    ]
    gate, up, down = map(torch.stack, pick)
    of_mlp = {x[4:]: y for x, y in weights.items() if x.startswith("mlp.") and ".experts." not in x}
    of_mlp |= {"experts.gate_up_proj": torch.cat((gate, up), 1), "experts.down_proj": down}
    experts.load_state_dict(of_mlp)

    def norm(name, x):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-5)

    hidden = text_model(ids).last_hidden_state[:, :-1]
    embedded = text_model.embed_tokens(ids[:, 1:])
    x = (
        torch.cat((norm("enorm", embedded), norm("hnorm", hidden)), -1)
        @ weights["eh_proj.weight"].T
    )
    everything = torch.ones(1, x.shape[1], dtype=torch.bool)
    x = x + attention(norm("input_layernorm", x), everything)[0]
    x = x + experts(norm("post_attention_layernorm", x))
    return norm("shared_head.norm", x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_kpool": None}, "index_kpool = None: it must be given"),
        ({"index_kpool_always_select_tail": False}, "always_select_tail = False: only True"),
        ({"index_kpool_kind": "max"}, "index_kpool_kind = 'max': this key is not understood"),
        (
            {"layer_types": ["linear_attention"] + ["full_attention"] * 3}
            | {"indexer_types": ["full", "full", "shared", "full"]},
            "indexer_types = .* no selection is shared across layers of KDA",
        ),
        ({"linear_lower_bound": None} | KDA_FIRST, "linear_lower_bound = None: only gates with"),
        (
            {"linear_attn_config": {"kda_layers": [1]}} | KDA_FIRST,
            "linear_attn_config.kda_layers = .1.: contradicts layer_types",
        ),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim = 8: only 0 is supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types = .* must say linear_attention"),
        ({"hc_mult": 4, "hc_eps": None}, "hc_eps = None: it must be given"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(tiny_glm_5_3(**changes))


@pytest.mark.parametrize("sharing", [{"index_topk_freq": 4}, {"index_topk_pattern": "FFFS"}])
def test_sharing_is_not_counted_over_kda_layers(sharing):
    config = tiny_glm_5_3(**KDA_FIRST)
    del config["text_config"]["indexer_types"]
    config["text_config"] |= sharing
    with pytest.raises(ConfigError, match=r"give indexer_types, with KDA layers"):
        parse_config(config)


def test_a_frequency_of_kda_layers_is_the_released_list():
    hf = parse_config(tiny_glm_5_3(layer_types=["linear_attention"] * 3 + ["indexed_attention"]))
    config = transformer_config(hf, "sparse")
    config.linear_attention_freq = 4
    assert not any(name == "linear_attention_freq" for name in differences(hf, config))
