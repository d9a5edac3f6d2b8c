"""Muon's package, and settings that are meaningless without it."""

import importlib.util
import re
import types

import pytest

from megatron_dsa.ops.dispatch import packages
from megatron_dsa.ops.dispatch.packages import EMERGING_OPTIMIZERS

MUON = types.SimpleNamespace(
    optimizer="muon", dsa_muon_per_head="none", bf16=True,
    use_layer_wise_distributed_optimizer=True, lora_rank=None, fp16=False, save=None,
    use_distributed_optimizer=False,
)  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    """Return a function that imitates a version of the package, or none."""

    def pretend(version):
        spec = None if version is None else types.SimpleNamespace()
        monkeypatch.setattr(packages, "installed_version", lambda _name: version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)

    return pretend


def complaints(**changes):
    from megatron_dsa.training.flag_rules import ROWS, _optimizer_package

    args = types.SimpleNamespace(**(vars(MUON) | changes))
    rules = [
        row.check(args, case=case.format_map(vars(args)))
        for row, case, applies in ROWS
        if "{optimizer}" in case and applies(args)
    ]
    return [message for ok, message in (*rules, *_optimizer_package(args)) if not ok]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "missing: emerging_optimizers is not installed; pip install"),
        ("0.2.1", "too old: emerging-optimizers 0.2.1 found, >= 0.3 needed"),
    ],
)
@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon"])
def test_the_package_is_asked_for(version, message, optimizer, installed):
    installed(version)
    (complaint,) = complaints(optimizer=optimizer)
    assert complaint.startswith(f"--optimizer {optimizer} needs the package emerging-optimizers")
    assert message in complaint and "'emerging-optimizers>=0.3'" in complaint
    assert complaints(optimizer="adam") == []


def test_versions_that_can_be_used(installed):
    for version in ("0.3.0", "0.3.4"):
        installed(version)
        assert complaints() == [] and EMERGING_OPTIMIZERS.untested() is None
    installed("0.4.0")
    assert complaints() == [] and "newer than 0.3" in EMERGING_OPTIMIZERS.untested()


def test_settings_without_a_meaning(installed):
    installed("0.3.0")
    (complaint,) = complaints(bf16=False)
    assert "--bf16 is required with --use-distributed-optimizer and --optimizer muon" in complaint
    assert complaints(bf16=False, use_layer_wise_distributed_optimizer=False) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"optimizer": "sgd", "use_distributed_optimizer": True}, "with --optimizer sgd: .* adam"),
        ({"optimizer": "lion"}, "--use-distributed-optimizer is not .* with --optimizer lion"),
        ({"optimizer": "soap", "save": "there", "use_layer_wise_distributed_optimizer": False},
         "--save must be unset with --optimizer soap, got 'there'"),
        ({"optimizer": "lion", "fp16": True, "use_layer_wise_distributed_optimizer": False},
         "--fp16 is not supported with --optimizer lion"),
    ],
)  # fmt: skip
def test_optimizers_that_would_die_in_a_step_or_a_save(flags, message, installed):
    """Megatron's errors there name no flag."""
    installed("0.3.0")
    (complaint,) = complaints(**flags)
    assert re.search(message, complaint)
