"""FP8 in real layers: products of linears, and weights under --fp8-param-gather."""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.versions import why_not_transformer_engine
from tests.host import small_config, small_csa_config, start

WHY_NOT = why_not_transformer_engine(torch.cuda.is_available())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]
RECIPES = ["tensorwise", "delayed", "blockwise"]
#: Multiples of 16, required by FP8 products.
SIZES = {
    "dtype": torch.bfloat16, "bf16": True, "transformer_impl": "transformer_engine",
    "hidden_size": 128, "ffn_hidden_size": 256, "q_lora_rank": 128, "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16, "dsa_indexer_n_heads": 8, "dsa_indexer_head_dim": 32,
    "normalization": "RMSNorm", "fp8": "hybrid",
}  # fmt: skip
INDEXER = ("linear_wq_b", "linear_wk", "linear_weights_proj")


def dsa(**changes):
    return small_config(**SIZES, kv_lora_rank=128, v_head_dim=32, **changes)


def csa(**changes):
    return small_csa_config(4, **SIZES, kv_lora_rank=32, v_head_dim=48, o_lora_rank=32, **changes)


def built(config):
    """Return a layer's self-attention built by Megatron, with random weights."""
    device = start()
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.transformer.spec_utils import build_module

    from megatron_dsa.specs import dsa_layer_spec

    spec = dsa_layer_spec(config).submodules.self_attention
    with get_fp8_context(config, is_init=True):
        module = build_module(spec, config=config, layer_number=1)
    return module.to(device)


def quantised(module):
    """Run four steps; return the quantised products and weights of linears.

    With delayed scaling the first steps find the scales, from the output on.
    """
    from megatron.core.fp8_utils import get_fp8_context, is_float8tensor
    from transformer_engine.pytorch import Linear

    config = module.config
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 1, config.hidden_size, generator=generator).to(start(), torch.bfloat16)
    for _ in range(4):
        module.zero_grad()
        with get_fp8_context(config):
            out, _ = module(x.requires_grad_(), None)
        out.float().square().sum().backward()
    linears = {n: each for n, each in module.named_modules() if isinstance(each, Linear)}
    products = {name.split(".")[-1] for name, each in linears.items() if each.fp8}
    weights = {n.split(".")[-1] for n, each in linears.items() if is_float8tensor(each.weight)}
    return products, weights


@pytest.mark.parametrize("fp8_indexer", [False, True])
@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("config", [dsa, csa])
def test_what_is_quantised(config, recipe, parameters, fp8_indexer):
    options = DSAOptions(fp8_indexer=fp8_indexer)
    module = built(config(fp8_recipe=recipe, fp8_param=parameters, options=options))
    products, weights = quantised(module)
    expected = {"linear_q_down_proj", "linear_q_up_proj", "linear_proj"}
    expected |= {"linear_kv_down_proj"} if config is dsa else {"linear_kv_proj"}
    if fp8_indexer:
        expected |= {name for name in INDEXER if hasattr(module.core_attention.indexer, name)}
    assert products == expected
    assert weights == (expected if parameters else set())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantised_weight_is_read_in_bf16(recipe):
    """A second read must give the same values: nothing is converted back."""
    config = dsa(fp8_recipe=recipe, fp8_param=True)
    start()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.fp8_utils import get_fp8_context, is_float8tensor

    from megatron_dsa.layers.linears import weight_of

    with get_fp8_context(config, is_init=True):
        linear = TEColumnParallelLinear(
            128, 256, config=config, init_method=config.init_method, gather_output=False,
            bias=False, skip_bias_add=False, is_expert=False,
        )  # fmt: skip
    assert is_float8tensor(linear.weight)
    weight = weight_of(linear)
    assert type(weight) is torch.Tensor and weight.dtype == torch.bfloat16
    assert weight.equal(weight_of(linear)) and weight.norm() > 0
    factor = torch.randn_like(weight)
    (weight.view(4, -1, 128).float() * factor.view(4, -1, 128)).sum().backward()
    assert linear.weight.grad.equal(factor)
