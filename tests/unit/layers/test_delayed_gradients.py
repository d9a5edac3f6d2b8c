"""Delayed weight gradients: ``backward_dw`` equals autograd, and data parallelism sums it."""

import functools

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from tests.helpers import relative_error
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start


class DelayedWeight(torch.autograd.Function):
    """A weight whose gradient is put into a list instead of returned."""

    @staticmethod
    def forward(ctx, weight, store):
        ctx.store = store
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.store.append(grad)
        return None, None


def delay(linear):
    """Delay a linear's weight gradient like transformer-engine.

    Parameters are marked, hooks run after ``backward_dw``, which raises if there is nothing to
    compute; a second gradient replaces nothing.
    """
    store, hooks, forward, weight = [], [], linear.forward, linear.weight

    def delayed_forward(*args, **kwargs):
        vars(linear)["weight"] = DelayedWeight.apply(weight, store)  # goes before the parameter
        try:
            return forward(*args, **kwargs)
        finally:
            del vars(linear)["weight"]

    def backward_dw():
        if not store:
            raise RuntimeError("Pop empty queue.")
        weight.grad = store.pop(0)
        for hook in hooks:
            hook()

    linear.forward, linear.backward_dw = delayed_forward, backward_dw
    linear.register_wgrad_accumulation_and_reduce_hooks = hooks.append
    for parameter in linear.parameters():
        parameter.skip_backward_post_hook = True
    return store


def built(config, delayed, monkeypatch):
    """Return a self-attention with delaying linears, and their lists by name.

    No spec gives V4's compressors and output groups such linears.
    """
    stores = {}
    if delayed:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        from megatron_dsa.layers.linears import ReplicatedLinear

        for linear in (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear):
            original = linear.__init__

            @functools.wraps(original)
            def init(self, *args, original=original, **kwargs):
                original(self, *args, **kwargs)
                stores[self] = delay(self)

            monkeypatch.setattr(linear, "__init__", init)
    module = attention_module(config).train()
    monkeypatch.undo()
    found = {name: stores[each] for name, each in module.named_modules() if each in stores}
    for name in [n for n in found if "compressor" in n or n == "linear_o_group_proj"]:
        linear = module.get_submodule(name)
        linear.weight.skip_backward_post_hook = False
        del linear.forward, found[name]
    return module, found


def gradients(config, delayed, monkeypatch, microbatches=2):
    """Return the gradients summed by Megatron's data parallelism, and leftovers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    module, stores = built(config, delayed, monkeypatch)
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=True, delay_wgrad_compute=delayed, grad_reduce_in_fp32=False
    )
    wrapped = DistributedDataParallel(config, settings, module)
    wrapped.zero_grad_buffer()
    for number in range(microbatches):
        last = number == microbatches - 1
        x = hidden_like(module, 64)
        with wrapped.no_sync() if not last else torch.enable_grad():
            out, _ = wrapped(x * (number + 1), None)
            (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
            if delayed:
                module.backward_dw()
    wrapped.finish_grad_sync()
    found = {n: p.main_grad.clone() for n, p in module.named_parameters() if p.requires_grad}
    return found, {name: len(store) for name, store in stores.items() if store}


CONFIGS = {
    "sparse": lambda: small_config(options=DSAOptions(selected_attention="sparse")),
    "masked": lambda: small_config(options=DSAOptions(selected_attention="masked")),
    "dense": lambda: small_config(options=DSAOptions(stage="dense")),
    "loss over all keys": lambda: small_config(dsa_indexer_use_sparse_loss=False),
    "frozen indexer": lambda: small_config(dsa_indexer_loss_coeff=0.0),
    "V4, ratio 4": lambda: small_csa_config(4),
    "V4, ratio 16": lambda: small_csa_config(16),
    "V4, window": lambda: small_csa_config(0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_autograd(name, monkeypatch):
    start()
    expected, _ = gradients(CONFIGS[name](), False, monkeypatch)
    got, left = gradients(CONFIGS[name](), True, monkeypatch)
    assert not left
    assert set(got) == set(expected) and len(got) > 5
    for key, gradient in expected.items():
        assert gradient.norm() > 0, key
        assert relative_error(got[key], gradient) < 1e-10, key


@pytest.mark.parametrize("attention", ["sparse", "masked"])
def test_the_absorbed_weight_is_not_delayed(attention, monkeypatch):
    """It is read without calling its linear, so ``backward_dw`` never has its gradient."""
    start()
    config = small_config(options=DSAOptions(selected_attention=attention))
    module, _ = built(config, True, monkeypatch)
    marked = {
        name.removesuffix(".weight") for name, parameter in module.named_parameters()
        if getattr(parameter, "skip_backward_post_hook", False)
    }  # fmt: skip
    linears = {name for name, _ in module.named_modules() if "linear_" in name}
    assert marked == linears - ({"linear_kv_up_proj"} if attention == "sparse" else set())
    assert "linear_kv_up_proj" in linears and len(linears) == 8
