"""Which dtypes and scales make a quantised weight."""

import pytest

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.config_json import parse_config
from megatron_dsa.extras.huggingface.quantised import Format, Quantisation
from tests.tiny_models import tiny_config


def test_packed_weights_are_those_of_fp4_experts():
    expert, scale = "layers.1.ffn.experts.3.w2.weight", "layers.1.ffn.experts.3.w2.scale"
    fp4 = Quantisation(fp4_experts=True)
    assert fp4.format(expert, "I8", scale) is Format.FP4
    assert fp4.scale_block(expert, Format.FP4, (20, 64), (20, 2), "F8_E8M0") == (1, 32)
    for quantisation, name in ((Quantisation(), expert), (fp4, "layers.1.attn.wq_a.weight")):
        with pytest.raises(ConfigError, match=r'where config\.json says "expert_dtype": "fp4"'):
            quantisation.format(name, "I8", scale)
    with pytest.raises(ConfigError, match=r"scales of shape \(20, 3\) .* need \(20, 4\)"):
        fp4.scale_block(expert, Format.FP4, (20, 64), (20, 3), "F8_E8M0")
    for at_top in (True, False):
        quantised = {"quant_method": "fp8", "weight_block_size": [8, 8]}
        config = tiny_config(quantization_config=quantised)
        assert not parse_config(config).quantisation.fp4_experts
        (config if at_top else quantised)["expert_dtype"] = "fp4"
        assert parse_config(config).quantisation.fp4_experts
