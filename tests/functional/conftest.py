"""A small real data set, shared by all functional tests of a session."""

import subprocess
import sys

import pytest
import torch


def ranks_available() -> int:
    """Processes that can run at once: any number on the CPU, one per GPU otherwise."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 8


@pytest.fixture(autouse=True)
def enough_ranks(request):
    """Skip a case that needs more GPUs than there are (marker ``ranks(n)``)."""
    marker = request.node.get_closest_marker("ranks")
    if marker and marker.args[0] > ranks_available():
        pytest.skip(f"needs {marker.args[0]} GPUs, {ranks_available()} here")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """``--data-path`` of Python's own documentation as byte tokens."""
    prefix = tmp_path_factory.mktemp("data") / "topics"
    subprocess.run(
        [sys.executable, "-m", "megatron_dsa", "prepare-data", "--output", str(prefix)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return str(prefix)
