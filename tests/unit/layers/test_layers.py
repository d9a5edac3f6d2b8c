"""Linears replicated over tensor-parallel ranks, and the source of their weights."""

import pytest
import torch

from megatron_dsa.layers.linears import ReplicatedLinear
from tests import host
from tests.host import small_config, start


def drawn(config):
    linear = ReplicatedLinear(8, 6, config=config, init_method=config.init_method)
    return linear.weight.detach().clone()


@pytest.mark.gpu
def test_weights_come_from_the_replicated_state():
    """transformer-engine's linears draw from it: one seed gives both the same weights."""
    start()
    from megatron.core.tensor_parallel import random

    config = small_config()
    random.model_parallel_cuda_manual_seed(11)
    tracker, name = random.get_cuda_rng_tracker(), random.get_data_parallel_rng_tracker_name()
    expected = [torch.empty_like(drawn(config)) for _ in range(2)]
    random.model_parallel_cuda_manual_seed(11)
    with tracker.fork(name):
        for tensor in expected:
            config.init_method(tensor)
    random.model_parallel_cuda_manual_seed(11)
    found = [drawn(config), drawn(config)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(*found)


@pytest.mark.gpu
def test_the_usual_state_is_left_alone():
    start()
    config = small_config()
    device = drawn(config).device
    torch.manual_seed(3)
    expected = torch.rand(4, device=device)
    torch.manual_seed(3)
    drawn(config)
    assert torch.equal(torch.rand(4, device=device), expected)


@pytest.mark.parametrize("batch", ["packed", "unpacked"])
@pytest.mark.parametrize("kind", ["dsa", "csa"])
def test_no_tensor_becomes_text(kind, batch, monkeypatch):
    """A message built in advance would synchronise every step, or end a capture."""
    config = host.small_config() if kind == "dsa" else host.small_csa_config(4)
    module = host.attention_module(config)
    x = host.hidden_like(module, 40)
    documents = host.packed(17, 23) if batch == "packed" else None

    def text(tensor, *_):
        raise AssertionError(f"text of a tensor of shape {tuple(tensor.shape)}")

    for name in ("__format__", "__repr__", "__str__"):
        monkeypatch.setattr(torch.Tensor, name, text)
    out, _ = module(x, packed_seq_params=documents)
    out.sum().backward()
