"""Hybrid attention on a GPU in bf16: fused against float64, synchronisation, implementations."""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.ops.dispatch import report, reset_report
from tests.helpers import deterministic, relative_error
from tests.host import attention_module, packed, small_csa_config, start

pytestmark = pytest.mark.gpu

ROWS = 700
V4 = {
    "hidden_size": 256, "num_attention_heads": 64, "q_lora_rank": 128, "qk_head_dim": 448,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 512, "o_groups": 8, "o_lora_rank": 32,
    "csa_window_size": 128, "dsa_indexer_n_heads": 16, "dsa_indexer_head_dim": 128,
}  # fmt: skip


def run(config, params, rows=ROWS, weights=None):
    """Run forward and backward with fixed inputs; return output and gradients by name."""
    module = attention_module(config).train()
    if weights is not None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(weights[name])
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 1, config.hidden_size, generator=generator, dtype=torch.float64)
    grad = torch.randn(rows, 1, config.hidden_size, generator=generator, dtype=torch.float64)
    x = x.bfloat16().to(start(), config.params_dtype).requires_grad_()
    out, _ = module(x, None, packed_seq_params=params)
    out.backward(grad.bfloat16().to(out))
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return module, {"out": out, "x": x.grad} | gradients


@pytest.mark.parametrize("recompute", ["nothing", "queries"])
@pytest.mark.parametrize("lengths", [None, [3, 300, 0, 129, 268]])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_fused_equals_float64(ratio, lengths, recompute):
    """All keys are selected, so rounded scores cannot change the selection."""
    params = None if lengths is None else packed(*lengths)
    settings = V4 | {"dsa_indexer_topk": 256}
    reset_report()
    options = DSAOptions(recompute=recompute)
    config = small_csa_config(ratio, dtype=torch.bfloat16, options=options, **settings)
    module, fused = run(config, params)
    ran = report()
    for operation in ("norm_rope", "rotate", "key_lists") + ("compressor",) * bool(ratio):
        assert set(ran[operation]) == {"triton"}, operation
    for operation in ("sparse_attention_forward", "sparse_attention_backward"):
        assert set(ran[operation]) <= {"flashmla", "cudnn", "tilelang"}, operation
    weights = {name: p.detach().double() for name, p in module.named_parameters()}
    _, exact = run(
        small_csa_config(ratio, options=DSAOptions(fused=False), **settings), params,
        weights=weights,
    )  # fmt: skip
    for name, expected in exact.items():
        if expected is not None and expected.norm() > 0:
            # Gradients of the indexer are differences of probabilities, with more rounding.
            tolerance = 6e-2 if ".indexer." in name else 2e-2
            assert relative_error(fused[name], expected) < tolerance, name


@pytest.mark.parametrize("recompute", ["nothing", "queries"])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_no_host_synchronisation(ratio, recompute):
    options = DSAOptions(recompute=recompute)
    settings = V4 | {"dsa_indexer_topk": 64}
    config = small_csa_config(ratio, dtype=torch.bfloat16, options=options, **settings)
    module = attention_module(config).train()
    x = torch.randn(ROWS, 1, 256, device=start(), dtype=torch.bfloat16, requires_grad=True)
    for lengths in (None, [3, 300, 0, 129, 268]):
        module(x, None, packed_seq_params=lengths and packed(*lengths))[0].sum().backward()
        params = lengths and packed(*lengths)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(x, None, packed_seq_params=params)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ratio", [4, 128])
def test_queries_computed_again_repeat_to_the_bit(ratio):
    settings = V4 | {"dsa_indexer_topk": 64}
    options = DSAOptions(recompute="queries")
    config = small_csa_config(ratio, dtype=torch.bfloat16, options=options, **settings)
    with deterministic():
        first, again = (run(config, None)[1] for _ in range(2))
    for name, expected in first.items():
        assert expected is None or torch.equal(again[name], expected), name
