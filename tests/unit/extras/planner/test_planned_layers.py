"""Planned memory of one attention layer, against peaks measured on a GPU."""

import gc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.layer.peers import build
from benchmarks.megatron_layer import LayerSpec
from benchmarks.rows import latest, read_csv
from megatron_dsa.extras.planner.host import META, host, ranks
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from tests import host as process

MEASURED = Path(__file__).resolve().parents[4] / "benchmarks" / "layer.csv"
ONE_GPU = SimpleNamespace(
    world_size=1, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None, context_parallel_size=1,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1,
    num_distributed_optimizer_instances=1,
)  # fmt: skip


#: Earlier measurements trained indexers on all query tokens.
SHARE_SINCE = "2026-11-28"


def planned_mib(way: str, spec: LayerSpec) -> float:
    """Return a step's peak above weights, input and gradients, like ``benchmarks/layer``."""
    nothing_is_drawn = SimpleNamespace(manual_seed=lambda _seed: None)
    with (
        host((9, 0)),
        ranks(ONE_GPU, 0),
        mock.patch.object(torch, "Generator", lambda _device: nothing_is_drawn),
    ):
        layer, _ = build(way, spec, META)
        before = [*layer.module.parameters(), *layer.module.buffers(), layer.x, layer.gradient]
        for tensor in (*layer.module.parameters(), layer.x):
            tensor.grad = torch.zeros_like(tensor)
            before.append(tensor.grad)
        gc.collect()
        tracker = MemoryTracker()
        tracker.ignore(*before)
        with tracker:
            layer.step()
    return tracker.peak / 2**20


def v32(heads: int, tokens: int, workspace_mib: int = 256, queries: float = 1.0) -> LayerSpec:
    return LayerSpec(
        "v3.2", tokens, heads=heads, sequence_length=tokens, workspace_mib=workspace_mib,
        indexer_loss_queries=queries,
    )  # fmt: skip


def measured_peak(way: str, **case) -> dict:
    """Return the last machine's measurement."""
    *_, row = (
        row for row in latest(read_csv(MEASURED))
        if (row["way"], row["part"], row["metric"]) == (way, "step", "peak_mib")
        and all(row["case"].get(name) == value for name, value in case.items())
    )  # fmt: skip
    return row


#: Way, heads and tokens, measured with present layers.
CASES = [
    ("ours-dense", 16, 4096), ("ours-dense", 16, 8192), ("dense", 128, 12288), ("dense", 64, 8192),
    ("dense", 16, 8192), ("dense", 16, 32768), ("sparse", 128, 12288), ("masked", 128, 12288),
    ("recomputed", 128, 12288), ("ours", 128, 131072), ("sparse", 16, 8192), ("masked", 16, 8192),
    ("recomputed", 16, 8192), ("sparse", 16, 32768), ("masked", 16, 32768),
    ("recomputed", 16, 32768), ("sparse", 16, 4096), ("masked", 16, 4096),
    ("ours", 128, 32768), ("sparse", 128, 4096), ("sparse", 128, 8192), ("sparse", 16, 131072),
    ("dense", 16, 131072), ("recomputed", 16, 131072), ("ours", 128, 4096), ("ours", 128, 8192),
    ("all-queries", 128, 8192), ("frozen", 128, 8192), ("ours", 128, 262144),
    ("recomputed", 128, 262144), ("recomputed", 128, 524288),
]  # fmt: skip
#: Measured before the backward recomputed index queries. To be measured again.
LESS_NOW = [("sparse", 64, 8192)]


@pytest.mark.parametrize(("way", "heads", "tokens"), CASES + LESS_NOW)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark's layer is for a CPU here")
def test_planned_is_measured(way, heads, tokens):
    pytest.importorskip("tilelang", reason="tilelang is not installed")
    process.stop()
    measured = measured_peak(way, preset="v3.2", heads=heads, tokens=tokens)
    queries = LayerSpec.indexer_loss_queries if measured["date"] >= SHARE_SINCE else 1.0
    planned = planned_mib(way, v32(heads, tokens, measured["case"]["workspace_mib"], queries))
    expected = pytest.approx(measured["value"], rel=0.03)
    assert planned <= 1.03 * measured["value"]
    if (way, heads, tokens) in LESS_NOW and planned != expected:
        pytest.xfail(f"{planned:.0f} MiB planned, {measured['value']:.0f} measured before: again")
    assert planned == expected


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(
    ("way", "tokens"), [("ours", 131072), ("recomputed", 131072), ("recomputed", 1048576)]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark's layer is for a CPU here")
def test_planned_is_measured_for_v4(way, tokens, ratio):
    pytest.importorskip("tilelang", reason="tilelang is not installed")
    process.stop()
    measured = measured_peak(way, preset="v4-flash", tokens=tokens, ratio=ratio)
    planned = planned_mib(way, LayerSpec("v4-flash", tokens, ratio, sequence_length=tokens))
    assert planned == pytest.approx(measured["value"], rel=0.01)


@pytest.mark.parametrize(
    ("way", "tokens", "most"),
    [
        ("masked", 8192, 1.1), ("masked", 32768, 1.1), ("sparse", 32768, 1.1),
        ("recomputed", 32768, 0.82), ("recomputed", 131072, 0.8),
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark's layer is for a CPU here")
def test_few_heads_take_the_memory_of_dense_attention(way, tokens, most):
    """With 16 heads, tensors of the indexer's 64 heads must not coexist."""
    pytest.importorskip("tilelang", reason="tilelang is not installed")
    process.stop()
    dense = planned_mib("dense", v32(16, tokens))
    assert dense / 2 < planned_mib(way, v32(16, tokens)) <= most * dense
