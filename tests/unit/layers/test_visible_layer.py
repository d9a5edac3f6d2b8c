"""Dense stages by masked dense attention equal those by dense attention, in all gradients."""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.layers.from_megatron import forget_layouts
from megatron_dsa.ops.dispatch import report, reset_report
from megatron_dsa.ops.masked_attention.api import MOST_KEPT
from megatron_dsa.ops.masked_attention.spec import BACKWARD, FORWARD, VISIBLE_BITS
from tests.cases.log import empty_log, forget_log, logged
from tests.cases.steps import RECOMPUTED, STEPS, TOKENS, Step, check_same, selective, train
from tests.host import attention_module, hidden_like, packed, small_config, start

OPERATIONS = (VISIBLE_BITS, FORWARD, BACKWARD)


@pytest.fixture(autouse=True)
def log():
    """A log of one layer."""
    empty_log(1, start())
    yield
    forget_log()


@pytest.fixture
def all_fused(fused):
    """Masked operations are fused on every device."""
    fused()


def step(masked, stage, case=Step(), **changes):
    """Return what :func:`train` does for a layer whose main model is trained as well."""
    forget_layouts()
    named = () if masked else (("dense_attention", "torch"),)
    options = DSAOptions(stage=stage, freeze_main=False, sequence_length=TOKENS, named=named)
    changes = {"dsa_indexer_use_sparse_loss": False} | case.changes | changes
    module = attention_module(small_config(options=options, **changes)).train()
    assert module.choice.masked == masked
    found = train(module, case)
    ran, ours = set(report()), {operation.name for operation in OPERATIONS}
    assert ours <= ran if masked else not ours & ran
    assert ("dense_attention" in ran) != masked
    return found


CASES = (
    STEPS
    | {"more than a group of keys": Step(lengths=(100, 1, 190))}
    | {f"recompute {' '.join(modules)}": Step(changes=selective(modules)) for modules in RECOMPUTED}
)


@pytest.mark.parametrize("stage", ["dense", "warmup"])
@pytest.mark.parametrize("case", CASES)
def test_equals_dense_attention(all_fused, case, stage):
    got, want = (step(masked, stage, CASES[case]) for masked in (True, False))
    check_same(got, want)
    assert (("indexer loss", 0) in want[1]) == (stage == "warmup")


def test_equals_dense_attention_in_fp32(all_fused):
    got, want = (step(masked, "warmup", dtype=torch.float32) for masked in (True, False))
    check_same(got, want, 1e-5)


def test_a_frozen_model_has_no_backward(all_fused):
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


def test_evaluation_equals_that_of_dense_attention(all_fused):
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
    check_same(*found)
    assert len(found[0][1]) == 1  # the loss


def test_layers_share_the_bits(all_fused):
    """Two layers form them once per batch."""
    options = DSAOptions(stage="dense", sequence_length=TOKENS)
    modules = [attention_module(small_config(options=options)) for _ in range(2)]
    packing = packed(30, 34)
    reset_report()
    for module in modules:
        module(hidden_like(module, TOKENS), None, packed_seq_params=packing)
    assert sum(report()["visible_bits"].values()) == 1
    assert sum(report()["masked_attention_forward"].values()) == 2


def test_delayed_weight_gradients(all_fused):
    """The up projection of keys runs as a linear."""
    options = DSAOptions(stage="dense", sequence_length=TOKENS)
    module, called = attention_module(small_config(options=options)).train(), []
    for name, child in module.named_modules():
        if name.split(".")[-1].startswith("linear"):
            child.backward_dw = lambda name=name: called.append(name)
    module.backward_dw()
    assert "linear_kv_up_proj" in called


def test_long_batches_stay_with_dense_attention(all_fused):
    options = DSAOptions(stage="dense", sequence_length=MOST_KEPT + 1)
    module = attention_module(small_config(options=options))
    assert not module.choice.masked
