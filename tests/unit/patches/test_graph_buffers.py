"""Memory of a CUDA graph's inputs and outputs between forward and backward capture.

Gradients are checked in ``test_captured.py``, on a GPU with transformer-engine.
"""

import types

import pytest
import torch
from megatron.core.transformer import cuda_graphs

from megatron_dsa.layers.cuda_graphs import GraphedLayer
from megatron_dsa.patches.graph_buffers import keep_graph_buffers_until_backward


@pytest.fixture
def released(monkeypatch):
    """Megatron's unpatched runner, and the buffers that it freed."""
    buffers = []
    runner = cuda_graphs._CudaGraphRunner
    release = runner._weakref_forward_buffers
    release = getattr(release, "__wrapped__", release)  # another test may have patched it
    monkeypatch.setattr(runner, "_weakref_forward_buffers", release)
    monkeypatch.setattr(cuda_graphs, "make_weakref", lambda x: buffers.append(x) or x)
    keep_graph_buffers_until_backward.cache_clear()
    yield buffers
    keep_graph_buffers_until_backward.cache_clear()


def captured():
    """Return a runner's buffers of a layer whose norm saved its input natively."""
    x = torch.ones(3, requires_grad=True)
    x.cg_buffer_metadata = cuda_graphs.CudagraphBufferMetadata(is_cudagraph_input=True)
    return types.SimpleNamespace(
        fwd_graph_input_surface=[x], fwd_graph_input_args=[], fwd_graph_input_kwargs={},
        fwd_graph_outputs=[], fwd_graph_output_surface=[],
    )  # fmt: skip


@pytest.mark.parametrize("patched", [False, True])
def test_inputs_stay_until_the_backward_pass_is_captured(patched, released):
    if patched:
        keep_graph_buffers_until_backward()
        keep_graph_buffers_until_backward()
    runner = captured()
    release = cuda_graphs._CudaGraphRunner._weakref_forward_buffers
    release(runner, preserve_forward_to_backward_lifetimes=True)
    assert len(released) == (0 if patched else 1)
    released.clear()
    release(runner, preserve_forward_to_backward_lifetimes=False)
    assert len(released) == 1 and released[0] is runner.fwd_graph_input_surface[0]


def test_a_captured_layer_installs_it(released, monkeypatch):
    before = cuda_graphs._CudaGraphRunner._weakref_forward_buffers
    monkeypatch.setattr(GraphedLayer.__mro__[1], "create_mcore_cudagraph_manager", lambda *_: None)
    layer = GraphedLayer.__new__(GraphedLayer)
    config = types.SimpleNamespace(cuda_graph_impl="local", cuda_graph_modules=[])
    GraphedLayer.create_mcore_cudagraph_manager(layer, config)
    assert cuda_graphs._CudaGraphRunner._weakref_forward_buffers.__wrapped__ is before
