"""Attention of GLM-5.3 against transformers' module, in fp64: outputs and gradients.

Its softmax and norms are fp32, which sets the tolerance; another selection changes 0.1.
"""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from tests.cases.against_float64 import hidden_states
from tests.helpers import relative_error
from tests.host import attention_module, packed, small_config

modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")

TOLERANCE = 2e-6
#: Name in our layer -> in transformers'.
NAMES = {
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
    "core_attention.indexer.linear_wq_b.weight": "indexer.wq_b.weight",
    "core_attention.indexer.linear_wk.weight": "indexer.wk.weight",
    "core_attention.indexer.k_norm.weight": "indexer.k_norm.weight",
    "core_attention.indexer.k_norm.bias": "indexer.k_norm.bias",
    "core_attention.indexer.linear_weights_proj.weight": "indexer.weights_proj.weight",
    "core_attention.indexer.linear_pool_gate.weight": "indexer.index_kpool_compress_gate",
    "core_attention.indexer.pool_ape": "indexer.index_kpool_compress_ape",
}


def peer_of(module, config):
    """Return transformers' layer with our weights."""
    settings = modeling.Glm5NextTextConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads, num_hidden_layers=1,
        q_lora_rank=config.q_lora_rank, kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_head_dim, qk_rope_head_dim=0, v_head_dim=config.v_head_dim,
        index_topk=config.dsa_indexer_topk, index_head_dim=config.dsa_indexer_head_dim,
        index_n_heads=config.dsa_indexer_n_heads, index_kpool=4, rms_norm_eps=1e-5,
        layer_types=["indexed_attention"], indexer_types=["full"], mlp_layer_types=["dense"],
        attn_implementation="eager",
    )  # fmt: skip
    peer = modeling.Glm5NextTextAttention(settings, 0).double()
    own = dict(module.named_parameters())
    assert set(NAMES) == set(own)
    with torch.no_grad():
        for name, theirs in NAMES.items():
            peer.get_parameter(theirs).copy_(own[name])
    return peer


@pytest.mark.parametrize("attention", ["sparse", "masked"])
@pytest.mark.parametrize("lengths", [[50], [3, 21, 1, 40, 2]], ids=["one", "packed"])
def test_layer(lengths, attention):
    options = DSAOptions(indexer_pool_size=4, selected_attention=attention)
    config = small_config(
        options=options, qk_pos_emb_head_dim=0, dsa_indexer_rotate_activation=False,
        dsa_indexer_k_norm_epsilon=1e-6, normalization="RMSNorm", layernorm_epsilon=1e-5,
        dsa_indexer_loss_coeff=0.0, dsa_indexer_n_heads=32,  # few pools tie at a score of 0
    )  # fmt: skip
    module = attention_module(config).train()
    with torch.no_grad():
        module.core_attention.indexer.pool_ape.normal_()
    peer = peer_of(module, config)
    x = hidden_states(config, sum(lengths))
    out, _ = module(x, None, packed_seq_params=packed(*lengths) if len(lengths) > 1 else None)
    theirs = x.detach().requires_grad_()
    outs = []
    for part in theirs.split(lengths):
        mask = torch.ones(1, len(part), dtype=torch.bool)
        outs.append(peer(part.transpose(0, 1), mask)[0].transpose(0, 1))
    expected = torch.cat(outs)
    assert relative_error(out, expected) < TOLERANCE
    grad = torch.randn(out.shape, dtype=out.dtype)
    out.backward(grad)
    expected.backward(grad)
    assert relative_error(x.grad, theirs.grad) < TOLERANCE
    for name, parameter in module.named_parameters():
        if "indexer" not in name:
            gradient = peer.get_parameter(NAMES[name]).grad
            assert relative_error(parameter.grad, gradient) < TOLERANCE, name
