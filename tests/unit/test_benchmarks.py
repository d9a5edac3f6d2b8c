"""The attention benchmark: cases, index lists, FLOP counts, processes, CSV, charts."""

import csv
import dataclasses
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import attention, cases
from benchmarks.cases import PRESETS, Group, Measurement, make_indices, neighbour_share
from megatron_dsa.ops import OPERATIONS

SCRIPT = Path(attention.__file__)
DISTRIBUTIONS = ["random", "sorted", "clustered", "clustered:0.95", "clustered:0"]


# Cases


def test_groups_are_all_combinations():
    found = cases.groups(["v3.2", "tiny"], [8192, 32768], ["random"], 4096)
    assert found == [
        Group("v3.2", 4096, 8192, "random"),
        Group("v3.2", 4096, 32768, "random"),
        Group("tiny", 4096, 8192, "random"),
        Group("tiny", 4096, 32768, "random"),
    ]
    # One name for one distribution, or its rows would not be compared.
    assert cases.groups(["tiny"], [64], ["clustered"], 8) == [Group("tiny", 8, 64, "clustered:0.8")]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Group("v3.2", 64, 2047, "random"), "at least .* selected keys"),
        (Group("tiny", 64, 63, "random"), "at least the number of queries"),
        (Group("tiny", 8, 64, "uniform"), "a distribution must be"),
        (Group("tiny", 8, 64, "clustered:1"), "0 <= SHARE < 1"),
        (Group("tiny", 8, 64, "random:0.5"), "a distribution must be"),
    ],
)
def test_impossible_groups_are_refused_before_anything_runs(group, message, capsys):
    assert re.search(message, group.problem())
    with pytest.raises(SystemExit):
        attention.parse(
            ["--preset", group.preset, "--queries", str(group.queries), "--skv", str(group.skv),
             "--distribution", group.distribution]
        )  # fmt: skip
    assert re.search(message, capsys.readouterr().err)


def test_limits_of_groups_can_be_reached():
    for group in (Group("v3.2", 64, 2048, "clustered:0.5"), Group("tiny", 64, 64, "sorted")):
        assert group.problem() is None


KNOWN = {
    "indexer_scores": ["cudnn", "torch"],
    "indexer_topk": ["cudnn", "torch"],
    "sparse_attention_forward": ["flashmla", "torch"],
}


def test_measurements_combine_the_implementations_of_all_parts():
    found = cases.measurements(["topk", "forward"], KNOWN.__getitem__)
    assert [(m.operation, m.label) for m in found] == [
        ("gemm", "torch"),
        ("copy", "torch"),
        ("topk", "cudnn"),
        ("topk", "cudnn+torch"),
        ("topk", "torch+cudnn"),
        ("topk", "torch"),
        ("forward", "flashmla"),
        ("forward", "torch"),
    ]


@pytest.mark.parametrize(
    ("wanted", "labels"),
    [
        (["torch"], {"torch"}),
        (["cudnn"], {"cudnn", "cudnn+torch", "torch+cudnn"}),
        (["flashmla"], {"flashmla"}),
        (["flashmla", "torch"], {"flashmla", "torch"}),
    ],
)
def test_wanted_implementations(wanted, labels):
    found = cases.measurements(["topk", "forward"], KNOWN.__getitem__, wanted)
    assert {m.label for m in found if m.operation not in cases.CEILINGS} == labels


def test_every_part_is_an_operation_with_a_torch_implementation():
    """The benchmark's names are those of dispatch, and torch can always be measured."""
    for parts in cases.PARTS.values():
        for part in parts:
            assert "torch" in [candidate.name for candidate in OPERATIONS[part].candidates]


def test_flops_by_hand():
    v32, tiny = PRESETS["v3.2"], PRESETS["tiny"]
    # 2 * 4096 queries * 2048 keys * 128 heads = 2^31
    assert cases.flops("forward", v32, 4096, 8192) == 2**31 * 1088
    assert cases.flops("backward", v32, 4096, 131072) == 2**31 * 2752
    assert cases.flops("teacher", v32, 4096, 8192) == 2**31 * 576
    # 2 * 4096 queries * 2048 keys * 64 index heads * 128 dims, once forward and twice backward
    assert cases.flops("loss", v32, 4096, 8192) == 3 * 137_438_953_472
    # The last 3 of 5 tokens see 3, 4 and 5 keys; 4 index heads of 16 dims.
    assert cases.flops("topk", tiny, 3, 5) == 2 * (3 + 4 + 5) * 4 * 16
    # All pairs of a whole sequence
    assert cases.flops("topk", tiny, 10, 10) == 2 * 55 * 64


# Index lists


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("queries", "skv", "topk"), [(40, 300, 128), (100, 128, 128), (7, 9, 1)])
def test_rows_are_distinct_and_valid(distribution, queries, skv, topk):
    indices = make_indices(distribution, queries, skv, topk, "cpu", seed=3)
    assert indices.shape == (queries, topk) and indices.dtype == torch.int32
    assert indices.min() >= 0 and indices.max() < skv
    ascending = indices.sort(dim=1).values
    assert (ascending[:, 1:] > ascending[:, :-1]).all()
    assert torch.equal(ascending, indices) == (distribution != "random" or topk == 1)
    # The same seed gives the same lists, to every implementation in every process.
    assert torch.equal(indices, make_indices(distribution, queries, skv, topk, "cpu", seed=3))
    if topk < skv / 2:
        other = make_indices(distribution, queries, skv, topk, "cpu", seed=4)
        assert not torch.equal(indices, other)


def test_random_lists_are_uniform_over_all_keys():
    indices = make_indices("random", 2000, 60, 15, "cpu")
    counts = torch.bincount(indices.flatten().long(), minlength=60).double()
    # Binomial with mean 500 and standard deviation 19.4
    assert counts.min() > 500 - 5 * 19.4 and counts.max() < 500 + 5 * 19.4
    first = torch.bincount(indices[:, 0].long(), minlength=60).double()
    assert first.min() > 0 and first.max() < 33.3 + 6 * 5.7
    assert neighbour_share(indices) == pytest.approx(15 / 60, abs=0.01)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 0.999])
def test_clustered_lists(share):
    queries, skv, topk = 200, 1400, 256
    indices = make_indices(f"clustered:{share}", queries, skv, topk, "cpu")
    position = torch.arange(skv - queries, skv)[:, None]
    assert (indices <= position).all()
    # The most recent 64 are always there, the others are older.
    assert torch.equal(indices[:, -64:].long(), position - torch.arange(63, -1, -1))
    # 63 of the recent keys are shared; of the others, all but the slots that move.
    expected = (63 + share * (topk - 64)) / topk
    assert neighbour_share(indices) == pytest.approx(expected, abs=0.002)
    if share < 0.9:  # over time the lists reach nearly the whole past
        assert len(indices.unique()) > 0.9 * skv


def test_clustered_lists_of_queries_with_few_keys_before_them():
    """A query that cannot see 128 keys stands where it sees exactly 128."""
    indices = make_indices("clustered", 200, 200, 128, "cpu")
    assert torch.equal(indices[:128], torch.arange(128, dtype=torch.int32).expand(128, -1))
    assert (indices[128:] <= torch.arange(128, 200)[:, None]).all()


def test_neighbour_share_counts_sets():
    indices = torch.tensor([[0, 1, 2, 3], [3, 2, 9, 8], [4, 5, 6, 7]], dtype=torch.int32)
    assert neighbour_share(indices) == 2 / 8
    lists = make_indices("random", 30, 50, 20, "cpu")
    rows = [set(row) for row in lists.tolist()]
    shared = sum(len(a & b) for a, b in pairwise(rows))
    assert neighbour_share(lists) == pytest.approx(shared / (29 * 20))
    assert neighbour_share(lists[:1]) == 0


def test_chunks_cover_everything_once(monkeypatch):
    assert list(cases._chunks(5, 2)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(cases._chunks(2, 0)) == [slice(0, 1), slice(1, 2)]
    whole = make_indices("clustered", 50, 90, 16, "cpu")
    share = neighbour_share(whole)
    monkeypatch.setattr(cases, "_chunks", lambda total, size: iter(list(_pieces(total))))
    assert torch.equal(make_indices("clustered", 50, 90, 16, "cpu"), whole)
    assert neighbour_share(whole) == share


def _pieces(total):
    for first in range(0, total, 7):
        yield slice(first, min(total, first + 7))


# Processes and the CSV

TODO = [Measurement(name, ("torch",)) for name in ("gemm", "forward", "backward", "teacher")]

#: A child that plays the part of benchmarks.measure without measuring anything.
CHILD = """
import json, os, sys, time
request = json.load(sys.stdin)
def send(**event):
    print(json.dumps(event), flush=True)
{before}
send(event="environment", gpu="test GPU", torch="1.2")
for place, m in enumerate(request["measurements"]):
    send(event="start", place=place)
    if m["operation"] == "backward":
        print("illegal address", file=sys.stderr, flush=True)
        {end}
    send(event="done", place=place, status="ok", median_ms=2.0, tflops=50.0, rel_error=0.001)
{after}
"""


def run_with(tmp_path, *, before="", end="pass", after="", timeout=20):
    child = (sys.executable, "-c", CHILD.format(before=before, end=end, after=after))
    output = tmp_path / "rows.csv"
    attention.open_csv(output)
    run = attention.Run({"workspace_mib": 1}, output, timeout, child)
    run.group(Group("tiny", 8, 64, "random"), TODO)
    with output.open(newline="") as file:
        return {row["operation"]: row for row in csv.DictReader(file)}, run


@pytest.mark.parametrize(
    ("end", "timeout", "reason"),
    [
        ("os.abort()", 20, "process ended by signal 6: illegal address"),
        ("sys.exit(3)", 20, "process ended with 3: illegal address"),
        ("os.write(1, b'{'); os.abort()", 20, "process ended by signal 6: illegal address"),
        ("time.sleep(60)", 1, "no answer within 1 s (--timeout)"),
    ],
)
def test_a_death_costs_one_measurement(tmp_path, end, timeout, reason):
    rows, _ = run_with(tmp_path, end=end, timeout=timeout)
    assert list(rows) == [m.operation for m in TODO]
    assert rows["backward"]["status"] == "failed" and rows["backward"]["reason"] == reason
    for operation in ("gemm", "forward", "teacher"):
        assert rows[operation]["status"] == "ok"
    # The ceiling that was measured before the death still counts.
    assert rows["teacher"]["share_of_gemm"] == "1.0"
    assert {row["gpu"] for row in rows.values()} == {"test GPU"}


def test_a_child_that_never_starts_fails_all(tmp_path):
    rows, _ = run_with(tmp_path, before="sys.exit('no driver')")
    assert [row["status"] for row in rows.values()] == ["failed"] * 4
    assert {row["reason"] for row in rows.values()} == {"process ended with 1: no driver"}


def test_a_child_that_stops_early_is_replaced(tmp_path):
    """A fault that was reported leaves a process that cannot measure on: it ends by itself."""
    rows, _ = run_with(
        tmp_path, end="send(event='done', place=place, status='failed', reason='fault'); break"
    )
    assert rows["backward"]["reason"] == "fault" and rows["teacher"]["status"] == "ok"


def test_rows_follow_the_schema(tmp_path):
    rows, run = run_with(tmp_path)
    row = rows["forward"]
    assert tuple(row) == attention.COLUMNS
    expected = dataclasses.asdict(PRESETS["tiny"]) | {
        "preset": "tiny", "queries": 8, "skv": 64, "distribution": "random", "torch": "1.2",
        "implementation": "torch", "median_ms": 2.0, "date": run.date, "workspace_mib": 1,
    }  # fmt: skip
    for key in ("name", "softmax_scale"):
        del expected[key]
    assert {key: row[key] for key in expected} == {k: str(v) for k, v in expected.items()}


def test_csv_is_appended_to_or_refused(tmp_path):
    path = tmp_path / "rows.csv"
    attention.open_csv(path)
    attention.append_csv(path, {"preset": "tiny", "median_ms": 1 / 3})
    attention.open_csv(path)
    attention.append_csv(path, {"preset": "v3.2", "reason": "a, b"})
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["preset"], first["median_ms"]) == ("tiny", "0.33333")
    assert (second["preset"], second["reason"]) == ("v3.2", "a, b")
    with pytest.raises(ValueError, match="unknown_column"):
        attention.append_csv(path, {"unknown_column": 1})
    other = tmp_path / "other.csv"
    other.write_text("preset,speed\n")
    with pytest.raises(SystemExit, match=r"other columns .*speed.*name a new file"):
        attention.open_csv(other)
    assert other.read_text() == "preset,speed\n"


def test_summary_compares_with_the_best_peer():
    def row(operation, implementation, ms, status="ok"):
        return {
            "preset": "tiny", "skv": 64, "distribution": "random", "operation": operation,
            "implementation": implementation, "status": status, "median_ms": ms, "tflops": 1.0,
            "rel_error": 0.001,
        }  # fmt: skip

    lines = attention.summary(
        [
            row("gemm", "torch", 1.0),
            row("backward", "torch", 40.0),
            row("backward", "cudnn", 4.0),
            row("backward", "own", 2.0),
            row("forward", "torch", 3.0),
            row("forward", "flashmla", 0.1, status="failed"),
        ]
    )
    table = [(line.split()[0], *line.split()[4:6]) for line in lines[1:-1]]
    assert table == [
        ("2.000", "backward", "own"),
        ("1.000", "backward", "cudnn"),
        ("0.100", "backward", "torch"),
        ("1.000*", "forward", "torch"),
    ]
    assert lines[-1].startswith("* no peer")


@pytest.mark.parametrize(
    ("implementation", "peer"),
    [
        ("cudnn", True),
        ("cudnn+torch", True),
        ("torch", False),
        ("own", False),
        ("own+cudnn", False),
    ],
)
def test_peers(implementation, peer):
    assert attention.is_peer(implementation) == bool(peer)


# Charts


def chart_rows(path, gpu="GPU 9000", operations=tuple(cases.PARTS), speed=1.0):
    attention.open_csv(path)
    for skv in (8192, 32768):
        for operation in ("gemm", *operations):
            for implementation in ("torch",) if operation == "gemm" else ("cudnn", "torch"):
                attention.append_csv(
                    path,
                    {
                        "gpu": gpu, "torch": "2.11", "cuda": "13.0", "cudnn_frontend": "1.32",
                        "preset": "v3.2", "heads": 128, "qk_dim": 576, "v_dim": 512,
                        "topk": 2048, "queries": 4096, "skv": skv, "distribution": "random",
                        "operation": operation, "implementation": implementation,
                        "status": "ok", "tflops": 400.0,
                        "median_ms": speed * {"cudnn": 3, "torch": 9}[implementation],
                    },
                )  # fmt: skip
    attention.append_csv(path, {"gpu": gpu, "preset": "v4-pro", "status": "failed", "skv": 8192})


def test_charts(tmp_path):
    charts = pytest.importorskip("benchmarks.charts")
    path = tmp_path / "rows.csv"
    chart_rows(path)
    written = charts.draw_charts(path)
    assert [p.name for p in written] == ["rows_v3.2_tflops.png", "rows_v3.2_shares.png"]
    for chart in written:
        assert chart.read_bytes().startswith(b"\x89PNG") and chart.stat().st_size > 10_000
    chart_rows(path, gpu="Other (80 GB)", operations=["forward"])
    assert [p.name for p in charts.draw_charts(path)] == [
        "rows_v3.2_gpu-9000_tflops.png",
        "rows_v3.2_gpu-9000_shares.png",
        "rows_v3.2_other-80-gb_tflops.png",
    ]


def test_charts_show_the_last_run(tmp_path):
    charts = pytest.importorskip("benchmarks.charts")
    path = tmp_path / "rows.csv"
    chart_rows(path)
    chart_rows(path, speed=0.5)
    rows = charts.read_rows(path)
    assert len(rows) == 2 * (1 + 2 * 5)
    assert {row["median_ms"] for row in rows} == {1.5, 4.5}
    bars = dict(charts._bars(rows, list(cases.PARTS)))
    assert bars["8k keys, random, fastest"] == dict.fromkeys(cases.PARTS, 1.5)
    assert bars["32k keys, random, torch"] == dict.fromkeys(cases.PARTS, 4.5)
    assert charts._title(rows).startswith("v3.2: 128 heads, dims 576/512, K = 2048, 4096 queries")
    assert charts._title(rows).endswith("GPU 9000, torch 2.11, CUDA 13.0, cuDNN front end 1.32")


# The whole


def test_a_real_run(tmp_path):
    """Every operation of a tiny layer, through the torch implementation, as a user runs it."""
    output = tmp_path / "rows.csv"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--preset", "tiny", "--skv", "96", "--queries", "32",
         "--distribution", "clustered:0.5", "--impl", "torch", "--device", "cpu", "--repeats", "2",
         "--output", str(output)],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with output.open(newline="") as file:
        rows = {row["operation"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["gemm", "copy", *cases.PARTS]
    for operation, row in rows.items():
        assert row["status"] == "ok", (operation, row["reason"])
        assert float(row["median_ms"]) > 0 and row["implementation"] == "torch"
        if operation in cases.PARTS:
            work = cases.flops(operation, PRESETS["tiny"], 32, 96)
            seconds = float(row["median_ms"]) / 1e3
            assert float(row["tflops"]) == pytest.approx(work / seconds / 1e12, rel=1e-3)
            assert float(row["rel_error"]) < 4e-3
            assert float(row["neighbour_share"]) == pytest.approx((7 + 0.5 * 8) / 16, abs=0.05)
    assert float(rows["copy"]["tb_per_s"]) > 0
    assert "x best peer" in done.stdout and "rows are in" in done.stdout
