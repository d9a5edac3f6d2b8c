"""Keys rounded like the fp8 caches of inference engines."""

import re

import numpy as np
import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.cached_keys import CSA_CACHE, MLA_CACHE, as_cached
from tests.helpers import leaf
from tests.host import attention_module, hidden_like, packed, small_config, small_csa_config
from tests.reference import engine_scores as reference

FORMS = {"MLA": (MLA_CACHE, 128, False), "CSA": (CSA_CACHE, 64, True)}


def by_reference(x, block, power_of_two, rope_dims=0):
    """Round ``x`` like the cache, by numpy; pass the gradient through."""
    dims = x.shape[-1] - rope_dims
    held = reference.as_cached(x[..., :dims].detach().double().cpu().numpy(), block, power_of_two)
    held = torch.cat([torch.from_numpy(held).to(x), x[..., dims:].detach()], -1)
    return Straight.apply(x, held)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        return held

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rope_dims", [0, 64])
@pytest.mark.parametrize("workspace", [1, 2**26])
def test_as_cached(name, rope_dims, workspace):
    form, *rule = FORMS[name]
    x = leaf(60, 2, 256 + rope_dims, seed=3).detach()
    x *= 10.0 ** torch.linspace(-12, 8, 60)[:, None, None]
    x[5, :, :128], x[6, :, 0] = 0.0, 1e6
    x = x.bfloat16().requires_grad_()
    got = as_cached(x, form, workspace, rope_dims)
    assert got.dtype == torch.bfloat16 and torch.equal(got, by_reference(x, *rule, rope_dims))
    assert torch.equal(got[..., 256:], x[..., 256:])
    assert (got != x).float().mean() > 0.5
    dy = leaf(*x.shape, seed=4).detach().bfloat16()
    assert torch.equal(torch.autograd.grad(got, x, dy)[0], dy)
    error = (got - x).detach().double()[10:50, :, :256].abs()
    size = x.detach().double()[10:50, :, :256].abs().amax(-1, keepdim=True)
    assert float((error / size).max()) < 0.07


def options(rounding, **more):
    return DSAOptions(kv_rounding=rounding, **more)


def mla(rounding, **more):
    return small_config(
        dtype=torch.bfloat16, kv_lora_rank=128, options=options(rounding, **more),
        dsa_indexer_loss_coeff=0.5 if more.get("stage") != "dense" else None,
    )  # fmt: skip


def csa(ratio):
    def config(rounding):
        return small_csa_config(
            ratio, dtype=torch.bfloat16, qk_head_dim=64, v_head_dim=72, qk_pos_emb_head_dim=8,
            kv_lora_rank=64, dsa_indexer_loss_coeff=0.5, options=options(rounding),
        )  # fmt: skip

    return config


LAYERS = {
    "sparse": (mla, {}),
    "masked": (mla, {"selected_attention": "masked"}),
    "dense": (mla, {"stage": "dense"}),
    "window": (csa(0), {}),
    "CSA": (csa(4), {}),
    "HCA": (csa(6), {}),
}


@pytest.mark.parametrize("batch", ["unpacked", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_attends_to_what_the_cache_holds(name, batch):
    make, settings = LAYERS[name]
    results = []
    for rounding in ("fp8-cache", "none", "plain"):
        module = attention_module(make(rounding.replace("plain", "none"), **settings))
        if rounding == "none":
            _round_by_reference(module, is_v4=make is not mla)
        x = hidden_like(module, 48)
        out, _ = module(x, None, packed_seq_params=packed(20, 28) if batch == "packed" else None)
        out.float().square().sum().backward()
        gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        results.append((out, x.grad, gradients))
    ours, wanted, plain = results
    assert torch.equal(ours[0], wanted[0]) and torch.equal(ours[1], wanted[1])
    assert ours[2].keys() == wanted[2].keys()
    assert all(torch.equal(ours[2][n], wanted[2][n]) for n in wanted[2])
    assert not torch.equal(ours[0], plain[0])


def _round_by_reference(module, is_v4):
    """Round the outputs of key norms; rope skips the rounded dims of V4's keys."""
    rule = (64, True, 8) if is_v4 else (128, False)
    module.kv_layernorm.register_forward_hook(lambda _, __, out: by_reference(out, *rule))
    if is_v4 and module.core_attention.compressor is not None:
        module.core_attention.compressor.norm.register_forward_hook(
            lambda _, __, out: by_reference(out, *rule)
        )


def test_what_cannot_work_is_refused_by_name():
    rounded = {"options": options("fp8-cache")}
    bf16 = rounded | {"dtype": torch.bfloat16}
    for make, message in (
        (lambda: small_config(**rounded), "--bf16 is required with --dsa-kv-rounding fp8-cache"),
        (lambda: small_config(**bf16), "--kv-lora-rank must be a multiple of 128 with"),
        (lambda: small_csa_config(4, **bf16), "--qk-head-dim must be a multiple of 64 with"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            make()


def test_a_cache_of_zeros_stays_zero():
    for form, *_ in FORMS.values():
        assert not np.any(as_cached(torch.zeros(3, 128).bfloat16(), form, 1).float().numpy())
