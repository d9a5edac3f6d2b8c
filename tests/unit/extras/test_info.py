"""``info``: the calls of Megatron's configurations, and the verdict."""

from unittest import mock

import pytest
import torch

from megatron_dsa.extras import info
from tests.host import start


def megatron_config(name, options):
    """Return a training's configuration."""
    from megatron_dsa.config.presets import model_preset, preset

    return (model_preset if name.startswith("v4") else preset)(
        name, dsa=options, dsa_indexer_loss_coeff=0.01, params_dtype=torch.bfloat16,
        dsa_indexer_use_sparse_loss=options.stage == "sparse",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["v3.2", "glm-5", "v4-flash", "v4-pro"])
def test_calls_are_those_of_the_models(name):
    start()
    listed = info.model_ops(name)
    with mock.patch.object(info, "model_config", megatron_config):
        assert len(listed) > 10 and listed == info.model_ops(name)


def entry(fused):
    return {"fused": fused}


@pytest.mark.parametrize(
    ("operations", "verdict"),
    [
        ({"V3.2": {"a": entry(False)}, "V4": {"b": entry(False)}}, "torch runs everything"),
        ({"V3.2": {"a": entry(True)}, "V4": {"b": entry(True)}}, "fused kernels run all 2 "),
        (
            {"V3.2": {"a": entry(True), "c": entry(True)}, "V4": {"a": entry(False)}},
            "fused kernels run 1 of 2 operations, torch runs a",
        ),
    ],
)
def test_the_verdict(operations, verdict):
    found = {"gpus": [], "operations": operations, "megatron-core": {"problem": None}}
    assert info._verdict(found).startswith(f"CPU: {verdict}")
    found["gpus"] = [{"name": "NVIDIA H200"}]
    assert info._verdict(found).startswith(f"NVIDIA H200: {verdict}")
    found["megatron-core"]["problem"] = "megatron-core is not installed"
    assert info._verdict(found) == "NVIDIA H200: no training, megatron-core is not installed"
