"""A caller's teacher without probabilities is rejected; layers' teachers are not checked."""

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.dsa_kernels import IndexerInputs, sparse_indexer_loss
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras import torch_library as torch_ops
from megatron_dsa.ops.layout.layout import bshd_layout
from tests.helpers import check_device_assert, leaf, never_waits
from tests.host import attention_module, hidden_like, small_config, small_csa_config

TOKENS, TOPK = 48, 5


def through_layout(inputs, indices, teacher):
    layout = bshd_layout(TOKENS, 1, indices.device)
    return sparse_indexer_loss(inputs, indices, teacher, layout)


def through_torch(inputs, indices, teacher):
    return torch_ops.sparse_indexer_loss(inputs.q, inputs.k, inputs.weights, indices, teacher)


def draw(device="cpu"):
    """Return the indexer's tensors, lists whose last entry is no key, and a teacher."""
    shapes = (TOKENS, 3, 8), (TOKENS, 8), (TOKENS, 3)
    inputs = IndexerInputs(*(leaf(*shape, seed=i, device=device) for i, shape in enumerate(shapes)))
    indices = torch.arange(TOPK, device=device, dtype=torch.int32).repeat(TOKENS, 1)
    indices[:, -1] = -1
    return inputs, indices, torch.full((TOKENS, TOPK), 0.5, device=device)


@pytest.mark.parametrize("call", [through_layout, through_torch])
@pytest.mark.parametrize("entry", [0, TOPK - 1])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (-0.25, "-0.25 to 0.5"),  # the sum is above 0
        (-10.0, "-10 to 0.5"),  # and below
        (float("nan"), "nan to nan"),
        (float("inf"), "0.5 to inf"),
    ],
)
def test_refused(call, entry, value, told):
    inputs, indices, teacher = draw()
    assert call(inputs, indices, teacher).isfinite()
    teacher[7, entry] = value
    with pytest.raises(ConfigError, match=f"teacher must have no .*, got {told}: pass p_sum"):
        call(inputs, indices, teacher)


@pytest.mark.parametrize("call", [through_layout, through_torch])
def test_zeros_and_empty_lists_are_fine(call):
    inputs, indices, teacher = draw()
    assert call(inputs, indices, -0.0 * teacher) == 0
    assert call(inputs, indices[:, :0], teacher[:, :0]) == 0


@pytest.mark.parametrize("make", [small_config, lambda **x: small_csa_config(4, **x)])
def test_layers_do_not_look(make, monkeypatch):
    """Their teacher is a sum of probabilities, in training and in evaluation."""
    module = attention_module(make(options=DSAOptions(evaluate_indexer=True))).train()
    x = hidden_like(module, 96)

    def aminmax(*args, **kwargs):
        raise AssertionError("the teacher was read")

    monkeypatch.setattr(torch.Tensor, "aminmax", aminmax)
    module(x, None)[0].sum().backward()
    module.eval()(x, None)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [through_layout, through_torch])
def test_nothing_waits_for_the_gpu(call):
    arguments = draw("cuda")
    never_waits(lambda: call(*arguments).backward())
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_the_gpu_asserts():
    program = """
        import torch
        from megatron_dsa.extras.torch_library import sparse_indexer_loss

        shapes = (48, 3, 8), (48, 8), (48, 3), (48, 5)
        *inputs, teacher = (torch.ones(shape, device="cuda") for shape in shapes)
        indices = torch.arange(5, device="cuda", dtype=torch.int32).repeat(48, 1)
        sparse_indexer_loss(*inputs, indices, teacher)
        torch.cuda.synchronize()
        print("fine", flush=True)
        teacher[7, 2] = -0.25
        sparse_indexer_loss(*inputs, indices, teacher)
        torch.cuda.synchronize()
        print("not seen", flush=True)
    """
    check_device_assert(program, "teacher must have no entry that is negative, NaN or infinite")
