"""The benchmark of hybrid attention: cases, traffic, plain expressions, traces, a tiny run."""

import csv
import json
import sys
import time

import pytest
import torch

from benchmarks import attention, hybrid, hybrid_layer, hybrid_measure, hybrid_pieces, timing
from benchmarks.cases import PRESETS
from benchmarks.hybrid import SHAPES, Case
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.compressor import reference as compressor_reference
from megatron_dsa.ops.compressor.inputs import CompressorInputs
from megatron_dsa.ops.key_lists import reference as lists_reference
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.rope import reference as rope_reference
from megatron_dsa.presets import PRESETS as MODELS
from megatron_dsa.sequence.compressed import compressed_keys
from megatron_dsa.sequence.layout import bshd_layout
from tests.helpers import relative_error
from tests.host import start

CPU = torch.device("cpu")

# Cases


@pytest.mark.parametrize("preset", ["v4-flash", "v4-pro"])
def test_shapes_are_those_of_the_models(preset):
    shape, model = SHAPES[preset], MODELS[hybrid_layer.MODELS[preset]]
    assert shape.heads == model["num_attention_heads"] == PRESETS[preset].heads
    assert shape.dim == model["v_head_dim"] == PRESETS[preset].qk_dim
    assert shape.index_dim == model["dsa_indexer_head_dim"]
    assert shape.rope == model["qk_pos_emb_head_dim"]
    assert shape.topk == model["dsa_indexer_topk"]
    assert shape.window == model["csa_window_size"]
    assert shape.topk + shape.window == PRESETS[preset].topk


def test_cases_of_a_full_run():
    cases = hybrid.parse([]).cases
    assert cases[0] == Case("pieces", "", "copy", "torch")
    assert len(cases) == len(set(cases))
    found = {(c.operation, c.rows, c.heads) for c in cases if c.operation == "norm_rope_backward"}
    # 65536 rows of 128 heads would need several tensors of 8.6 GB.
    assert found == {("norm_rope_backward", rows, heads) for rows, heads in
                     ((4096, 64), (16384, 64), (65536, 64), (4096, 128), (16384, 128))}  # fmt: skip
    compressors = [c for c in cases if c.operation == "compressor_forward" and c.rows == 4096]
    assert [(c.ratio, c.dim, c.overlap) for c in compressors[::3]] == [
        (4, 512, True), (4, 128, True), (128, 512, False)
    ]  # fmt: skip
    assert [c.implementation for c in compressors[:3]] == ["triton", "torch", "eager"]
    lists = [(c.ratio, c.topk) for c in cases if c.operation == "key_lists" and c.rows == 4096]
    assert lists[::3] == [(0, None), (4, 512), (128, None), (4, 1024)]
    layers = [c for c in cases if c.part == "layers"]
    assert len(layers) == 2 * 2 * 3 * 3
    # The first preset is complete before the second begins, its fused layers first.
    assert [c.preset for c in layers] == ["v4-flash"] * 18 + ["v4-pro"] * 18
    assert [c.implementation for c in layers[:18]] == ["fused"] * 9 + ["unfused"] * 9


def test_parts_and_implementations_can_be_chosen():
    cases = hybrid.parse(["layers", "--impl", "unfused", "--rows", "4096"]).cases
    assert {(c.part, c.implementation, c.rows) for c in cases} == {("layers", "unfused", 4096)}
    cases = hybrid.parse(["pieces", "--impl", "fused", "--preset", "v4-pro"]).cases
    assert {c.implementation for c in cases[1:]} == {"triton"}
    assert {c.heads for c in cases} == {None, 128}


def test_rows_that_leave_a_tail_are_refused(capsys):
    with pytest.raises(SystemExit):
        hybrid.parse(["--rows", "4096", "200"])
    assert "multiples of 128, got 200" in capsys.readouterr().err


def test_implementations_exist():
    for operation in ("compressor", "norm_rope", "rotate", "key_lists"):
        assert {"triton", "torch"} <= {c.name for c in OPERATIONS[operation].candidates}


# Pieces


@pytest.mark.parametrize(
    ("operation", "fields", "width", "expected"),
    [
        # values and scores of two halves of 512 in bf16, 1024 pooled keys
        ("compressor_forward", {"ratio": 4, "dim": 512}, None, 4096 * 4096 + 1024 * 1024),
        ("compressor_backward", {"ratio": 4, "dim": 512}, None, 8192 * 4096 + 1024 * 1024),
        ("compressor_forward", {"ratio": 4, "dim": 128}, None, 4096 * 1024 + 1024 * 256),
        ("compressor_backward", {"ratio": 128, "dim": 512}, None, 4 * 4096 * 1024 + 32 * 1024),
        ("norm_rope_forward", {"heads": 64, "dim": 512}, None, 2 * 4096 * 2**16),
        ("norm_rope_backward", {"heads": 64, "dim": 512}, None, 3 * 4096 * 2**16),
        ("rotate_forward", {"heads": 128, "dim": 512}, None, 2 * 4096 * 2**17),
        ("key_lists", {"ratio": 4, "topk": 512}, 640, 4 * 4096 * 640),
    ],
)
def test_bytes_by_hand(operation, fields, width, expected):
    case = Case("pieces", "v4-flash", operation, "torch", 4096, **fields)
    assert hybrid_pieces.necessary_bytes(case, width) == expected


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False)])
def test_eager_compressor(ratio, overlap):
    rows, dim = 64, 6
    width = dim * (2 if overlap else 1)
    values, scores, ape = normal(rows, width), normal(rows, width, seed=1), normal(ratio, width)
    groups = compressed_keys(bshd_layout(rows, 1, CPU), ratio).groups
    expected = compressor_reference.compress(
        CompressorInputs(values, scores, ape, groups, ratio, overlap, 2**20)
    )
    found = hybrid_pieces.eager_compress(values, scores, ape, ratio, overlap)
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("inverse", [False, True])
def test_eager_rope(inverse):
    x, angles = normal(5, 3, 12), normal(5, 4)
    tables = angles.cos(), angles.sin()
    found = hybrid_pieces.eager_rotate(x, *tables, inverse)
    assert relative_error(found, rope_reference.rotate(x, *tables, inverse)) < 1e-12
    found = hybrid_pieces.eager_norm_rope(x, *tables, 1e-3)
    assert relative_error(found, rope_reference.norm_rope(x, *tables, 1e-3)) < 1e-12


@pytest.mark.parametrize(("ratio", "topk"), [(0, None), (4, 5), (16, None)])
def test_eager_key_lists(ratio, topk):
    rows, window = 64, 7
    layout = bshd_layout(rows, 1, CPU)
    keys = compressed_keys(layout, ratio) if ratio else None
    selected = length = None
    if topk:
        selected, length = hybrid_pieces.random_selection(rows, topk, ratio, CPU)
        visible = (torch.arange(rows) + 1) // ratio
        assert torch.equal(length, visible.clamp_max(topk).int())
        assert (selected < visible[:, None]).all() and ((selected >= 0).sum(1) == length).all()
    lists = KeyLists(layout, window, keys, selected, length)
    indices, count = lists_reference.build(lists._inputs(slice(0, rows)))
    offset = keys.count if ratio else 0
    slots = 0 if topk else offset
    found, found_count = hybrid_pieces.eager_key_lists(
        layout.position, window, offset, selected, ratio, slots
    )
    assert torch.equal(found[:, : indices.shape[1]], indices) and torch.equal(found_count, count)
    assert (found[:, indices.shape[1] :] < 0).all()


SETTINGS = {
    "device": "cpu", "repeats": 2, "budget": 1.0, "workspace_mib": 1, "ends_at": float("inf"),
}  # fmt: skip


def tiny_pieces(implementation):
    cases = hybrid.parse(["pieces", "--quick", "--impl", implementation]).cases[1:]
    return [pytest.param(case, id=f"{case.operation}-{case.ratio}-{case.dim}") for case in cases]


@pytest.mark.parametrize("case", tiny_pieces("unfused"))
def test_checks_find_errors(case):
    """Every output that a check looks at is enough to fail it."""
    make = {"c": hybrid_pieces.compressor_piece, "k": hybrid_pieces.lists_piece}
    piece = make.get(case.operation[0], hybrid_pieces.rope_piece)(case, CPU, SETTINGS)
    result = piece.call()
    assert piece.error(result) < 4e-3
    if case.operation == "key_lists":
        for part in (0, 1):
            wrong = [tuple(x.clone() for x in block) for block in result]
            wrong[-1][part][-1] += 1
            with pytest.raises(hybrid_pieces.WrongResult):
                piece.error(wrong)
        return
    outputs = result if isinstance(result, tuple) else (result,)
    for place in range(len(outputs)):
        wrong = [x.clone() for x in outputs]
        wrong[place] *= 1.05
        error = piece.error(tuple(wrong) if isinstance(result, tuple) else wrong[0])
        assert error > timing.ERROR_LIMIT


def test_lack_of_memory_skips_eager_only(monkeypatch):
    def fails(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hybrid_pieces, "rope_piece", fails)
    for name, status in (("eager", "skipped"), ("torch", "failed")):
        case = Case("pieces", "tiny", "rotate_forward", name, 256, heads=2, dim=32)
        (row,) = hybrid_measure.rows_of(case, CPU, SETTINGS)
        assert row["status"] == status


# Traces


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_kernels_belong_to_the_range_that_launched_them():
    events = [
        event("user_annotation", "megatron_dsa.sparse_attention_forward.flashmla", 100, 50),
        event("user_annotation", "megatron_dsa.key_lists.triton", 110, 10),
        event("gpu_user_annotation", "megatron_dsa.key_lists.triton", 400, 500),
        event("user_annotation", "megatron_dsa.compressor.triton", 10, 20),
        event("cpu_op", "_CompressBackward", 200, 50, **{"External id": 7}),
        event("cpu_op", "aten::mm", 300, 10),
        # Inside of an operation a matrix product is part of it.
        event("cpu_op", "aten::mm", 130, 10),
        event("cuda_runtime", "cudaLaunchKernel", 112, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 125, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 131, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 305, 1, correlation=5),
        event("cuda_runtime", "cudaMemsetAsync", 350, 1, correlation=6),
        event("cuda_driver", "cuLaunchKernelEx", 12, 1, correlation=8),
        # Long after its launch, and for some launches there is no event.
        event("kernel", "lists", 1000, 2.0, correlation=1),
        event("kernel", "attention", 1010, 30.0, correlation=2),
        event("kernel", "gemm", 1050, 4.0, correlation=3),
        event("kernel", "backward", 1060, 8.0, correlation=4, **{"External id": 7}),
        event("kernel", "gemm", 1070, 16.0, correlation=5),
        event("gpu_memset", "fill", 1090, 1.0, correlation=6),
        event("kernel", "pooling", 990, 5.0, correlation=8),
        {"ph": "M", "name": "process_name"},
    ]
    assert hybrid_layer.time_per_operation(events, on_gpu=True) == {
        "key_lists": (2.0, 1, {"triton"}),
        "sparse_attention_forward": (34.0, 2, {"flashmla"}),
        "compressor": (5.0, 1, {"triton"}),
        "compressor_backward": (8.0, 1, {"triton"}),
        "matrix products": (16.0, 1, set()),
        "other": (1.0, 1, set()),
    }


def test_own_times_add_up():
    events = [
        event("cpu_op", "a", 0, 100),
        event("cpu_op", "b", 0, 40),
        event("cpu_op", "c", 10, 20),
        event("cpu_op", "d", 50, 50),
        event("cpu_op", "e", 100, 5),
    ]
    times = list(hybrid_layer._own_times(events))
    assert times == [(0, 10), (0, 20), (10, 20), (50, 50), (100, 5)]
    assert hybrid_layer.time_per_operation(events, on_gpu=False) == {"other": (105.0, 5, set())}


# The whole


def served(arguments, device, **settings):
    """The events of a child for a command line."""
    cases = hybrid.parse(arguments).cases
    events = []
    hybrid_measure.serve(
        {"cases": [vars(case) for case in cases],
         "settings": SETTINGS | {"device": device} | settings},
        events.append,
    )  # fmt: skip
    return cases, events


#: Says what another process has said, which costs no imports.
REPLAY = "import sys; sys.stdin.read(); sys.stdout.write(open(sys.argv[1]).read())"


def recorded(tmp_path, cases, events):
    """The CSV rows that a run writes for these events."""
    said, output = tmp_path / "events", tmp_path / "rows.csv"
    said.write_text("".join(json.dumps(event) + "\n" for event in events))
    attention.open_csv(output, hybrid.COLUMNS)
    run = hybrid.Run(SETTINGS, output, 60, (sys.executable, "-c", REPLAY, str(said)))
    run.group(None, cases)
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(tuple(row) == hybrid.COLUMNS for row in rows)
    return rows, output


def test_pieces(tmp_path):
    rows, output = recorded(tmp_path, *served(["pieces", "--quick"], "cpu"))
    copy, *rows = rows
    assert copy["operation"] == "copy" and copy["status"] == "ok" and copy["rows"] == ""
    assert len(rows) == 3 * (6 + 3 + 3)
    for row in rows:
        if row["implementation"] == "triton":
            assert row["status"] == "skipped" and "this is the CPU" in row["reason"]
            continue
        assert row["status"] == "ok", row["reason"]
        assert float(row["rel_error"]) < 4e-3 and float(row["warm_up_s"]) >= 0
        speed = float(row["bytes"]) / float(row["median_ms"]) / 1e9
        assert float(row["tb_per_s"]) == pytest.approx(speed, rel=1e-3)
        share = speed / float(copy["tb_per_s"])
        assert float(row["share_of_copy"]) == pytest.approx(share, rel=1e-3)
        assert (row["preset"], row["rows"], row["repeats"]) == ("tiny", "256", "2")
        assert row["torch"] == torch.__version__ and row["triton"] and row["gpu"].startswith("CPU")
    widths = {row["ratio"]: row["width"] for row in rows if row["operation"] == "key_lists"}
    assert widths == {"0": "8", "4": "16", "128": "10"}
    charts = pytest.importorskip("benchmarks.charts").draw_hybrid(output)
    assert [chart.name for chart in charts] == ["rows_pieces.png"]
    assert charts[0].read_bytes().startswith(b"\x89PNG")


def test_layers(tmp_path):
    """Every layer, fused as far as the machine can; on the CPU that is torch for all."""
    device = start().type
    rows, output = recorded(tmp_path, *served(["layers", "--quick", "--impl", "fused"], device))
    by_ratio = {}
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert row["implementation"] == "fused" and float(row["median_ms"]) >= 0
        by_ratio.setdefault(row["ratio"], []).append(row)
    assert list(by_ratio) == ["0", "4", "128"]
    for ratio, (forward, step, *operations) in by_ratio.items():
        assert (forward["operation"], step["operation"]) == ("forward", "step")
        ran = dict(pair.split("=") for pair in step["ran"].split("; "))
        assert set(ran) <= set(OPERATIONS) and "sparse_attention_backward" in ran
        assert "sparse_attention_backward" not in forward["ran"]
        assert ("sparse_indexer_loss" in ran) == (ratio == "4")
        assert ("compressor" in ran) == (ratio != "0")
        found = {row["operation"].removeprefix("step/"): row for row in operations}
        # Of few rows all keys are selected without scores.
        assert {*ran, "norm_rope_backward", "rotate_backward", "other"} <= {*found}
        assert sum(float(row["share_of_time"]) for row in operations) == pytest.approx(1, abs=1e-3)
        for name in ran:
            assert found[name]["ran"] == ran[name]
    charts = pytest.importorskip("benchmarks.charts").draw_hybrid(output)
    assert [chart.name for chart in charts] == ["rows_tiny_layers.png"]


def test_unfused_layers_are_as_long_as_the_budget_allows(monkeypatch):
    clock = timing.Clock(CPU)
    case = Case("layers", "tiny", "forward", "unfused", 65536, 4)
    (row,) = hybrid_layer.layer_rows(case, CPU, clock, SETTINGS)
    assert row["status"] == "skipped" and "--budget 60" in row["reason"]
    monkeypatch.setattr(hybrid_layer, "Layer", lambda *_: 1 / 0)
    (row,) = hybrid_layer.layer_rows(case, CPU, clock, SETTINGS | {"budget": 60.0})
    assert row["status"] == "failed" and row["reason"] == "ZeroDivisionError: division by zero"


def test_slow_calls_are_repeated_less():
    calls = []
    row = hybrid_layer.measure_calls(
        lambda: calls.append(time.sleep(0.02)), timing.Clock(CPU), budget=0.01
    )
    assert row["repeats"] == 1 and len(calls) == 2 and row["median_ms"] >= 20
    row = hybrid_layer.measure_calls(lambda: time.sleep(1e-3), timing.Clock(CPU), budget=1.0)
    assert row["repeats"] == hybrid_layer.REPEATS


def test_what_there_is_no_time_for_is_recorded(tmp_path):
    rows, _ = recorded(tmp_path, *served(["--quick"], "cpu", ends_at=0.0))
    assert {row["status"] for row in rows} == {"skipped"}
    assert {row["part"] for row in rows} == {"pieces", "layers"}


def test_a_death_in_the_middle_of_a_case_keeps_its_rows(tmp_path):
    cases = hybrid.parse(["layers", "--quick"]).cases[:1]
    events = [
        {"event": "environment", "gpu": "test GPU"},
        {"event": "start", "place": 0},
        {"event": "row", "place": 0, "operation": "forward", "status": "ok", "median_ms": 1.0},
    ]
    rows, _ = recorded(tmp_path, cases, events)
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("ok", ""), ("failed", "process ended with 0")
    ]  # fmt: skip


def test_a_run_from_the_command_line(tmp_path):
    """The child that really runs: one case that needs no time."""
    output = tmp_path / "rows.csv"
    hybrid.main(["pieces", "--quick", "--total", "-1", "--device", "cpu", "--output", str(output)])
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1 + 3 * 12 and {row["status"] for row in rows} == {"skipped"}
