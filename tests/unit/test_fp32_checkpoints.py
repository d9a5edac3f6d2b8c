"""Megatron's optimizer with a mix of bf16 and fp32 parameters in one group."""

import torch

from tests.host import start


def optimizer_of(*values):
    """Megatron's mixed-precision optimizer over [fp32, bf16, bf16] parameters of equal shape."""
    start()
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from megatron_dsa.fp32_checkpoints import repair_checkpoints_of_fp32_parameters

    repair_checkpoints_of_fp32_parameters()
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
    """``--ckpt-format torch`` saves through state_dict(), which names 16-bit parameters alone."""
    saved, _ = optimizer_of(10, 11, 12)
    loaded, parameters = optimizer_of(0, 1, 2)
    loaded.load_state_dict(saved.state_dict())
    assert masters(loaded)[1:] == [11.0, 12.0]
    # The fp32 parameter comes from the model's own state, not from here.
    assert float(parameters[0].detach()[0]) == 0.0
