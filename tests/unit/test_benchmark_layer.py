"""The benchmark of a whole layer: ways compute the same, failures are rows, break-even by hand."""

import csv
import importlib.util
import logging

import pytest
import torch

from benchmarks import layer, layer_summary, layer_ways
from benchmarks.hybrid_layer import PRODUCTS
from benchmarks.ranks_cases import Case
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS
from tests.helpers import relative_error
from tests.host import start

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tiny shapes are for the CPU")


def measured(tmp_path, *arguments):
    """Rows of a quick run, as a reader of the table gets them."""
    table = tmp_path / "layer.csv"
    layer.main(["--quick", "--repeats", "2", "--output", str(table), *arguments])
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames) == layer.COLUMNS
        return list(reader), table


def test_a_quick_run(tmp_path, capsys):
    rows, table = measured(tmp_path)
    steps = [row for row in rows if row["operation"] == "step"]
    assert [(row["rows"], row["way"]) for row in steps] == [
        ("64", "ours"), ("64", "dense"), ("128", "ours"), ("128", "dense"),
        ("64", "bundled"), ("128", "bundled"),
    ]  # fmt: skip
    for row in steps:
        assert row["status"] == "ok" and row["heads"] == "4" and row["repeats"] == "2"
        assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        speed = float(row["rows"]) / float(row["median_ms"]) * 1e3
        assert float(row["tokens_per_s"]) == pytest.approx(speed, rel=1e-3)
        assert row["torch"] == torch.__version__ and row["megatron_core"]
        assert (row["way"] == "ours") == (row["out_error"] == "")
        assert (row["way"] == "bundled") == (row["end_error"] != "")
    assert "sparse_attention_forward=torch" in steps[0]["ran"]
    assert "dense_attention=torch" in steps[1]["ran"]
    shares = [row for row in rows if row["operation"] != "step"]
    assert {row["way"] for row in shares} == {"ours"}
    assert {"step/indexer_topk", "step/sparse_attention_backward"} <= {
        row["operation"] for row in shares
    }
    for length in ("64", "128"):
        total = sum(float(row["share_of_time"]) for row in shares if row["rows"] == length)
        assert total == pytest.approx(1, rel=1e-3)
    assert "| dense / ours | bundled / ours | heads | tokens |" in capsys.readouterr().out
    if importlib.util.find_spec("matplotlib"):
        for name in ("time", "shares"):
            assert table.with_name(f"layer_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", ["dense", "bundled"])
def test_ways_are_the_same_layer(way):
    """As long as every key is selected; the gradients of the indexer as well."""
    device, case = start(), Case("layers", "tiny", 12, heads=4)
    found = {}
    for name in ("ours", way):
        built, _ = layer_ways.build(name, case, device, 1)
        out = built.forward()
        out.backward(built.gradient)
        gradients = {key: p.grad for key, p in built.module.named_parameters()}
        found[name] = {"out": out.detach(), "x": built.x.grad} | gradients
    ours, theirs = found["ours"], found[way]
    assert (set(theirs) == set(ours)) == (way == "bundled")
    for name, tensor in theirs.items():
        # The indexer's gradients are differences of bf16 scores that are nearly equal.
        limit = 0.1 if ".indexer." in name else 2e-2
        assert relative_error(tensor, ours[name]) < limit, name


def test_a_failing_way_is_a_row_and_is_not_tried_again(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise torch.OutOfMemoryError("out of memory\nand pages of advice")

    monkeypatch.setattr(layer_ways, "bundled_module", broken)
    rows, _ = measured(tmp_path, "--ways", "bundled", "ours")
    steps = {(row["way"], row["rows"]): row for row in rows if row["operation"] == "step"}
    first, second = steps["bundled", "64"], steps["bundled", "128"]
    assert first["status"] == "failed" and first["reason"] == "OutOfMemoryError: out of memory"
    assert second["status"] == "skipped" and second["reason"] == "failed with 64 tokens"
    assert steps["ours", "128"]["status"] == "ok" and first["median_ms"] == ""
    assert "failed: OutOfMemoryError: out of memory" in capsys.readouterr().out


def test_another_output_is_a_failure(tmp_path, monkeypatch):
    plain = layer_ways.with_weights

    def twice(module, source):
        with torch.no_grad():
            plain(module, source).linear_proj.weight.mul_(2)
        return module

    monkeypatch.setattr(layer_ways, "with_weights", twice)
    rows, _ = measured(tmp_path, "--ways", "ours", "dense", "--rows", "64")
    (dense,) = (row for row in rows if row["way"] == "dense")
    assert dense["status"] == "failed" and "not the results of ours" in dense["reason"]
    assert float(dense["out_error"]) == pytest.approx(1, rel=0.05)


def test_wrong_ends_are_found(tmp_path):
    """As addresses that overflow would make them."""
    run = layer.Run(layer.parse(["--quick"]), start())
    case, rows = Case("layers", "tiny", 64, heads=4), torch.arange(6.0).view(2, 3) + 1
    own = {"out": rows, "end": rows, "end_gradient": rows}
    assert run._agreement("ours", case, own) == {"status": "ok"}
    nearly = own | {"end": 1.2 * rows}
    row = run._agreement("bundled", case, nearly)
    assert row["status"] == "ok" and row["end_error"] == pytest.approx(0.2)
    assert "end_error" not in run._agreement("dense", case, own | {"end": -rows})
    row = run._agreement("bundled", case, own | {"end_gradient": -rows})
    assert row["status"] == "failed" and row["reason"].startswith("not the results of ours: end")
    row = run._agreement("bundled", case, own | {"end": rows / 0})
    assert row["reason"] == "output or gradient is not finite"


def test_what_may_fault_comes_last():
    run = layer.Run(layer.parse(["--heads", "128", "16", "--rows", "8", "4"]), start())
    found = [(way, case.heads, case.rows) for way, case in run._cases()]
    assert found[:4] == [("ours", 128, 4), ("dense", 128, 4), ("ours", 128, 8), ("dense", 128, 8)]
    assert found[8:] == [("bundled", heads, rows) for heads in (16, 128) for rows in (4, 8)]


def test_what_may_take_too_long_is_not_begun(tmp_path):
    run = layer.Run(layer.parse(["--quick", "--total", "100"]), start())
    kind = ("dense", "tiny", 4)
    run._seconds[kind] = 64, 1.0
    assert run._reason_to_skip(kind, 64) is None
    # Four steps of 8 x 8 times the time.
    assert "256 s" in run._reason_to_skip(kind, 512)


def test_declined_functions_of_megatron_are_named():
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    _, remark = layer_ways.build("bundled", Case("layers", "tiny", 8, heads=4), start(), 1)
    assert remark.startswith("kernels=")
    before = dsa_kernels._LOGGER.level
    config = type("Config", (), {"dsa_kernel_backend": "tilelang"})()
    with layer_ways.declined_hooks() as declined:
        for _ in range(2):
            dsa_kernels._log_declined_hook(config, "run_it", "backend returned None")
    assert declined == ["run_it"] and dsa_kernels._LOGGER.level == before
    assert not any(type(h).__name__ == "Listener" for h in dsa_kernels._LOGGER.handlers)
    assert logging.getLogger(dsa_kernels.__name__) is dsa_kernels._LOGGER


def test_the_fastest_dense_attention(monkeypatch):
    """Of those that run; none is an error with the reasons."""
    layer_ways.fastest_attention.cache_clear()
    monkeypatch.setattr(layer_ways, "TRIAL_ROWS", 16)
    plain = layer_ways.ATTENTIONS["flash, padded"]

    def refuses(*_):
        raise RuntimeError("no kernel")

    def slow(*arguments):
        for _ in range(20):
            out = plain(*arguments)
        return out

    device = torch.device("cpu")
    monkeypatch.setattr(layer_ways, "ATTENTIONS", {"a": refuses, "b": slow, "c": plain})
    name, function = layer_ways.fastest_attention(2, 24, 16, device)
    assert name == "c" and function is plain
    monkeypatch.setattr(layer_ways, "ATTENTIONS", {"a": refuses})
    layer_ways.fastest_attention.cache_clear()
    with pytest.raises(ImplementationError, match="a: no kernel"):
        layer_ways.fastest_attention(2, 24, 16, device)
    layer_ways.fastest_attention.cache_clear()


@pytest.mark.parametrize("most", [2**31 - 1, 300])
def test_padded_attention(most, monkeypatch):
    """Also by groups of heads: of 432 elements, 300 are one head."""
    monkeypatch.setattr(layer_ways, "MOST_ELEMENTS", most)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(9, 2, 24, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(9, 2, 16, generator=generator).bfloat16()
    out = layer_ways.ATTENTIONS["flash, padded"](q, k, v, 0.3)
    logits = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.3
    p = logits.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf")).softmax(-1)
    assert out.shape == v.shape
    assert relative_error(out, torch.einsum("hqk,khd->qhd", p, v.double())) < 1e-2


@pytest.mark.parametrize(
    ("ours", "peer", "expected"),
    [
        # Ratios 1/2 and 2: half way, in logarithms.
        ({4: 2.0, 16: 2.0}, {4: 1.0, 16: 4.0}, 8),
        # Not slower anywhere, and slower at the end.
        ({4: 1.0, 8: 1.0}, {4: 1.0, 8: 3.0}, 4),
        ({4: 1.0, 8: 2.0}, {4: 2.0, 8: 1.0}, None),
        # Only lengths that both have, and the last crossing.
        ({4: 1.0, 8: 2.0, 32: 1.0, 64: 9.0}, {2: 9.0, 4: 9.0, 8: 1.0, 32: 2.0}, 16),
        ({4: 1.0}, {8: 1.0}, None),
    ],
)
def test_break_even_by_hand(ours, peer, expected):
    found = layer_summary.break_even(ours, peer)
    assert found == (None if expected is None else pytest.approx(expected))


def made_up(**fields):
    row = dict.fromkeys(layer.COLUMNS) | {
        "gpu": "test", "preset": "v3.2", "status": "ok", "operation": "step", "heads": 16,
    }  # fmt: skip
    return row | fields


def test_summary_of_made_up_rows(tmp_path):
    table = tmp_path / "rows.csv"
    layer.open_csv(table, layer.COLUMNS)
    step = {"p10_ms": 1.0, "p90_ms": 9.0, "tokens_per_s": 1e6, "peak_mib": 2048.0}
    for tokens, ours, dense in ((4096, 4.0, 2.0), (16384, 8.0, 16.0)):
        for way, ms in (("ours", 1000.0), ("ours", ours), ("dense", dense)):
            layer.append_csv(table, made_up(rows=tokens, way=way, median_ms=ms, **step),
                             layer.COLUMNS)  # fmt: skip
        failed = {"status": "failed", "reason": "OutOfMemoryError: x"}
        layer.append_csv(table, made_up(rows=tokens, way="bundled", **failed), layer.COLUMNS)
    lines = layer_summary.summary_lines(layer_summary.read_rows(table))
    assert lines[0].startswith("| dense / ours | bundled / ours | heads | tokens |")
    assert lines[2].startswith("| 0.50x | - | 16 | 4k | 1e+06 | 4 (1 to 9), 2 GiB | 2 (1 to 9)")
    assert lines[2].endswith("| failed: OutOfMemoryError: x |")
    # Ratios 1/2 and 2 again.
    assert lines[-1] == "16 heads, dense / ours: 2.00x at 16k, break-even at 8k"


def test_shares_are_grouped(tmp_path):
    known = {name for names in layer_summary.GROUPS.values() for name in names}
    assert known <= {*OPERATIONS, PRODUCTS}
    rows = [
        made_up(rows=4096, way="ours", operation=f"step/{name}", median_ms=ms)
        for name, ms in (("indexer_topk", 3.0), ("sparse_indexer_loss", 1.0), ("other", 2.0),
                         ("sparse_attention_probabilities", 4.0), ("a new one", 0.5))
    ]  # fmt: skip
    rows.append(made_up(rows=4096, way="ours", median_ms=99.0))
    ((place, groups),) = layer_summary.grouped_shares(rows).items()
    assert place == (16, 4096) and sum(groups.values()) == 10.5
    assert groups["selection"] == 3 and groups["indexer loss and its backward"] == 5
    assert groups["rope, norms, copies"] == 2.5
