"""Fixtures of several test files."""

import dataclasses

import pytest

from megatron_dsa import dispatch
from tests.helpers import skip_unless_it_runs


@pytest.fixture
def add(monkeypatch):
    """Add a candidate that wraps torch's: ``add(operation, wrap)`` with ``wrap(torch's) -> new``.

    It stands before the others as a fused implementation, called "made_up".
    """

    def add(operation, wrap, **support):
        (original,) = (c for c in dispatch.candidates(operation) if not c.fused)
        declared = {"deterministic": True} | support

        def load():
            before = original.load()
            new = wrap(before)
            if hasattr(before, "bytes_per_score"):
                new.bytes_per_score = before.bytes_per_score
            return new

        candidate = dataclasses.replace(
            original,
            name="made_up",
            fused=True,
            support=dataclasses.replace(original.support, **declared),
            load=load,
        )
        others = dispatch.candidates(operation)
        monkeypatch.setitem(dispatch._candidates, operation, [candidate, *others])
        dispatch._choose.cache_clear()

    yield add
    dispatch._choose.cache_clear()


@pytest.fixture
def hopper():
    """Skips where our own kernels cannot run."""
    (ours,) = (c for c in dispatch.candidates("sparse_attention_backward") if c.name == "tilelang")
    skip_unless_it_runs(ours)
