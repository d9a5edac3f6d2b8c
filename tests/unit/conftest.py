"""Fixtures of several test files."""

from dataclasses import replace

import pytest

from megatron_dsa.ops import OPERATIONS, dispatch
from megatron_dsa.ops.sparse_attention.spec import BACKWARD
from tests.helpers import MadeUp, skip_unless_it_runs


@pytest.fixture
def add(monkeypatch):
    """Add a candidate that wraps torch's: ``add(operation, wrap)`` with ``wrap(torch's) -> new``.

    It precedes the others as a fused implementation called "made_up".
    """

    def add(name, wrap, **support):
        operation = OPERATIONS[name]
        original = operation.candidates[-1]
        function = original.load()
        new = wrap(function)
        if hasattr(function, "bytes_per_score"):
            new.bytes_per_score = function.bytes_per_score
        declared = replace(original.support, **{"deterministic": True} | support)
        made_up = MadeUp("made_up", "", declared, True, new)
        monkeypatch.setattr(operation, "candidates", (made_up, *operation.candidates))
        dispatch.forget_choices()

    yield add
    dispatch.forget_choices()


@pytest.fixture
def fused(add, request):
    """Make operations fused on every device: the named ones, or the test module's."""

    def make(*names, **support):
        for name in names or [operation.name for operation in request.module.OPERATIONS]:
            add(name, lambda torchs: torchs, **support)

    return make


@pytest.fixture
def hopper():
    """Skip if our kernels cannot run."""
    (ours,) = (c for c in BACKWARD.candidates if c.name == "tilelang")
    skip_unless_it_runs(ours)
