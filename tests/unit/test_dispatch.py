"""Dispatch: the choice, the reasons, one log line per operation, strictness, the report."""

import logging
import types

import pytest
import torch

from megatron_dsa import dispatch
from megatron_dsa.dispatch import CANDIDATES, OPERATIONS, Candidate, Policy, Problem, choose, run
from megatron_dsa.errors import FallbackError
from megatron_dsa.ops import packages

HOPPER = Problem("cuda", (9, 0), torch.bfloat16, heads=64, qk_dim=576, v_dim=512, topk=2048)
CPU = Problem("cpu", None, torch.bfloat16, heads=64, qk_dim=576, v_dim=512, topk=2048)


@pytest.fixture
def operation(monkeypatch):
    """A made-up operation with two fused candidates and the torch one."""
    choose.cache_clear()
    monkeypatch.setattr(dispatch, "_logged", set())
    candidates = [
        Candidate("first", True, lambda p: "no first", lambda: lambda: "first"),
        Candidate(
            "second", True, lambda p: None if p.device == "cuda" else "needs a GPU",
            lambda: lambda: "second",
        ),
        Candidate("torch", False, lambda p: None, lambda: lambda: "torch"),
    ]  # fmt: skip
    monkeypatch.setitem(CANDIDATES, "made_up", candidates)
    yield "made_up"
    choose.cache_clear()


def test_first_fused_candidate_that_can_run(operation):
    choice = choose(operation, HOPPER, Policy())
    assert choice.candidate.name == "second" and not choice.is_fallback
    assert choice.rejected == (("first", "no first"),)


def test_fallback_names_every_rejected_candidate_once(operation, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert run(operation, CPU, Policy()) == "torch"
        choose.cache_clear()
        choose(operation, CPU, Policy())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for part in (operation, "torch", "first: no first", "second: needs a GPU"):
        assert part in record.getMessage()


def test_unfused_is_no_fallback(operation, caplog):
    """Asked for torch, got torch: no warning, and strictness has nothing to refuse."""
    with caplog.at_level(logging.WARNING):
        assert run(operation, HOPPER, Policy(fused=False, strict=True)) == "torch"
    assert not caplog.records


def test_strict_refuses_a_fallback_with_all_reasons(operation):
    with pytest.raises(FallbackError, match=r"first: no first; second: needs a GPU"):
        choose(operation, CPU, Policy(strict=True))
    assert choose(operation, HOPPER, Policy(strict=True)).candidate.name == "second"


def test_report_counts_calls(operation):
    dispatch.reset_report()
    run(operation, HOPPER, Policy())
    run(operation, HOPPER, Policy())
    run(operation, CPU, Policy())
    assert dispatch.report()[operation] == {"second": 2, "torch": 1}
    dispatch.reset_report()
    assert dispatch.report() == {}


def test_every_operation_runs_everywhere():
    """Each operation has a torch implementation that takes any problem."""
    import megatron_dsa.ops  # noqa: F401

    odd = Problem("cpu", None, torch.float64, heads=3, qk_dim=7, v_dim=5, topk=1, packed=True)
    for name in OPERATIONS:
        assert callable(choose(name, odd, Policy(fused=False)).candidate.load()), name


@pytest.mark.parametrize(
    ("problem", "installed", "found", "message"),
    [
        (CPU, True, "2.0", "wrong GPU: kernels_x has kernels for compute capability 9.0"),
        (HOPPER, False, None, "missing: kernels_x is not installed; pip install x"),
        (HOPPER, True, "1.4.9", "too old: kernels-x 1.4.9 found, >= 1.5 needed; pip install x"),
        (HOPPER, True, "1.10", None),
    ],
)
def test_missing_too_old_and_wrong_gpu_are_three_messages(
    problem, installed, found, message, monkeypatch
):
    monkeypatch.setattr(packages, "installed_version", lambda _name: found)
    monkeypatch.setattr(
        packages.importlib.util,
        "find_spec",
        lambda _name: types.SimpleNamespace() if installed else None,
    )
    reason = packages.package_problem(
        problem, module="kernels_x", install="pip install x", capabilities=((9, 0),),
        distribution="kernels-x", minimum="1.5",
    )  # fmt: skip
    assert reason is None if message is None else reason.startswith(message)
