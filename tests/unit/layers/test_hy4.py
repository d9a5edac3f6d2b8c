"""Attention of Hy4 (a sink per head, an output gate) against transformers' own module, in fp32."""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.ops.dispatch import report, reset_report
from tests.cases.against_float64 import compare, hidden_states
from tests.helpers import relative_error
from tests.host import attention_module, packed, small_config, v32_config
from tests.reference.dsa_float64 import attention_layer
from tests.reference.shapes import dsa_shape

modeling = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")

#: Name in our layer -> in transformers'.
NAMES = {
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_gate.weight": "gate_proj.weight",
    "linear_proj.weight": "o_proj.weight",
    "core_attention.attn_sink": "sinks",
    "core_attention.indexer.linear_wq_b.weight": "indexer.wq_b.weight",
    "core_attention.indexer.linear_wk.weight": "indexer.wk.weight",
    "core_attention.indexer.k_norm.weight": "indexer.k_norm.weight",
    "core_attention.indexer.k_norm.bias": "indexer.k_norm.bias",
    "core_attention.indexer.linear_weights_proj.weight": "indexer.weights_proj.weight",
}


def in_their_order(name, x, config):
    """Reorder dims with rope: Hy4 rotates halves, and the indexer's last dims."""
    rope, index_dim = config.qk_pos_emb_head_dim, config.dsa_indexer_head_dim
    halves = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
    if "linear_wq_b" in name or "linear_wk" in name or "k_norm" in name:
        return x.unflatten(0, (-1, index_dim)).roll(-rope, 1).flatten(0, 1)
    if "linear_q_up_proj" in name:
        plain, rotated = x.unflatten(0, (config.num_attention_heads, -1)).tensor_split([-rope], 1)
        return torch.cat([plain, rotated[:, halves]], 1).flatten(0, 1)
    if "linear_kv_down_proj" in name:
        plain, rotated = x.tensor_split([-rope])
        return torch.cat([plain, rotated[halves]])
    return x


def peer_of(module, config):
    """transformers' layer with the weights of ours, and its rope."""
    settings = modeling.HYV4Config(
        hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
        num_hidden_layers=1, q_lora_rank=config.q_lora_rank, kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_head_dim, qk_rope_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim, index_topk=config.dsa_indexer_topk,
        index_head_dim=config.dsa_indexer_head_dim, index_n_heads=config.dsa_indexer_n_heads,
        rope_parameters={"rope_type": "default", "rope_theta": float(config.rotary_base)},
        attn_implementation="eager",
    )  # fmt: skip
    peer = modeling.HYV4Attention(settings, 0)
    own = dict(module.named_parameters())
    assert set(NAMES) == set(own)
    assert set(NAMES.values()) == {name for name, _ in peer.named_parameters()}
    with torch.no_grad():
        for name, theirs in NAMES.items():
            peer.get_parameter(theirs).copy_(in_their_order(name, own[name], config))
    return peer, modeling.HYV4RotaryEmbedding(settings)


def run(peer, rope, x):
    """Output of one document ``[tokens, 1, hidden]``."""
    tokens = len(x)
    hidden = x.transpose(0, 1)
    mask = torch.full((tokens, tokens), torch.finfo(x.dtype).min).triu(1)[None, None]
    positions = torch.arange(tokens)[None]
    return peer(hidden, rope(hidden, positions), mask)[0].transpose(0, 1)


@pytest.mark.parametrize("attention", ["sparse", "masked"])
@pytest.mark.parametrize("lengths", [[50], [3, 21, 1, 40, 2]], ids=["one", "packed"])
def test_layer(lengths, attention):
    options = DSAOptions(
        output_gate=True, latent_norm_epsilon=1e-6, selected_attention=attention,
    )  # fmt: skip
    config = small_config(
        options=options, dtype=torch.float32, softmax_type="learnable", normalization="RMSNorm",
        layernorm_epsilon=1e-5, dsa_indexer_loss_coeff=0.0,
        dsa_indexer_n_heads=16,  # few keys tie at a score of 0
    )  # fmt: skip
    module = attention_module(config).train()
    peer, rope = peer_of(module, config)
    x = hidden_states(config, sum(lengths))
    out, _ = module(x, None, packed_seq_params=packed(*lengths) if len(lengths) > 1 else None)
    theirs = x.detach().requires_grad_()
    expected = torch.cat([run(peer, rope, part) for part in theirs.split(lengths)])
    assert relative_error(out, expected) < 1e-5
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad)
    assert relative_error(x.grad, theirs.grad) < 1e-4
    for name, parameter in module.named_parameters():
        if "indexer" not in name:
            gradient = peer.get_parameter(NAMES[name]).grad
            found = in_their_order(name, parameter.grad, config)
            assert gradient.norm() > 0
            assert relative_error(found, gradient) < 1e-4, name


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("attention", ["sparse", "masked"])
def test_kernels(attention, heads):
    """Fused in bf16, all visible keys selected, against float64."""
    tokens = 512
    options = DSAOptions(output_gate=True, selected_attention=attention, sequence_length=tokens)
    config = v32_config(
        options, heads, softmax_type="learnable", dsa_indexer_topk=tokens,
        dsa_indexer_loss_coeff=0.0,
    )  # fmt: skip

    def reference(weights, x):
        return attention_layer(weights, x, dsa_shape(config), mode="sparse")

    reset_report()
    module, _ = compare(config, reference, 2e-2, loss=None, tokens=tokens, unused=True)
    assert module.core_attention.attn_sink.grad.norm() > 0
    ran = report()
    for step in ("forward", "backward"):
        assert "torch" not in ran[f"{attention}_attention_{step}"]
