"""export-hf compares config.json with the arguments of the training that wrote the checkpoint."""

import copy

import pytest

from megatron_dsa.errors import ConfigError
from megatron_dsa.huggingface.config_json import parse_config
from megatron_dsa.huggingface.flags import flags_of
from tests.host import parsed
from tests.tiny_models import tiny_config, tiny_v4

YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
#: How it was trained, which is not compared.
RUN = (
    "--micro-batch-size 1 --seq-length 24 --train-iters 1 --lr 1e-4 --lr-decay-style constant "
    "--dsa-indexer-loss-coeff 0.5 --bf16 --tensor-model-parallel-size 2 --sequence-parallel "
    "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --use-distributed-optimizer"
)

#: Values that no shape shows: key -> another value.
EVERY = {"rms_norm_eps": 1e-3, "num_experts_per_tok": 2, "routed_scaling_factor": 1.25}
INDEXER = {"index_topk": 3, "rope_theta": 777.0}
MODELS = {
    "v3": (
        tiny_config("deepseek_v3", n_group=1, topk_group=1),
        EVERY | {"rope_theta": 777.0, "rope_scaling": YARN},
    ),
    "v3.2": (
        tiny_config(rope_scaling=YARN),
        EVERY | INDEXER | {"model_type": "glm_moe_dsa", "rope_scaling": None, "n_group": 1}
        | {f"rope_scaling.{key}": x for key, x in [("factor", 8.0), ("beta_fast", 20)]}
        | {"rope_scaling.original_max_position_embeddings": 8, "rope_scaling.mscale_all_dim": 1.0},
    ),
    "glm-5": (
        tiny_config(
            "glm_moe_dsa", num_hidden_layers=4, index_topk_freq=2, index_skip_topk_offset=2,
            n_group=1, topk_group=1,
        ),
        EVERY | INDEXER | {"model_type": "deepseek_v32", "index_skip_topk_offset": 1}
        | {"indexer_rope_interleave": False},
    ),
    "v4": (
        tiny_v4(),
        EVERY | INDEXER | {"compress_rope_theta": 777.0, "sliding_window": 4, "hc_eps": 1e-3}
        | {"hc_sinkhorn_iters": 3, "swiglu_limit": 0.25, "scoring_func": "sigmoid"}
        | {"compress_ratios": [0, 4, 16, 4], "rope_scaling.factor": 8},
    ),
}  # fmt: skip


def changed(config, key, value):
    config = copy.deepcopy(config)
    place = config
    *outer, name = key.split(".")
    for part in outer:
        place = place[part]
    place[name] = value
    if (key, value) in (("n_group", 1), ("num_experts_per_tok", 2)):
        config["topk_group"] = 1
    return config


@pytest.mark.parametrize("name", MODELS)
def test_another_value_is_refused(name, tmp_path, monkeypatch, capsys):
    from megatron_dsa.tools.export_checks import check_arguments

    config, changes = MODELS[name]
    flags = flags_of(parse_config(config), ["hash-routing"] if name == "v4" else [])
    saved = parsed([*flags, *RUN.split()], 4, monkeypatch)
    check_arguments(parse_config(config), saved, tmp_path)
    assert capsys.readouterr().err == ""
    for key, value in changes.items():
        other = parse_config(changed(config, key, value))
        with pytest.raises(ConfigError, match=r"(?s)not of the model .* by config.json"):
            check_arguments(other, saved, tmp_path)
            pytest.fail(key)


def test_rows_and_lengths_are_noted_or_refused(tmp_path, monkeypatch, capsys):
    """A tokenizer of 60 tokens; 10 rows more are padding, of which a config.json may have some."""
    from megatron_dsa.tools.export_checks import check_arguments

    flags = [*flags_of(parse_config(tiny_config())), *RUN.split(), "--vocab-size", "60"]
    saved = parsed(flags, 4, monkeypatch)
    check_arguments(parse_config(tiny_config(vocab_size=64)), saved, tmp_path)
    assert "the last 6 of 70 rows of the vocabulary are left out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"--vocab-size is 60 in the model, 59 by config.json"):
        check_arguments(parse_config(tiny_config(vocab_size=59)), saved, tmp_path)
    longer = tiny_config(max_position_embeddings=128)
    check_arguments(parse_config(longer), saved, tmp_path)
    assert "with --max-position-embeddings 64 and --seq-length 24" in capsys.readouterr().err
    check_arguments(parse_config(longer), None, tmp_path)
    assert "holds no arguments of a training" in capsys.readouterr().err
