import pytest

from megatron_dsa.metrics.log import IndexerLog


@pytest.fixture(autouse=True)
def log():
    """Let models allocate the log for their layers."""
    IndexerLog._state.sums = None
    yield
    IndexerLog._state.sums = None
