"""Dense stages by masked dense attention equal those by dense attention, in all gradients."""

import pytest
import torch
from megatron.core import tensor_parallel

from megatron_dsa.config import DSAOptions
from megatron_dsa.dispatch import report, reset_report
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.ops.masked_attention import visible
from megatron_dsa.ops.masked_attention.declaration import BACKWARD, FORWARD, VISIBLE_BITS
from megatron_dsa.sequence.from_megatron import forget_layouts
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, packed, small_config, start

#: Where both round in fp64.
TOLERANCE = 1e-11
TOKENS = 64


@pytest.fixture(autouse=True)
def log():
    """A log of one layer."""
    start()
    IndexerLog._state.sums = None
    IndexerLog.create(1, start())
    yield IndexerLog
    IndexerLog._state.sums = None


@pytest.fixture
def fused(add):
    """Make masked operations fused on every device."""
    for operation in (VISIBLE_BITS, FORWARD, BACKWARD):
        add(operation.name, lambda torchs: torchs)


def logged():
    """Return the figures that were recorded since the last call, by name."""
    means = IndexerLog.reduce()
    return {name: float(mean.value[0]) for name, mean in means.items() if mean.count[0]}


def step(masked, stage, *, batch=1, lengths=None, padded=None, recomputed=False, **changes):
    """Return output, input gradient and parameter gradients of a layer, and what it logged."""
    forget_layouts()
    named = () if masked else (("dense_attention", "torch"),)
    options = DSAOptions(stage=stage, freeze_main=False, sequence_length=TOKENS, named=named)
    changes = {"dsa_indexer_use_sparse_loss": False} | changes
    module = attention_module(small_config(options=options, **changes)).train()
    assert module.masked == masked
    packing = None if lengths is None else packed(*lengths, padded_lengths=padded)
    x = hidden_like(module, sum(padded or lengths or [TOKENS]), batch)

    def run(x):
        return module(x, None, packed_seq_params=packing)[0]

    reset_report()
    out = tensor_parallel.checkpoint(run, False, x) if recomputed else run(x)
    generator = torch.Generator().manual_seed(12)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out))
    ran = set(report())
    ours = {"visible_bits", "masked_attention_forward", "masked_attention_backward"}
    assert ours <= ran if masked else not ours & ran
    assert ("dense_attention" in ran) != masked
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "dx": x.grad} | gradients, logged()


CASES = {
    "unpacked": {},
    "two sequences": {"batch": 2},
    "packed": {"lengths": (1, 5, 1, 40, 17)},
    "padded": {"lengths": (5, 1, 17, 50), "padded": (8, 1, 24, 56)},
    "more than a group of keys": {"lengths": (100, 1, 190)},
    "loss per token": {"calculate_per_token_loss": True},
    "no query latent": {"q_lora_rank": None, "qk_layernorm": False},
    "full recompute": {"recomputed": True},
} | {
    f"recompute {' '.join(modules)}": {
        "recompute_granularity": "selective",
        "recompute_modules": list(modules),
    }
    for modules in (("core_attn",), ("mla_up_proj",), ("core_attn", "mla_up_proj"))
}


def same(got, want, tolerance=TOLERANCE):
    assert got[0].keys() == want[0].keys()
    for name, expected in want[0].items():
        if expected is None:
            assert got[0][name] is None, name
            continue
        assert expected.norm() > 0, name
        assert relative_error(got[0][name], expected) < tolerance, name
    assert got[1].keys() == want[1].keys()
    for name, figure in want[1].items():
        assert got[1][name] == pytest.approx(figure, rel=1e-6), name


@pytest.mark.parametrize("stage", ["dense", "warmup"])
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(fused, case, stage):
    got, want = (step(masked, stage, **CASES[case]) for masked in (True, False))
    same(got, want)
    assert ("indexer loss" in want[1]) == (stage == "warmup")


def test_equals_dense_attention_in_fp32(fused):
    got, want = (step(masked, "warmup", dtype=torch.float32) for masked in (True, False))
    same(got, want, 1e-5)


def test_a_frozen_model_has_no_backward(fused):
    """Only the indexer is trained, by a loss whose gradients are formed in the forward."""
    options = DSAOptions(stage="warmup", sequence_length=TOKENS)
    config = small_config(options=options, dsa_indexer_use_sparse_loss=False)
    module = attention_module(config).train()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("indexer" in name)
    reset_report()
    module(hidden_like(module, TOKENS).detach(), None)[0].sum().backward()
    assert "masked_attention_forward" in report()
    assert "masked_attention_backward" not in report()
    grads = [p.grad for p in module.parameters() if p.requires_grad]
    assert grads and all(grad is not None and grad.norm() > 0 for grad in grads)


def test_evaluation_equals_that_of_dense_attention(fused):
    found = []
    for named in ((), (("dense_attention", "torch"),)):
        options = DSAOptions(
            stage="warmup", evaluate_indexer=True, sequence_length=TOKENS, named=named
        )
        config = small_config(options=options, dsa_indexer_use_sparse_loss=False)
        module = attention_module(config).eval()
        with torch.no_grad():
            out, _ = module(hidden_like(module, TOKENS), None)
        found.append(({"out": out}, logged()))
    same(*found)
    assert len(found[0][1]) == 1  # the loss


def test_layers_share_the_bits(fused):
    """Two layers form them once per batch."""
    options = DSAOptions(stage="dense", sequence_length=TOKENS)
    modules = [attention_module(small_config(options=options)) for _ in range(2)]
    packing = packed(30, 34)
    reset_report()
    for module in modules:
        module(hidden_like(module, TOKENS), None, packed_seq_params=packing)
    assert sum(report()["visible_bits"].values()) == 1
    assert sum(report()["masked_attention_forward"].values()) == 2


def test_delayed_weight_gradients(fused):
    """The up projection of keys runs as a linear."""
    options = DSAOptions(stage="dense", sequence_length=TOKENS)
    module, called = attention_module(small_config(options=options)).train(), []
    for name, child in module.named_modules():
        if name.split(".")[-1].startswith("linear"):
            child.backward_dw = lambda name=name: called.append(name)
    module.backward_dw()
    assert "linear_kv_up_proj" in called


def test_long_batches_stay_with_dense_attention(fused):
    options = DSAOptions(stage="dense", sequence_length=visible.MOST_KEPT + 1)
    module = attention_module(small_config(options=options))
    assert not module.masked
