"""The redirection of CUDA without a GPU is installed once, and never inside of a temporary
context.
"""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from megatron_dsa.errors import DSAError
from megatron_dsa.extras.planner.host import host
from megatron_dsa.patches import cpu_host
from tests.host import start

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no shims")


def test_activating_again_changes_nothing():
    start()
    modes, stream = _get_current_function_mode_stack(), torch.cuda.current_stream
    cpu_host.activate()
    assert _get_current_function_mode_stack() == modes
    assert torch.cuda.current_stream is stream
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    with host(None, torch.device("cpu")):
        assert torch.zeros(1, device="cuda").type() == "torch.cuda.FloatTensor"
    assert _get_current_function_mode_stack() == modes


def test_it_is_refused_inside_of_a_context_that_ends(monkeypatch):
    start()
    monkeypatch.setattr(cpu_host, "_install", functools.cache(cpu_host._install.__wrapped__))

    def first_inside():
        with host(None), pytest.raises(DSAError, match="call it before"):
            cpu_host.activate()
        return _get_current_function_mode_stack()

    with ThreadPoolExecutor(1) as other:  # with an empty stack
        assert other.submit(first_inside).result() == []
