"""The naive layers against the package's: outputs, indexer losses and all gradients in float64."""

import dataclasses

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.ops import naive
from megatron_dsa.ops.common.scaling import Scaled
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, small_config, small_csa_config

TOLERANCE = 1e-10
STAGES = ("sparse", "warmup", "dense")


def options(stage):
    return DSAOptions(stage=stage, freeze_main=False)


@pytest.fixture
def losses(monkeypatch):
    """Return the recorded indexer losses, with the coefficient; the log rounds to fp32."""
    found = []

    def record(_layer, figures):
        value = figures.get("indexer loss")
        if value is not None:
            scaled = isinstance(value, Scaled)
            found.append(value.factor.apply(value.value) if scaled else value)

    monkeypatch.setattr(IndexerLog, "record", record)
    return found


def compare(module, layer, losses, tokens):
    """Run ``module`` and ``layer(x, weights)``; compare output, loss and gradients."""
    x = hidden_like(module, tokens)
    out, _ = module(x, None)
    generator = torch.Generator().manual_seed(12)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
    out.backward(grad)

    weights = {name: p.detach().cpu().requires_grad_() for name, p in module.named_parameters()}
    x_naive = x.detach().cpu()[:, 0].requires_grad_()
    out_naive, loss = layer(x_naive, weights)
    objective = (out_naive * grad.cpu()[:, 0]).sum()
    assert len(losses) == (loss is not None)
    if loss is not None:
        coeff = module.config.dsa_indexer_loss_coeff
        assert loss > 0.01
        assert relative_error(losses[0], coeff * loss) < TOLERANCE
        objective = objective + coeff * loss
    objective.backward()

    assert relative_error(out[:, 0], out_naive) < TOLERANCE
    assert relative_error(x.grad[:, 0], x_naive.grad) < TOLERANCE
    for name, parameter in module.named_parameters():
        expected = weights[name].grad
        # relative_error would use another unit for small gradients.
        error = (parameter.grad.cpu() - expected).norm() / expected.norm()
        assert error < TOLERANCE, (name, error)


@pytest.mark.parametrize(
    ("stage", "softmax"), [*((stage, "vanilla") for stage in STAGES), ("sparse", "learnable")]
)
def test_dsa_layer(stage, softmax, losses):
    """The layer with sinks has an output gate as well."""
    sparse_loss, gated = stage == "sparse", softmax == "learnable"
    config = small_config(
        options=dataclasses.replace(options(stage), output_gate=gated), softmax_type=softmax,
        dsa_indexer_use_sparse_loss=sparse_loss, layernorm_epsilon=naive.EPS,
    )  # fmt: skip
    module = attention_module(config).train()
    tokens = 5 * config.dsa_indexer_topk
    # Megatron's fp32 angles have an error of 1e-6.
    angles = module.rotary_pos_emb(tokens, packed_seq=True).flatten(0, 2).cpu()
    angles = angles[:, : config.qk_pos_emb_head_dim // 2]
    rope = angles.cos().double(), angles.sin().double()
    own = naive.rope_tables(tokens, config.qk_pos_emb_head_dim, config.rotary_base)
    assert max(relative_error(a, b) for a, b in zip(rope, own, strict=True)) < 1e-5

    def layer(x, w):
        heads, topk = config.num_attention_heads, config.dsa_indexer_topk
        return naive.dsa_layer(x, w, rope, heads, topk, stage)

    compare(module, layer, losses, tokens)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ratio", [0, 4, 6, 128])
def test_csa_layer(ratio, stage, losses):
    sparse_loss = stage == "sparse"
    config = small_csa_config(
        ratio,
        options=options(stage),
        dsa_indexer_use_sparse_loss=sparse_loss,
        layernorm_epsilon=naive.EPS,
    )
    module = attention_module(config).train()
    tokens = 150 if ratio == 128 else 94  # a tail without compressed key
    base = config.csa_compress_rotary_base if ratio else config.rotary_base
    rope = naive.rope_tables(tokens, config.qk_pos_emb_head_dim, base)

    def layer(x, w):
        return naive.csa_layer(
            x,
            w,
            rope,
            heads=config.num_attention_heads,
            topk=config.dsa_indexer_topk,
            window=config.csa_window_size,
            ratio=ratio,
            o_groups=config.o_groups,
            stage=stage,
        )

    compare(module, layer, losses, tokens)


def test_kda_layer(losses):
    fields = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
    fields |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    config = small_config(
        linear_attention_freq=2, layernorm_epsilon=naive.EPS, normalization="RMSNorm", **fields
    )
    module = attention_module(config).train()
    compare(module, lambda x, w: (naive.kda_layer(x, w, heads=4), None), losses, 70)


def test_equal_scores_go_to_the_first_key():
    scores = torch.tensor([[0.0, 1.0, -0.0, 0.0]]).double()
    seen = torch.tensor([[True, True, True, True]])
    assert naive.indexer_topk(scores, seen, 3).tolist() == [[True, True, True, False]]
    seen = torch.tensor([[True, False, True, False]])
    assert naive.indexer_topk(scores, seen, 3).equal(seen)
