"""Values kept with CUDA graphs."""

from unittest import mock

import pytest
import torch

from megatron_dsa.layers import from_megatron
from megatron_dsa.ops.common import capture
from megatron_dsa.ops.common.capture import TensorCache, tensor_cache
from megatron_dsa.ops.layout import layout


@pytest.fixture
def graph():
    """Imitate a capture where set to ``True``."""
    state = {"on": False}
    with (
        mock.patch.object(capture, "capturing", lambda: state["on"]),
        mock.patch.object(layout, "capturing", lambda: state["on"]),
        mock.patch.object(from_megatron, "capturing", lambda: state["on"]),
    ):
        yield state


def test_nothing_is_captured_without_a_gpu():
    if not torch.cuda.is_available():
        assert not capture.capturing()


def test_the_latest_results_are_kept(graph):
    cache, made = TensorCache(2), []
    for key in (1, 2, 1, 3, 1, 2):
        cache.get(key, lambda key=key: made.append(key) or key)
    assert made == [1, 2, 3, 2]


def test_what_a_graph_has_looked_up_is_never_dropped(graph):
    cache = TensorCache(1)
    first = cache.get("first", lambda: torch.zeros(1))
    graph["on"] = True
    assert cache.get("first", lambda: torch.ones(1)) is first
    graph["on"] = False
    for key in range(3):
        cache.get(key, lambda: torch.zeros(1))
    cache.clear()
    assert cache.get("first", lambda: torch.ones(1)) is first


def test_what_a_graph_makes_is_not_kept(graph):
    made = []

    @tensor_cache(4)
    def numbers(count):
        made.append(count)
        return torch.arange(count)

    graph["on"] = True
    numbers(3), numbers(3)
    graph["on"] = False
    assert numbers(3) is numbers(3)
    assert made == [3, 3, 3]


def test_a_layout_outside_of_a_graph_keeps_nothing_of_one(graph):
    eager = layout.packed_layout(torch.tensor([0, 3, 8], dtype=torch.int32), 8)
    graph["on"] = True
    inside = layout.packed_layout(torch.tensor([0, 3, 8], dtype=torch.int32), 8)
    assert eager.slots_of_keys() is not eager.slots_of_keys()
    assert inside.slots_of_keys() is inside.slots_of_keys()
    graph["on"] = False
    kept = eager.slots_of_keys()
    graph["on"] = True
    assert eager.slots_of_keys() is kept


def test_a_graph_makes_the_layout_of_packed_sequences_itself(graph):
    """A layout of earlier steps has their lengths."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=lengths, max_seqlen_q=8)

    def found():
        return from_megatron.layout_from_megatron(8, 1, lengths.device, params)

    eager = found()
    lengths.copy_(torch.tensor([0, 5, 8]))
    graph["on"] = True
    captured = found()
    assert captured is not eager and captured is found()
    assert captured.start.tolist() == [0] * 5 + [5] * 3
    graph["on"] = False
    assert found() is eager
