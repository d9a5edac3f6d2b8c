"""The command ``flags``: its output makes the entry point build the model of config.json."""

import json

import pytest

from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface.convert import export_model, import_model
from megatron_dsa.extras.huggingface.flags import flags_of
from megatron_dsa.extras.huggingface.model_v4 import HASH_LAYERS
from tests.helpers import relative_error
from tests.host import parsed
from tests.tiny_models import YARN, logits_of, tiny_config, tiny_model, tiny_v4, tokens

pytest.importorskip("safetensors")

MODELS = {
    "v3": tiny_config("deepseek_v3", rope_theta=50000.0),
    "v3.2": tiny_config(rope_scaling=YARN, num_nextn_predict_layers=1, n_shared_experts=2),
    "glm-5": tiny_config(
        *("glm_moe_dsa",), num_hidden_layers=4, index_topk_freq=2, index_skip_topk_offset=2,
        n_group=1, topk_group=1, rms_norm_eps=0.01,
    ),
    "v4": tiny_v4(),
    "v4, plain": tiny_v4(num_nextn_predict_layers=1),
}  # fmt: skip
HASH_FLAG = "--" + HASH_LAYERS.replace("_", "-")
RUN = "--micro-batch-size 1 --seq-length 24 --train-iters 1 --lr 1e-4 --lr-decay-style constant"


@pytest.mark.parametrize("name", MODELS)
def test_printed_flags_give_the_model_of_the_checkpoint(name, tmp_path, monkeypatch, capsys):
    from megatron_dsa.extras.huggingface.build import gpt_model
    from megatron_dsa.pretrain import model_config_from_args

    config = MODELS[name]
    stage = "dense" if name == "v3" else "sparse"
    features = ["hyper-connections"] if name == "v4" else []
    mtp = config.get("num_nextn_predict_layers") or None
    expected = tiny_model(config, stage, features=features, mtp_num_layers=mtp)
    export_model(expected, tmp_path, config)
    without = ["--without", "hyper-connections"] if name == "v4, plain" else []
    assert main(["flags", str(tmp_path), *without]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1  # for read -ra
    assert ("--dsa-stage warmup adds them" in printed.err) == (name == "v3")
    assert "this package does not build" not in printed.err
    assert ("--hc-mult 3 --hc-eps 1e-06 " in printed.out) == (name == "v4")
    asks = "--dsa-indexer-loss-coeff is yours to add" in printed.err
    assert asks == (stage == "sparse")

    own = [*RUN.split(), *(["--dsa-indexer-loss-coeff", "0"] if asks else [])]
    args = parsed([*printed.out.split(), *own], 1, monkeypatch)
    described = model_config_from_args(args)
    assert described.vocab_size == 70 and not described.share_embeddings_and_output_weights
    described.transformer.perform_initialization = False
    model = gpt_model(described.transformer, 70, 64).eval()
    report = import_model(model, tmp_path)
    assert not report.fresh and not report.rounded
    assert relative_error(logits_of(model, tokens()), logits_of(expected, tokens())) < 1e-6


def test_what_flags_cannot_say_is_noted(tmp_path, capsys):
    path = tmp_path / "config.json"
    config = tiny_config("glm_moe_dsa", rope_theta=10000.5, index_share_for_mtp_iteration=True)
    path.write_text(json.dumps(config))
    assert main(["flags", str(path)]) == 0
    notes = capsys.readouterr().err
    assert "rope_theta = 10000.5: --rotary-base takes whole numbers" in notes
    assert "index_share_for_mtp_iteration has no counterpart" in notes


def test_released_shape_in_full():
    from megatron_dsa.extras.huggingface.config_json import parse_config

    config = tiny_v4(
        num_hidden_layers=43, num_nextn_predict_layers=1, hidden_size=4096, head_dim=512,
        qk_rope_head_dim=64, compress_ratios=[0, 0, 4] + [128, 4] * 20 + [0], swiglu_limit=10.0,
        compress_rope_theta=160000,
    )  # fmt: skip
    flags = " ".join(flags_of(parse_config(config), ["hyper-connections"]))
    ratios = "0 0 4 " + "128 4 " * 20 + "0"
    for part in (
        *(
            "--num-layers 43",
            "--qk-head-dim 448 ",
            "--v-head-dim 512 ",
            "--moe-layer-freq ([1]*43)",
        ),
        *(f"--csa-compress-ratios {ratios} --", "--csa-compress-rotary-base 160000 "),
        *("--activation-func-clamp-value 10 ", "--no-bias-swiglu-fusion ", "--mtp-num-layers 1 "),
        *("--moe-router-score-function sqrtsoftplus ", "--dsa-indexer-rope-interleaved "),
    ):
        assert part in flags, part
    whole = parse_config(config | {"num_hash_layers": 3})
    flags = " ".join(flags_of(whole))
    assert "--hc-mult 3 " in flags and f"{HASH_FLAG} 3" in flags
    assert "--mtp-num-layers" in flags
