"""The family ``connections``: widths, plain expressions, checks that find errors."""

import pytest
import torch

from benchmarks.connections import eager, operations
from benchmarks.connections.layers import CHANNELS
from benchmarks.connections.operations import (
    Job,
    expression,
    inputs_of,
    measure_operation,
    outputs_of,
)
from benchmarks.megatron_layer import MODELS
from benchmarks.settings import Settings
from benchmarks.timing import Clock
from megatron_dsa.config.presets import PRESETS
from megatron_dsa.ops.hyper_connections import spec
from megatron_dsa.ops.hyper_connections.spec import Connection, ReadInputs, WriteInputs
from tests.helpers import relative_error

CPU = torch.device("cpu")
TOKENS, WIDTH = 6, 16


@pytest.mark.parametrize("preset", ["v4-flash", "v4-pro"])
def test_widths_are_those_of_the_models(preset):
    assert CHANNELS[preset] == PRESETS[MODELS[preset]]["hidden_size"]


@pytest.mark.parametrize("operation", operations.OPERATIONS)
def test_expressions_equal_the_reference(operation):
    job = Job(f"{operation}_forward", TOKENS, WIDTH, "compiled", 0)
    tensors = [x.detach().double() for x in inputs_of(job, CPU)]
    if operation == "write":
        inputs = WriteInputs(*tensors, 0)
    else:
        x, *parameters, weight = tensors
        numbers = operations.EPS, operations.EPS, operations.ITERATIONS
        inputs = ReadInputs(x, Connection(*parameters, *numbers), weight, 0)
    got = outputs_of(job, expression(job), tensors)
    wanted = outputs_of(job, lambda *_: getattr(spec, f"reference_{operation}")(inputs), tensors)
    # What a layer reads is rounded to bf16 in the expressions alone.
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape and relative_error(one, other) < 3e-3


@pytest.mark.parametrize("part", operations.TRAFFIC)
def test_a_wrong_result_is_found(part, monkeypatch):
    job = Job(part, TOKENS, WIDTH, "torch", 2**20)
    settings = Settings("cpu", repeats=1, budget=0.1)
    good = measure_operation(job, CPU, Clock(CPU), settings)
    assert good["status"] == "ok" and good["tb_per_s"] > 0
    plain = getattr(eager, job.operation)

    def wrong(*arguments):
        found = plain(*arguments)
        return (found[0] * 1.1, *found[1:]) if isinstance(found, tuple) else found * 1.1

    monkeypatch.setattr(eager, job.operation, wrong)
    bad = measure_operation(job, CPU, Clock(CPU), settings)
    assert bad["status"] == "failed" and "wrong result" in bad["reason"]


@pytest.mark.parametrize("part", operations.TRAFFIC)
def test_as_many_tokens_as_channels(part, monkeypatch):
    """Parameters are not cut to the tokens that are checked."""
    monkeypatch.setattr(operations, "CHECKED_TOKENS", 4)
    job = Job(part, WIDTH, WIDTH, "torch", 2**20)
    row = measure_operation(job, CPU, Clock(CPU), Settings("cpu", repeats=1, budget=0.1))
    assert row["status"] == "ok", row["reason"]
