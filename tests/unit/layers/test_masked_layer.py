"""Masked dense attention in a layer equals the attention it replaces: outputs, losses, all
gradients.
"""

import contextlib
import functools

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
from megatron_dsa.layers.from_megatron import forget_layouts
from megatron_dsa.ops.dispatch import report, reset_report
from megatron_dsa.ops.masked_attention.api import MOST_KEPT
from megatron_dsa.ops.masked_attention.spec import BACKWARD, FORWARD, VISIBLE_BITS
from tests.cases.calls import delayed_linears
from tests.cases.layouts import shuffled
from tests.cases.log import empty_log, forget_log, logged
from tests.cases.models import forward, gpt
from tests.cases.steps import RECOMPUTED, STEPS, TOKENS, Step, check_same, selective, train
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, packed, small_config, start

#: Operations of stages that attend to all visible keys.
OPERATIONS = (VISIBLE_BITS, FORWARD, BACKWARD)
DENSE_LOSS = {"dsa_indexer_use_sparse_loss": False}


@pytest.fixture(autouse=True)
def log():
    """A log of two layers."""
    empty_log(2, start())
    yield
    forget_log()


@pytest.fixture
def layer(request):
    """Return a function that builds a layer, with masked or other attention, in a stage."""

    fuse = functools.cache(lambda: request.getfixturevalue("fused")())

    def build(masked, stage="sparse", evaluate=False, freeze=False, **changes):
        if stage == "sparse":
            attention = "masked" if masked else "sparse"
            options = {"selected_attention": attention}
        else:
            fuse()
            forget_layouts()
            named = () if masked else (("dense_attention", "torch"),)
            options = {"freeze_main": freeze, "sequence_length": TOKENS, "named": named}
            changes = DENSE_LOSS | changes
        options = DSAOptions(stage=stage, evaluate_indexer=evaluate, **options)
        module = attention_module(small_config(options=options, **changes)).train()
        assert stage == "sparse" or module.choice.masked == masked
        return module

    return build


@pytest.fixture
def steps(layer):
    """Return a function that returns results of :func:`train` and implementations, for both."""

    def run(stage, case=Step(), **changes):
        for masked in (True, False):
            found = train(layer(masked, stage, **case.changes | changes), case)
            ran = set(report())
            assert ("masked_attention_backward" in ran) == masked
            other = "sparse_attention_backward" if stage == "sparse" else "dense_attention"
            assert (other in ran) != masked
            if stage != "sparse":
                ours = {operation.name for operation in OPERATIONS}
                assert ours <= ran if masked else not ours & ran
            assert not masked or not any(name.startswith("sparse_attention") for name in ran)
            yield found

    return run


RECOMPUTES = {f"recompute {' '.join(names)}": selective(names) for names in RECOMPUTED}
CASES = STEPS | {name: Step(changes=changes) for name, changes in RECOMPUTES.items()}
SELECTING = {
    "frozen indexer": Step(changes={"dsa_indexer_loss_coeff": 0.0}),
    "dense loss": Step(changes=DENSE_LOSS),
    "dense loss, two sequences": Step(batch=2, changes=DENSE_LOSS),
} | {
    f"{name}, dense loss": Step(changes=changes | DENSE_LOSS)
    for name, changes in RECOMPUTES.items()
}
DENSE = {"more than a group of keys": Step(lengths=(100, 1, 190))}


@pytest.mark.parametrize("case", CASES | SELECTING)
def test_equals_sparse_attention(case, steps):
    got, want = steps("sparse", (CASES | SELECTING)[case])
    check_same(got, want)
    names = {name for name, _ in want[1]}
    assert {"dsa attention mass captured", "dsa query overlap"} <= names
    assert ("indexer loss" in names) == (case != "frozen indexer")


@pytest.mark.parametrize("stage", ["dense", "warmup"])
@pytest.mark.parametrize("case", CASES | DENSE)
def test_equals_dense_attention(case, stage, steps):
    got, want = steps(stage, (CASES | DENSE)[case])
    check_same(got, want)
    assert (("indexer loss", 0) in want[1]) == (stage == "warmup")


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_equals_the_other_way_in_fp32(stage, steps):
    check_same(*steps(stage, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("sparse", {}),
        ("sparse", DENSE_LOSS),
        ("sparse", {"dsa_indexer_loss_coeff": 0.0}),
        ("sparse", DENSE_LOSS | {"dsa_indexer_loss_coeff": 0.0}),
        ("warmup", {}),
    ],
)
def test_evaluation_equals_that_of_the_other_way(stage, changes, layer):
    found = []
    for masked in (True, False):
        module = layer(masked, stage, evaluate=True, freeze=True, **changes).eval()
        with torch.no_grad():
            out, _ = module(hidden_like(module, TOKENS), None)
        found.append(({"out": out}, logged()))
    check_same(*found)
    assert len(found[0][1]) == 1  # the loss


@pytest.mark.parametrize(
    ("masked", "stage"), [(True, "sparse"), (False, "sparse"), (True, "dense")]
)
def test_delayed_weight_gradients_are_those_of_the_up_projection(masked, stage, layer):
    """The up projection of keys is a linear here, and a weight in sparse attention."""
    called = delayed_linears(layer(masked, stage))
    assert ("linear_kv_up_proj" in called) == masked


def test_a_frozen_model_has_no_backward(layer):
    module = layer(True, "warmup", freeze=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("indexer" in name)
    reset_report()
    module(hidden_like(module, TOKENS).detach(), None)[0].sum().backward()
    assert "masked_attention_forward" in report()
    assert "masked_attention_backward" not in report()
    grads = [p.grad for p in module.parameters() if p.requires_grad]
    assert grads and all(grad is not None and grad.norm() > 0 for grad in grads)


def test_layers_share_the_bits(layer):
    modules = [layer(True, "dense") for _ in range(2)]
    packing = packed(30, 34)
    reset_report()
    for module in modules:
        module(hidden_like(module, TOKENS), None, packed_seq_params=packing)
    assert sum(report()["visible_bits"].values()) == 1
    assert sum(report()["masked_attention_forward"].values()) == 2


def test_long_batches_stay_with_dense_attention(fused):
    fused()
    options = DSAOptions(stage="dense", sequence_length=MOST_KEPT + 1)
    assert not attention_module(small_config(options=options)).choice.masked


def model_step(attention, replayed=None, **changes):
    """Return gradients of a small GPT model with shared selections, and its keys."""
    options = DSAOptions(selected_attention=attention)
    config = small_config(
        options=options, num_layers=4, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=1,
        **changes,
    )  # fmt: skip
    model, capture = gpt(config), IndexCapture()
    empty_log(4, start())
    given = contextlib.nullcontext() if replayed is None else IndexReplay(replayed).on(model)
    with capture.on(model), given:
        loss = forward(model, 1)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return ({"loss": loss.detach()} | gradients, logged()), capture.microbatches


@pytest.mark.parametrize("recompute", [{}, selective(RECOMPUTED[-1])], ids=["", "recomputed"])
def test_layers_that_share_selections(recompute):
    (got, keys), (want, expected) = (model_step(x, **recompute) for x in ("masked", "sparse"))
    check_same(got, want)
    assert sorted(keys[0]) == [1, 3]
    assert all(keys[0][layer].equal(expected[0][layer]) for layer in keys[0])


def test_replayed_keys():
    _, captured = model_step("sparse")
    given = [{layer: shuffled(x)[:, :9] for layer, x in one.items()} for one in captured]
    for one in given:
        for positions in one.values():
            positions[:1] = -1
            positions[:1, 0] = 0  # the first token sees itself
    got, want = (model_step(attention, given)[0] for attention in ("masked", "sparse"))
    check_same(got, want)


def test_captured_mass_is_that_of_the_absorbed_form():
    from megatron_dsa.metrics.quality import captured_mass
    from megatron_dsa.ops.layout.layout import bshd_layout

    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, kv, k_pe = draw(20, 3, 6), draw(20, 3, 9), draw(20, 2)
    indices = torch.full((20, 4), -1, dtype=torch.int32)
    indices[:, 0] = torch.arange(20)
    plain = torch.cat([kv[..., :4], k_pe[:, None].expand(-1, 3, -1)], -1)
    layout = bshd_layout(20, 1, torch.device("cpu"))
    logits = torch.einsum("qhd,khd->qhk", q, plain) * 0.4
    visible = torch.ones(20, 20, dtype=torch.bool).tril()[:, None]
    own = logits.diagonal(dim1=0, dim2=2).t()
    expected = (own - logits.masked_fill(~visible, float("-inf")).logsumexp(-1)).exp()
    for workspace in (1, 2**20):
        got = captured_mass(
            q, kv, indices, own, layout, softmax_scale=0.4, k_pe=k_pe, workspace_bytes=workspace
        )
        assert relative_error(got, expected) < 1e-12
