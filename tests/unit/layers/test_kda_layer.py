"""KDA layers against transformers' own module and the naive layer: outputs and all gradients."""

import pytest
import torch

from tests.cases.calls import of_any_batch, recorded_calls
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, packed, small_config

#: transformers computes in fp32.
TOLERANCE = 2e-5
FIELDS = {
    "linear_attention_freq": [1, 0], "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "normalization": "RMSNorm", "layernorm_epsilon": 1e-5,
}  # fmt: skip
_GATE = "forget_gate."
#: Name in our layer -> in transformers'.
NAMES = {
    **{f"linear_{name}_proj.weight": f"{name}_proj.weight" for name in ("q", "k", "v", "b")},
    **{f"linear_{name}_proj.weight": f"{name}_proj.weight" for name in ("g_a", "g_b")},
    **{f"linear_{name}_proj.weight": f"{_GATE}{name}_proj.weight" for name in ("f_a", "f_b")},
    "A_log": f"{_GATE}A_log",
    "dt_bias": f"{_GATE}dt_bias",
    "o_norm.weight": "o_norm.weight",
    "linear_proj.weight": "o_proj.weight",
}
CONVOLUTIONS = tuple(f"{name}_conv1d.weight" for name in "qkv")


def peer_of(module):
    """transformers' layer with the weights of ours; one convolution for queries, keys, values."""
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    settings = modeling.Glm5NextTextConfig(
        hidden_size=module.config.hidden_size, linear_head_dim=8, linear_num_heads=4,
        linear_conv_kernel_dim=4, linear_lower_bound=-5.0, num_hidden_layers=4, rms_norm_eps=1e-5,
    )  # fmt: skip
    peer = modeling.Glm5NextTextLinearAttention(settings, 0)
    own = dict(module.named_parameters())
    assert set(own) == {*NAMES, *CONVOLUTIONS}
    with torch.no_grad():
        for name, theirs in NAMES.items():
            peer.get_parameter(theirs).copy_(own[name])
        peer.conv1d.weight.copy_(torch.cat([own[name] for name in CONVOLUTIONS]))
    return peer


@pytest.mark.parametrize(
    ("batch", "lengths", "padded"),
    [
        (2, [70], None),
        (1, [33, 1, 2, 3, 40], None),
        (1, [30, 3, 0, 40, 10], [32, 8, 0, 40, 16]),
    ],
    ids=["batch", "packed", "padded"],
)
def test_against_transformers(batch, lengths, padded):
    """Documents by themselves there, packed here; padding gets no gradient of documents."""
    module = attention_module(small_config(dtype=torch.float32, **FIELDS)).train()
    peer, params = peer_of(module), None
    ends = torch.tensor([0, *(padded or lengths)]).cumsum(0).tolist()
    if batch == 1:
        params = packed(*lengths, padded_lengths=padded)
    x = hidden_like(module, ends[-1], batch)
    out, _ = module(x, None, packed_seq_params=params)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(12)).to(out.device)
    theirs = x.detach().cpu().requires_grad_()
    parts = [slice(begin, begin + length) for begin, length in zip(ends, lengths, strict=False)]
    objective = 0.0
    for part in parts:
        if part.stop > part.start:
            expected = peer(theirs[part].transpose(0, 1)).transpose(0, 1)
            assert relative_error(out[part], expected) < TOLERANCE
            objective = objective + (expected * grad.cpu()[part]).sum()
    objective.backward()
    sum((out[part] * grad[part]).sum() for part in parts).backward()

    assert relative_error(x.grad, theirs.grad) < TOLERANCE
    own = {name: p.grad for name, p in module.named_parameters()}
    for name, of_peer in NAMES.items():
        assert relative_error(own[name], peer.get_parameter(of_peer).grad) < TOLERANCE, name
    convolution = torch.cat([own[name] for name in CONVOLUTIONS])
    assert relative_error(convolution, peer.conv1d.weight.grad) < TOLERANCE


@pytest.mark.parametrize("modules", [["core_attn"], ["core_attn", "mla_up_proj"]])
def test_recompute_changes_no_bit(modules):
    """A layer that runs its convolutions, gates and states again in the backward."""
    settings = {"recompute_granularity": "selective", "recompute_modules": modules}
    plain, recomputed = (
        attention_module(small_config(dtype=torch.float32, **FIELDS | more)).train()
        for more in ({}, settings)
    )
    results = []
    for module in (plain, recomputed):
        x = hidden_like(module, 70)
        with recorded_calls() as calls:
            module(x, None)[0].square().sum().backward()
        results.append([x.grad, *(p.grad for p in module.parameters())])
        assert len(calls) == 5 * (1 + (module is recomputed))
    for one, other in zip(*results, strict=True):
        assert one.equal(other)


def test_what_runs_is_what_is_declared():
    from megatron_dsa.layers.required_ops import called_ops

    module = attention_module(small_config(dtype=torch.float32, **FIELDS))
    with recorded_calls() as calls:
        module(hidden_like(module, 70), None)
    declared = called_ops(module.required_ops(), module.policy)
    assert of_any_batch(calls) == of_any_batch(declared)


def test_a_cast_keeps_gates_and_convolutions():
    """Megatron casts whole models to bf16."""
    module = attention_module(small_config(dtype=torch.bfloat16, **FIELDS)).bfloat16()
    wide = {name for name, p in module.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", *CONVOLUTIONS}
    out, _ = module(hidden_like(module, 40), None)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def test_new_weights():
    """Rates of 1, and time steps between 0.001 and 0.1."""
    from megatron.core.transformer.spec_utils import build_module

    from megatron_dsa.specs import dsa_layer_spec

    config = small_config(dtype=torch.float32, **FIELDS)
    spec = dsa_layer_spec(config, kda=True).submodules.self_attention
    module = build_module(spec, config=config, layer_number=1)
    steps = torch.nn.functional.softplus(module.dt_bias)
    assert module.A_log.abs().max() == 0 and module.o_norm.weight.eq(1).all()
    assert 1e-3 * 0.999 <= steps.min() < 2e-3 and 5e-2 < steps.max() <= 0.1 * 1.001
    assert 0.01 < module.q_conv1d.weight.std() < 0.03
