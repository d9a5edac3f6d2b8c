"""Fixtures of tests with several ranks."""

import pytest
import torch


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request):
    """Yield ranks on the CPU, and a GPU per rank; each must equal one rank of its kind.

    Cases with too few GPUs are skipped where they start.
    """
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} here")
    return request.param
