"""Adapters on frozen weights: computation, training, rejected configurations."""

import functools
import re

import pytest
import torch

from megatron_dsa.config.model import DSAOptions, is_adapter_parameter
from megatron_dsa.config.rules.lora import modules_of_linears
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.names import V3, V4
from megatron_dsa.extras.lora.lora import AdaptedLinear
from tests.cases.lora import ALPHA, RANK, V4_VARIANTS, VARIANTS, config_of, gradients_of, model_of
from tests.cases.models import forward
from tests.helpers import relative_error
from tests.host import small_config, small_csa_config

SCALE = ALPHA / RANK


def merged(model, config):
    """Return the model with merged, trained weights instead of adapters."""
    plain = model_of(config)
    modules = dict(plain.named_modules())
    with torch.no_grad():
        for name, linear in model.named_modules():
            if not isinstance(linear, AdaptedLinear):
                continue
            rows = linear.weight.shape[0] // len(linear.parts)
            for i, part in enumerate(linear.parts):
                if part in linear.adapted:
                    up, down = (getattr(linear, f"{part}_lora_{x}") for x in "BA")
                    modules[name].weight[i * rows : (i + 1) * rows] += SCALE * up @ down
    return plain


@pytest.mark.parametrize("variant", VARIANTS | V4_VARIANTS)
def test_loss_and_gradients_are_those_of_merged_weights(variant):
    """With ``W' = W + s B A``: ``dA = s B^T dW'`` and ``dB = s dW' A^T``, also the indexer's."""
    model = model_of(config_of(variant))
    plain = merged(model, config_of(variant, ()))
    losses = [forward(each, 7) for each in (model, plain)]
    assert relative_error(*losses) < 1e-13
    for loss in losses:
        loss.backward()
    modules, compared = dict(plain.named_modules()), 0
    for name, linear in model.named_modules():
        if not isinstance(linear, AdaptedLinear):
            continue
        gradient = modules[name].weight.grad.chunk(len(linear.parts))
        for part, wanted in zip(linear.parts, gradient, strict=True):
            down, up = (getattr(linear, f"{part}_lora_{x}") for x in "AB")
            assert wanted.norm() > 0
            assert relative_error(down.grad, SCALE * up.t() @ wanted) < 1e-11, (name, part)
            assert relative_error(up.grad, SCALE * wanted @ down.t()) < 1e-11, (name, part)
            compared += 1
    if variant in V4_VARIANTS:  # attention and its compressor, shared experts; an indexer
        assert compared == 2 * (5 + 2 + 3) + 4
        return
    indexer = VARIANTS[variant][0].get("stage") != "dense"
    assert compared == 2 * (5 + 3 * indexer + 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("variant", ["sparse", "masked", "dense", "V4"])
def test_a_run_starts_with_the_loss_of_its_base(variant, dtype):
    base = model_of(config_of(variant, (), dtype=dtype))
    model = model_of(config_of(variant, dtype=dtype), ups=False)
    losses = [forward(each, 7) for each in (base, model)]
    assert losses[0].equal(losses[1])
    losses[1].backward()
    for name, gradient in gradients_of(model).items():
        assert (gradient.norm() > 0) == name.endswith("_lora_B"), name


def test_adapters_alone_are_trained():
    model = model_of(config_of("sparse", ("q_b_proj", "indexer.wk", "up_proj")))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter_parameter(name)}
    of_layer = {name.split(".", 3)[3] for name in trained if name.startswith("decoder.layers.1.")}
    assert of_layer == {
        f"{module}_lora_{factor}"
        for module in (
            "self_attention.linear_q_up_proj.q_b_proj",
            "self_attention.core_attention.indexer.linear_wk.wk",
            "mlp.shared_experts.linear_fc1.up_proj",
        )
        for factor in "AB"
    }
    assert all(router.frozen_expert_bias for router in routers(model))
    forward(model, 3).backward()
    assert all(gradient.norm() > 0 for gradient in gradients_of(model).values())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def routers(model):
    found = [module for module in model.modules() if hasattr(module, "frozen_expert_bias")]
    assert found
    return found


@pytest.mark.parametrize(
    ("config", "linears"),
    [(small_config, 3), (functools.partial(small_csa_config, 4), 4)],
    ids=["V3", "V4"],
)
def test_a_frozen_warm_up_trains_the_adapters_of_indexers(config, linears):
    frozen = small_options(stage="warmup", targets=("all-linear",))
    everything = small_options(stage="warmup", targets=("all-linear",), freeze_main=False)
    models = [
        model_of(config(options=options, dsa_indexer_use_sparse_loss=False))
        for options in (frozen, everything)
    ]
    for model in models:
        forward(model, 5).backward()
    ours, theirs = map(gradients_of, models)
    assert len(ours) == 2 * linears * 2
    for name, gradient in ours.items():
        assert ".indexer." in name
        assert relative_error(gradient, theirs[name]) < 1e-12, name


def small_options(targets, **options):
    return DSAOptions(lora_rank=RANK, lora_alpha=ALPHA, lora_targets=targets, **options)


def test_indexers_without_adapters_are_not_trained():
    """No loss is computed without learning parameters."""
    model = model_of(config_of("sparse", ("o_proj",)))
    cores = [m for m in model.modules() if getattr(m, "indexer", None) is not None]
    assert len(cores) == 2 and not any(core.indexer_is_trained for core in cores)
    forward(model, 3).backward()


def test_initial_values():
    from megatron_dsa.extras.lora.lora import add_adapters
    from tests.cases.models import gpt

    config = config_of("sparse", rank=8)
    model = gpt(config)
    add_adapters(model, config)
    downs = [p for name, p in model.named_parameters() if name.endswith("_lora_A")]
    for down in downs:
        bound = down.shape[1] ** -0.5
        assert 0.8 * bound < down.abs().max() <= bound
        assert abs(down.mean()) < 0.25 * bound
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("_lora_B"))


@pytest.mark.parametrize(
    ("names", "config"), [(V3, small_config), (V4, lambda: small_csa_config(4))], ids=["V3", "V4"]
)
def test_the_table_of_linears_is_that_of_checkpoints(names, config):
    matrices = {
        hf.removesuffix(".weight"): entry.megatron[0].removesuffix(".weight")
        for entry in names.layer
        for hf in entry.hf
        if hf.endswith(".weight") and not re.search(r"norm|\{expert\}|(mlp|ffn)\.gate\.", hf)
    }
    linears = modules_of_linears(config())
    assert matrices == linears
    for hf, module in linears.items():  # halves are in this order
        halves = [name for name, where in linears.items() if where == module]
        entry = next(e for e in names.layer if f"{hf}.weight" in e.hf)
        assert entry.hf == tuple(f"{half}.weight" for half in halves)


@pytest.mark.parametrize(
    ("targets", "changes", "message"),
    [
        (("q_proj",), {}, "--lora-targets q_proj names no linear of this model; there are self_at"),
        (("mlp.experts.0.up_proj",), {}, r"names no linear of this model: routed experts have no"),
        (("lm_head",), {}, "--lora-targets lm_head names no linear"),
        (("wk",), {"dsa_indexer_loss_coeff": 0.0}, "with --dsa-indexer-loss-coeff 0 no indexer"),
        (("wk",), {"stage": "dense"}, "with --dsa-stage dense no indexer is trained"),
        (("o_proj",), {"stage": "warmup"}, "--lora-targets must name a linear of the indexer"),
        (("o_proj",), {"delay_wgrad_compute": True}, "--delay-wgrad-compute is not supported"),
        (("o_proj",), {"fp8_param": True}, "--fp8-param-gather is not supported with --lora-rank"),
        (
            ("o_proj",),
            {"overlap_moe_expert_parallel_comm": True},
            "--overlap-moe-expert-parallel-comm is not supported with --lora-rank",
        ),
        (("o_proj",), {"cuda_graph_impl": "local"}, "--cuda-graph-impl must be none with --lora"),
        (
            ("up_proj",),
            {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"},
            "--moe-shared-expert-overlap must not be used with adapters of shared experts",
        ),
    ],
)
def test_refused(targets, changes, message):
    from tests.cases.lora import MIXED

    stage = changes.get("stage", "sparse")
    settings = {name: value for name, value in changes.items() if name != "stage"}
    names = ("delay_wgrad_compute", "fp8_param", "overlap_moe_expert_parallel_comm")
    late = {name: settings.pop(name) for name in names if name in settings}
    options = small_options(targets, stage=stage)
    if stage == "warmup":
        settings["dsa_indexer_use_sparse_loss"] = False
    if not late:
        with pytest.raises(ConfigError, match=message):
            small_config(options=options, **MIXED | settings)
        return
    from megatron_dsa.config.model import validate

    config = small_config(options=options, **MIXED | settings)
    for name, value in late.items():  # Megatron rejects it by itself
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("o_proj", {}, "of this model: linears have that name in DeepSeek-V3.2 and GLM-5; there"),
        ("ffn.experts.0.w1", {}, "names no linear of this model: routed experts have no adapters"),
        ("w1", {}, "w1 names no linear of this model; there are attn.wq_a, "),
        ("weights_proj", {"csa_compress_ratios": [6, 0]}, "no layer has ratio 4, and with it an"),
        ("compressor.wkv", {"csa_compress_ratios": [0, 0]}, "wkv names no linear of this model"),
        ("indexer.wq_b", {"dsa_indexer_loss_coeff": 0.0}, "with --dsa-indexer-loss-coeff 0 no ind"),
    ],
)
def test_refused_in_v4(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        small_csa_config(4, options=small_options((target,)), **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 0, "lora_targets": ("o_proj",)}, "--lora-rank must be finite and at"),
        ({"lora_rank": 2}, "--lora-targets is required with --lora-rank"),
        ({"lora_targets": ("o_proj",)}, "--lora-targets is not supported without --lora-rank"),
        ({"lora_alpha": 4.0}, "--lora-alpha is not supported without --lora-rank"),
        (
            {"lora_rank": 2, "lora_targets": ("o_proj",), "lora_alpha": 0.0},
            "--lora-alpha must be finite and above 0, got 0",
        ),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        DSAOptions(**options)
