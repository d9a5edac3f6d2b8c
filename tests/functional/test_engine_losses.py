"""transformer-engine's layers train like Megatron's, from one checkpoint, in every precision."""

import pytest

from tests.functional.checkpoint_reader import gradients_of_first_step
from tests.functional.engine import (
    BOUNDS,
    ENGINE,
    LOCAL,
    MARKS,
    MODELS,
    PRECISIONS,
    check_gradients,
    check_losses,
    noise_of,
    run,
)

pytestmark = MARKS


@pytest.fixture(scope="module", params=MODELS)
def model(request, started):
    """Yield name, flags, local run and noise of a model."""
    flags = started(MODELS[request.param])
    local = run(flags, LOCAL)
    return request.param, flags, local, noise_of(local, run(flags, LOCAL))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses(model, precision):
    name, flags, local, noise = model
    engine = run(flags, ENGINE, precision)
    check_losses(engine, local, BOUNDS[name, precision], noise)
    assert engine.steps[-1]["lm loss"] < engine.steps[0]["lm loss"]
    assert engine.steps[-1]["indexer loss"] > 0
    if "--mtp-num-layers" in flags:
        assert engine.steps[-1]["mtp_1 loss"] < engine.steps[0]["mtp_1 loss"]


#: A model, and the layers of the hybrid model that equals it.
HYBRIDS = {"DSA": "D-D-D-D-", "experts": "D-DEDEDE", "MTP": "D-D-D-D-/D-"}


def hybrid(pattern):
    return {"--num-layers": None, "--mtp-num-layers": None, "--hybrid-layer-pattern": pattern}


@pytest.mark.parametrize("name", HYBRIDS)
def test_losses_of_hybrid_models(name, source):
    """A GPT and the hybrid model with its layers draw equal weights."""
    flags = MODELS[name] | {"--data-path": source}
    gpt, equal = run(flags, ENGINE), run(flags, ENGINE)
    got = run(flags | hybrid(HYBRIDS[name]), ENGINE)
    check_losses(got, gpt, BOUNDS[name, "bf16"], noise_of(gpt, equal))


def test_gated_delta_net_in_hybrid_models(source):
    pytest.importorskip("fla")
    got = run(MODELS["DSA"] | hybrid("GD-GD-") | {"--data-path": source}, ENGINE)
    assert got.steps[-1]["lm loss"] < got.steps[0]["lm loss"]
    assert got.steps[-1]["indexer loss"] > 0


def test_delayed_scaling_needs_a_loss_scale(model):
    """Otherwise E5M2 rounds the first gradients to 0, layer after layer."""
    _, flags, local, _ = model
    one_step = flags | {"--train-iters": 1}
    expected = local.steps[0]["grad norm"]
    preset, without = (
        run(one_step | more, ENGINE, "delayed") for more in ({}, {"--loss-scale": 1})
    )
    assert "> delayed scaling: preset flags" in preset.log and "--loss-scale 65536" in preset.log
    norms = [each.steps[0]["grad norm"] for each in (preset, without)]
    print("gradient norms of the first step, preset, without, local:", *norms, expected)
    assert norms[0] == pytest.approx(expected, rel=0.1)
    assert abs(norms[1] - expected) > 2 * abs(norms[0] - expected)


#: transformer-engine fuses this norm.
NORM = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def test_gradients_of_the_first_step(model, tmp_path):
    name, flags, _, _ = model
    gradients = []
    for kind, layers in (("local", LOCAL), ("engine", ENGINE)):
        step = {"--train-iters": 1, "--save": tmp_path / kind, "--save-interval": 1}
        run(flags | step | {"--clip-grad": 0.0}, layers)
        found = gradients_of_first_step(tmp_path / kind)
        gradients.append({key.replace(*NORM): value for key, value in found.items()})
    local, engine = gradients
    check_gradients(name, engine, local)
