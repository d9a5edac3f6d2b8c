"""Counts of layers and experts, and non-finite values in a checkpoint."""

import math

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.checks import NonFinite, check_inventory, left_by_rank
from megatron_dsa.extras.huggingface.config_json import parse_config
from megatron_dsa.extras.huggingface.names import V3, V4
from tests.tiny_models import tiny_config, tiny_v4


def test_kinds_of_layers_are_not_mixed_up(checkpoint):
    locations = [V3.locate(name, 2) for name in checkpoint.tensors]

    def check(layers, prediction):
        counts = {"num_hidden_layers": layers, "num_nextn_predict_layers": prediction}
        check_inventory("here", locations, parse_config(tiny_config(**counts)))

    check(2, 1)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.\S+ belongs to multi-token"):
        check(3, 0)
    with pytest.raises(ConfigError, match=r"layer model\.layers\.1 has no tensors of multi-token"):
        check(1, 2)


def test_layers_of_v4_are_counted_by_kind():
    hf = parse_config(tiny_v4(num_nextn_predict_layers=1))
    known = ["embed.weight", "layers.3.attn.wkv.weight", "mtp.0.enorm.weight"]
    check_inventory("here", [V4.locate(name, 4) for name in known], hf)
    for name in ("layers.4.attn.wkv.weight", "mtp.1.enorm.weight"):
        layer = name.rsplit(".", 3 if "attn" in name else 2)[0]
        with pytest.raises(ConfigError, match=rf"1 tensors are of layers .* \({layer}\)"):
            check_inventory("here", [V4.locate(x, 4) for x in (*known, name)], hf)


def test_ranks_read_all_of_their_own_layers():
    used = [
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    others = [
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "lm_head.weight",
    ]
    own = [
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.experts.4.down_proj.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",  # a dense layer here
    ]

    def located(names):
        return [V3.locate(name, 4) for name in names]

    assert [x.name for x in left_by_rank(located(others + own), located(used))] == own


def test_values_that_a_dtype_does_not_hold_are_named():
    found = NonFinite("checkpoint here", "choose another")
    found.count("fits", torch.tensor([65504.0, -1e-30]), torch.float16)
    found.count("none", torch.ones(0, 4), torch.float16)
    found.check()
    found.count("large", torch.tensor([1e5, math.nan, 1.0]), torch.float16)
    with pytest.raises(ConfigError, match=r"large: 1 NaN, 1 too large for float16 of 3 values"):
        found.check()
    for number in range(30):
        found.count(f"x{number}", torch.tensor([math.inf]), torch.float32)
    with pytest.raises(ConfigError, match="31 tensors") as error:
        found.check()
    assert "x18:" in str(error.value) and "x19:" not in str(error.value)
    assert "and 11 more tensors" in str(error.value)
