"""Optimizers of bf16 layers with fp32 parameters: every parameter's own state is saved."""

import pytest
import torch

from tests.cases.optimizers import check_moments, mixed
from tests.host import start


@pytest.fixture
def model_and_optimizer(request):
    return mixed(request.param)


@pytest.mark.parametrize("model_and_optimizer", [True], indirect=True, ids=["distributed"])
def test_distributed_optimizer(model_and_optimizer):
    module, optimizer = model_and_optimizer
    for name, parameter in module.named_parameters():
        states = optimizer._get_main_param_and_optimizer_states(parameter)
        # One process has whole parameters; Adam's first moment is a tenth of the gradient.
        gradient = parameter.main_grad.flatten().float()
        assert torch.allclose(states["exp_avg"], 0.1 * gradient, rtol=1e-5), name
        assert states["param"].to(parameter.dtype).equal(parameter.detach().flatten()), name
        ones = {key: torch.ones_like(value) for key, value in states.items()}
        optimizer._set_main_param_and_optimizer_states(parameter, ones)
        states = optimizer._get_main_param_and_optimizer_states(parameter)
        assert all(value.eq(1).all() for value in states.values()), name
        if parameter.dtype == torch.float32:
            assert parameter.eq(1).all(), name


@pytest.mark.parametrize("model_and_optimizer", [True], indirect=True, ids=["distributed"])
def test_precision_aware_optimizer(model_and_optimizer, monkeypatch):
    """transformer-engine's Adam copies all parameters, and updates the 16-bit ones."""
    module, optimizer = model_and_optimizer
    inner = optimizer.optimizer
    for parameter, state in inner.state.items():
        state["master_param"] = torch.zeros_like(parameter)
    unscaled = lambda parameter, name: inner.state[parameter][name]  # noqa: E731
    monkeypatch.setattr(inner, "get_unscaled_state", unscaled, raising=False)
    aware = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    monkeypatch.setattr(optimizer.config, aware, True)
    for name, parameter in module.named_parameters():
        saved = optimizer._get_main_param_and_optimizer_states(parameter)["param"]
        if parameter.dtype == torch.float32:
            assert saved.equal(parameter.detach().flatten()) and saved.any(), name
        else:
            assert not saved.any(), name


@pytest.mark.parametrize("model_and_optimizer", [False], indirect=True, ids=["plain"])
def test_plain_optimizer(model_and_optimizer):
    module, optimizer = model_and_optimizer
    state = check_moments(module, optimizer)
    # Equal names in every version, so that each resumes from the others.
    copies = {entry.key for entries in state["fp32_from_fp16_params"] for entry in entries}
    assert copies == {
        f"optimizer.state.fp32_param.layer.{name}"
        for name, parameter in module.named_parameters() if parameter.dtype == torch.bfloat16
    }  # fmt: skip


def optimizer_of(*values):
    """Return Megatron's mixed-precision optimizer over [fp32, bf16, bf16] parameters of equal
    shape.
    """
    start()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from megatron_dsa.patches import install

    install("fp32 checkpoints, plain")
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    parameters = [
        torch.nn.Parameter(torch.full((2,), float(v), dtype=d))
        for v, d in zip(values, dtypes, strict=True)
    ]
    for parameter in parameters:
        parameter.main_grad = torch.zeros(2)
    inner = torch.optim.Adam(parameters)
    wrapped = Float16OptimizerWithFloat16Params(
        inner, OptimizerConfig(bf16=True, optimizer="adam"), None, lambda *_: None
    )
    return wrapped, parameters


def masters(optimizer):
    return [
        float(p.detach()[0]) for group in optimizer.optimizer.param_groups for p in group["params"]
    ]


def test_plain_state_dicts_round_trip():
    """``--ckpt-format torch`` saves through state_dict(), which names 16-bit parameters only."""
    saved, _ = optimizer_of(10, 11, 12)
    loaded, parameters = optimizer_of(0, 1, 2)
    loaded.load_state_dict(saved.state_dict())
    assert masters(loaded)[1:] == [11.0, 12.0]
    # The fp32 parameter comes from the model's state.
    assert float(parameters[0].detach()[0]) == 0.0
