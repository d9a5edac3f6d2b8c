"""The attention module against an independent float64 reference: outputs, loss, all gradients.

The reference (``tests/reference``) does not absorb weights. Megatron's rope angles are fp32, which
sets the tolerance.
"""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.dispatch import report, reset_report
from tests.cases import against_float64
from tests.cases.against_float64 import hidden_states
from tests.cases.layers import in_small_blocks
from tests.helpers import relative_error
from tests.host import attention_module, packed, small_config, start
from tests.reference import dsa_float64
from tests.reference.shapes import dsa_shape

TOLERANCE = 3e-6
SEQUENCE = 64  # more than 4 x topk: with all keys selected, rope mistakes in the indexer are hidden

YARN = {
    "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 8.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip


def compare(config, *, mode, loss, batch=1, seq_lengths=None, rows=SEQUENCE):
    def reference(weights, x):
        return dsa_float64.attention_layer(
            weights, x, dsa_shape(config), mode=mode, loss=loss, seq_lengths=seq_lengths
        )

    return against_float64.compare(
        config, reference, TOLERANCE, loss=loss, tokens=rows, batch=batch, lengths=seq_lengths
    )


#: GLM-5.3: no rope, and one index key for four tokens.
POOLED = {"qk_pos_emb_head_dim": 0, "dsa_indexer_rotate_activation": False}


def pooled(**options):
    return POOLED | {"options": DSAOptions(indexer_pool_size=4, **options)}


#: Hy4: a sink per head and an output gate.
HY4 = {"softmax_type": "learnable", "options": DSAOptions(output_gate=True)}
CASES = {
    "plain": {},
    "no rope": {"qk_pos_emb_head_dim": 0},
    "pooled": pooled(),
    "pooled, dense loss": pooled() | {"dsa_indexer_use_sparse_loss": False},
    "pooled, in blocks": POOLED | {"options": in_small_blocks(DSAOptions(indexer_pool_size=4))},
    "yarn": YARN,
    "interleaved": {"dsa_indexer_rope_interleaved": True},
    "no relu": {"dsa_indexer_scoring_relu": False},
    "no hadamard": {"dsa_indexer_rotate_activation": False},
    "k norm epsilon": {"dsa_indexer_k_norm_epsilon": 0.1, "dsa_indexer_k_norm_fp32": False},
    "dense loss": {"dsa_indexer_use_sparse_loss": False},
    "in blocks": {"options": in_small_blocks(DSAOptions())},
    "in blocks, recomputed": {
        "options": in_small_blocks(DSAOptions(recompute="latent_output")),
    },
    "in blocks, recomputed by Megatron": {
        "options": in_small_blocks(DSAOptions(recompute="latent_output")),
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mla_up_proj"],
    },
    "no query latent": {"q_lora_rank": None, "qk_layernorm": False},
    "sink and gate": HY4,
    "sink and gate, in blocks, recomputed": HY4
    | {"options": in_small_blocks(DSAOptions(output_gate=True, recompute="latent_output"))},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 2])
def test_sparse_stage(case, batch):
    config = small_config(**CASES[case])
    loss = "sparse" if config.dsa_indexer_use_sparse_loss else "dense"
    reset_report()
    compare(config, mode="sparse", loss=loss, batch=batch)
    assert (report()["sparse_attention_backward"]["torch"] > 5) == ("blocks" in case)


def test_sink_and_gate_by_a_bit_mask():
    options = DSAOptions(output_gate=True, selected_attention="masked")
    compare(small_config(**HY4 | {"options": options}), mode="sparse", loss="sparse")


@pytest.mark.parametrize("stage", ["dense", "warmup"])
def test_gate_of_dense_stages(stage):
    options = DSAOptions(stage=stage, freeze_main=False, output_gate=True)
    loss = None if stage == "dense" else "dense"
    compare(small_config(options=options), mode="dense", loss=loss, batch=2)


def test_a_gate_needs_its_linear():
    config = small_config(options=DSAOptions(output_gate=True))
    from megatron.core.transformer.spec_utils import build_module

    from megatron_dsa.specs import dsa_layer_spec

    spec = dsa_layer_spec(config).submodules.self_attention
    spec.submodules.linear_gate = None
    with pytest.raises(ConfigError, match="--dsa-output-gate needs linear_gate in the spec"):
        build_module(spec, config=config, layer_number=1)


def test_pools_by_a_bit_mask():
    compare(small_config(**pooled(selected_attention="masked")), mode="sparse", loss="sparse")


@pytest.mark.parametrize("case", ["plain", "yarn", "pooled"])
def test_warmup_stage(case):
    size = {"indexer_pool_size": 4} if case == "pooled" else {}
    options = DSAOptions(stage="warmup", freeze_main=False, **size)
    config = small_config(**CASES[case] | {"options": options})
    compare(config, mode="dense", loss="dense", batch=2)


def test_dense_stage_has_no_indexer():
    config = small_config(options=DSAOptions(stage="dense"))
    module, _ = compare(config, mode="dense", loss=None, batch=2)
    assert not any("indexer" in name for name, _ in module.named_parameters())


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_packed_sequences_do_not_see_each_other(stage, size):
    """One sequence is shorter than the top-k; with pools, sequences of 1 to 3 tokens fill none."""
    options = DSAOptions(stage=stage, freeze_main=False, indexer_pool_size=size)
    config = small_config(options=options, **(POOLED if size > 1 else {}))
    lengths = [5, 60, 17] if size == 1 else [5, 1, 57, 3, 2, 17]
    compare(
        config,
        mode="sparse" if stage == "sparse" else "dense",
        loss="sparse" if stage == "sparse" else "dense",
        seq_lengths=lengths,
        rows=sum(lengths),
    )


def test_padding_between_packed_sequences_changes_nothing():
    config = small_config()
    module = attention_module(config).train()
    lengths, padded_lengths = [5, 50, 17], [8, 56, 24]
    tight = hidden_states(config, sum(lengths))
    where = torch.cat(
        [torch.arange(n) + sum(padded_lengths[:i]) for i, n in enumerate(lengths)]
    ).to(start())
    loose = torch.full(
        (sum(padded_lengths) + 3, 1, config.hidden_size), 7.0, dtype=torch.float64, device=start()
    )
    loose[where] = tight.detach()
    loose.requires_grad_()
    grads = []
    for x, params, rows in (
        (tight, packed(*lengths), slice(None)),
        (loose, packed(*lengths, padded_lengths=padded_lengths), where),
    ):
        module.zero_grad()
        out, _ = module(x, None, packed_seq_params=params)
        out[rows].square().sum().backward()
        grads.append(
            [out[rows].detach(), x.grad[rows]] + [p.grad.clone() for p in module.parameters()]
        )
    for a, b in zip(*grads, strict=True):
        assert relative_error(b, a) < 1e-12


def test_everything_selected_equals_dense_attention():
    """With K >= S the sparse stage is dense MLA, up to the rounding of absorption."""
    sparse = attention_module(small_config(dsa_indexer_topk=SEQUENCE))
    dense = attention_module(small_config(options=DSAOptions(stage="dense")))
    own = dict(sparse.named_parameters())
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            parameter.copy_(own[name])
    x = hidden_states(sparse.config, SEQUENCE, batch=2)
    results = []
    for module in (sparse, dense):
        x.grad = None
        out, _ = module(x, None)
        out.square().sum().backward()
        results.append([out, x.grad] + [p.grad for _, p in sorted(dense.named_parameters())])
    results[0][2:] = [own[name].grad for name, _ in sorted(dense.named_parameters())]
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-11


def test_equals_megatrons_own_mla():
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from tests.megatron_mla import megatron_mla

    config = small_config(options=DSAOptions(stage="dense"), dtype=torch.float32)
    ours, theirs = attention_module(config), megatron_mla(config)
    assert isinstance(theirs, MLASelfAttention)
    with torch.no_grad():
        own = dict(ours.named_parameters())
        assert set(own) == {name for name, _ in theirs.named_parameters()}
        for name, parameter in theirs.named_parameters():
            parameter.copy_(own[name])
    x = hidden_states(config, SEQUENCE).detach().float().requires_grad_()
    grads = []
    for module in (ours, theirs):
        x.grad = None
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=x.device).triu(1)
        out, _ = module(x, mask)
        out.square().sum().backward()
        named = dict(module.named_parameters())
        grads.append([out, x.grad] + [named[name].grad for name in sorted(named)])
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 1e-5


def test_evaluation_computes_no_loss():
    module = attention_module(small_config()).eval()
    x = hidden_states(module.config, SEQUENCE)
    reset_report()
    with torch.no_grad():
        module(x, None)
    assert "sparse_indexer_loss" not in report()
    assert report()["sparse_attention_forward"] == {"torch": 1}


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_backward_that_gives_the_teacher_needs_no_probabilities(add, gives, evaluates):
    from megatron_dsa.layers.required_ops import called_ops

    def without_teacher(original):
        return lambda *args: (*original(*args)[:3], None)

    wrap = (lambda original: original) if gives else without_teacher
    add("sparse_attention_backward", wrap, gives_teacher=gives)
    options = DSAOptions(evaluate_indexer=evaluates)
    module = attention_module(small_config(options=options))
    core = module.core_attention
    calls = dict(called_ops(core.required_ops(), core.options.policy))
    assert calls["sparse_attention_backward"].teacher
    # The torch forward returns the teacher in evaluation passes.
    assert ("sparse_attention_probabilities" in calls) == (not gives)
    reset_report()
    out, _ = module(hidden_states(module.config, SEQUENCE), None)
    out.square().sum().backward()
    ran = report()
    assert ran["sparse_attention_backward"] == {"made_up": 1}
    assert ran.get("sparse_attention_probabilities") == (None if gives else {"torch": 1})


def test_latent_norms_have_an_epsilon_of_their_own():
    config = small_config(options=DSAOptions(latent_norm_epsilon=0.5))
    module = attention_module(config)
    for norm, dims in ((module.q_layernorm, "q_lora_rank"), (module.kv_layernorm, "kv_lora_rank")):
        x = torch.ones(1, getattr(config, dims), dtype=norm.weight.dtype, device=start())
        assert relative_error(norm(x), norm.weight[None] * 1.5**-0.5) < 1e-6
    assert module.core_attention.indexer.k_norm.eps < 0.5
