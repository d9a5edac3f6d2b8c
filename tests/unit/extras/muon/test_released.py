"""``info --muon``: a released model's parameters by optimizer."""

import pytest

from megatron_dsa.config.presets import PRESETS
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import build_parser
from tests import host

ATTENTION = "decoder.layers.*.self_attention."


@pytest.fixture(autouse=True)
def no_groups():
    """The command makes its own process groups."""
    host.stop()


def shown(capsys, *arguments):
    parsed = build_parser().parse_args(["info", "--muon", *arguments])
    assert parsed.run(parsed) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("v4-flash", "linear_o_group_proj.weight [8192, 4096] 43 8 blocks of 1024 rows"),
        ("v4-pro", "linear_o_group_proj.weight [16384, 4096] 61 16 blocks of 1024 rows"),
        ("v3.2", "linear_kv_up_proj.weight [32768, 512] 61 one matrix"),
        ("glm-5", "linear_q_up_proj.weight [16384, 2048] 78 one matrix"),
        ("glm-5.3-flash", "linear_q_up_proj.weight [16384, 1536] 11 one matrix"),
    ],
)
def test_released_models(model, rows, capsys):
    lines = shown(capsys, model)
    assert f"Muon {ATTENTION}{rows}" in lines
    assert lines[1].startswith("AdamW") and "input_layernorm" in lines[1]
    v4 = "v4" in model
    assert any(line.startswith("AdamW") and ".ape " in line for line in lines) == v4
    assert ("attn_sink" in lines[1]) == v4
    assert any("hc_attn_fn" in line for line in lines) == (v4 or model == "glm-5.3-flash")
    assert not any(".mlp." in line or "output_layer.weight" in line for line in lines)


def test_heads(capsys):
    lines = shown(capsys, "v3.2", "--muon-per-head", "attention")
    query = "linear_q_up_proj.weight [24576, 1536] 61 128 blocks of 192 rows"
    assert f"Muon {ATTENTION}{query}" in lines
    lines = shown(capsys, "glm-5", "--muon-per-head", "all")
    up = "linear_kv_up_proj.weight [28672, 512] 78 128 blocks of 192 and 256 rows"
    assert f"Muon {ATTENTION}{up}" in lines
    query = "core_attention.indexer.linear_wq_b.weight [4096, 2048] 78 32 blocks of 128 rows"
    assert f"Muon {ATTENTION}{query}" in lines


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(
        ConfigError, match=r"--muon v5 must be a released model; available: .*glm-5"
    ):
        shown(capsys, "v5")
    assert len(PRESETS) == 5
