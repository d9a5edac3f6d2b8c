"""Fixtures for all tests. Memory that nobody wrote is poisoned, so that reading it shows."""

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items):
    """Skip GPU tests, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Let ``torch.empty`` and friends return NaN: an output that is not written cannot pass."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # This switch only fills memory in deterministic mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that this machine has."""
    return torch.device(request.param)
