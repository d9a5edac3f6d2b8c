"""A training step of a layer as one CUDA graph: the way ``graph``.

Forward and backward are captured by ``torch.cuda.graph``, like an iteration in Megatron's
``--cuda-graph-impl full_iteration``; Megatron's graphs of layers hold a whole transformer layer.
"""

import math
from collections.abc import Callable

import torch

from benchmarks.megatron_layer import SEED, Layer
from benchmarks.timing import Clock, Peak
from megatron_dsa.testing.comparison import relative_error

GRAPH = "graph"
#: On the stream of the capture, to compile kernels and build tables.
WARM_UP_STEPS = 3


class StepGraph:
    """Forward and backward of a layer as one CUDA graph.

    A replay reads input and weights in place, and accumulates gradients.

    Attributes:
        peak_mib: peak memory of the captured step, kept by the graph.
    """

    def __init__(self, layer: Layer, clock: Clock):
        for tensor in (layer.x, *layer.module.parameters()):
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                layer.step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog calls CUDA from its own thread.
        capture = torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
        with Peak(clock) as peak, capture:
            self._out = layer.step()
        self.peak_mib = peak.mib

    def replay(self) -> torch.Tensor:
        """Run the step; return its output, which the next replay overwrites."""
        self._graph.replay()
        return self._out


def largest_error(layer: Layer, replay: Callable[[], torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a replay against an uncaptured step, and its tensor.

    Compares output, input gradient and all weight gradients, with reversed tokens, so that stale
    results show.
    """
    with torch.no_grad():
        layer.x.copy_(layer.x.flip(0))
    leaves, found = {"x": layer.x, **dict(layer.module.named_parameters())}, []
    for run in (layer.step, replay):
        torch.manual_seed(SEED)  # the indexer's loss draws query tokens
        for leaf in leaves.values():
            leaf.grad.zero_()
        results = {"out": run().clone()}
        results |= {f"gradient of {name}": leaf.grad.clone() for name, leaf in leaves.items()}
        found.append(results)
    wanted, got = found
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[name], name


def checked_error(layer: Layer, graph: StepGraph, limit: float) -> float:
    """Return :func:`largest_error` of a graph.

    Raises:
        RuntimeError: it is above ``limit``.
    """
    error, name = largest_error(layer, graph.replay)
    if not error <= limit:
        reason = f"not the results of the uncaptured step: error {error:.3g} of {name}"
        raise RuntimeError(f"{reason} is above {limit}")
    return error
