import pytest

from megatron_dsa.metrics.log import IndexerLog


@pytest.fixture(autouse=True)
def log():
    """Models make room in the log for their own layers."""
    IndexerLog._state.sums = None
    yield
    IndexerLog._state.sums = None
