"""Fixtures of tests with several ranks."""

import pytest
import torch


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request):
    """Ranks on the CPU, and a GPU per rank; both have to equal one rank of their own kind.

    Cases of more ranks than there are GPUs are skipped where they would start.
    """
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} here")
    return request.param
