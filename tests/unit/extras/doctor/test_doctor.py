"""The doctor's inputs, full-size calls, arguments, verdicts and printed table."""

import math
from unittest import mock

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras import doctor
from megatron_dsa.extras.doctor import session, shapes_from
from megatron_dsa.extras.doctor.report import Report
from megatron_dsa.extras.doctor.session import same_bits
from megatron_dsa.testing.cases import difficult_lists, layout_of, layout_of_tokens, sampled_tokens
from megatron_dsa.testing.comparison import Comparison
from tests.doctor_harness import (
    BACKWARD,
    FORWARD,
    SMALL,
    altered,
    others_are_ok,
    parse,
    run,
    scale,
    unchanged,
    verdicts,
)


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """Make a GPU's full-size calls on the CPU at a small shape."""

    class Timed(session.Session):
        def __init__(self, *args):
            super().__init__(*args)
            self.timed = True

    monkeypatch.setattr(doctor, "Session", Timed)
    monkeypatch.setattr(session, "median_ms", lambda call: float(call() is not None))


def test_full_size_calls_are_timed(capsys, add, as_if_on_gpu):
    add(FORWARD, unchanged)
    code, data = run(capsys, f"{SMALL} --sink on")
    assert code == 0, data["verdict"]
    assert all(result["ms"] == 1 for result in data["results"])
    errors = {name for result in data["results"] for name in result["errors"]}
    assert {f"{name} at full size" for name in ("out", "lse", "dq", "p_sum")} < errors


@pytest.mark.parametrize(
    ("operation", "said"),
    [(FORWARD, "out at full size 1.0e+00"), (BACKWARD, "dq at full size 1.0e+00")],
)
def test_an_error_that_shows_only_at_full_size(capsys, add, as_if_on_gpu, operation, said):
    def change(call, result):
        if len(call.q) > 20:
            result[0] = result[0] * 2

    add(operation, altered(change))
    code, data = run(capsys)
    assert code == 1 and others_are_ok(data)
    checked = operation.rsplit("_", 1)[-1]
    found = [result["verdict"] for result in verdicts(data).values() if result["check"] == checked]
    assert found and all(said in verdict for verdict in found)


@pytest.mark.parametrize(("error", "code"), [(torch.OutOfMemoryError, 0), (RuntimeError, 1)])
def test_full_size_that_fails(capsys, add, as_if_on_gpu, error, code):
    """Out of memory is not the implementation's fault; any other crash is."""

    def wrap(original):
        def implementation(call, *args):
            if len(call.q) > 20:
                raise error("no luck")
            return original(call, *args)

        return implementation

    add(BACKWARD, wrap)
    exit_code, data = run(capsys)
    assert exit_code == code and others_are_ok(data)
    for result in verdicts(data).values():
        assert "at full size" in result["verdict"] + " ".join(result["remarks"])


@pytest.mark.parametrize("packed", ["off", "on"])
def test_the_inputs_are_as_difficult_as_promised(packed):
    (shape,) = shapes_from(parse(f"{SMALL} --packed {packed}"))
    device = torch.device("cpu")
    sampled = sampled_tokens(shape.seq, shape.rows, device)
    layout = layout_of_tokens(layout_of(shape, device), sampled)
    lists = difficult_lists(shape, layout)
    listed = torch.arange(shape.topk) < lists.length[:, None]
    has_key = (lists.indices >= 0) & (lists.indices < shape.seq)
    assert ((lists.length == 0) & has_key.any(-1)).any()  # length 0 over real ids
    assert ((lists.length > 0) & ~has_key.any(-1)).any()  # only -1
    assert (listed & (lists.indices == shape.seq)).any()
    assert (listed & (lists.indices == 2**31 - 1)).any()
    hole = listed[:, 1:-1] & (lists.indices[:, 1:-1] == -1)
    assert (hole & has_key[:, :-2] & has_key[:, 2:]).any()
    assert (has_key & ~listed & (lists.length > 0)[:, None]).any()  # stale ids
    assert len(lists.length.unique()) > 4  # ragged
    assert lists.unselected[0] and lists.unselected[-1] and (~lists.unselected).sum() > 20
    visible = (lists.indices >= layout.start[:, None]) & (lists.indices < layout.end[:, None])
    assert visible[lists.valid].all()
    # Enough lists must stay intact for a comparison.
    assert (~lists.empty).sum() >= 10


def test_the_grid(capsys):
    shapes = shapes_from(parse("--heads 16,128 --topk 640,2048 --sink both --packed on"))
    assert len(shapes) == 8 == len({shape.attention_label() for shape in shapes})
    assert {shape.heads for shape in shapes} == {16, 128}
    assert {shape.sink for shape in shapes} == {False, True}
    assert all(shape.packed for shape in shapes)
    (default,) = shapes_from(parse(""))
    assert default.attention_label() == "H128 D576/512 K2048 S4096 bf16"
    assert default.indexer_label() == "HI64 DI128 K2048 S4096 bf16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--seq 32", "--seq must be at least 64"),
        ("--rows 4", "--rows must be at least 16"),
        ("--device cuda:99", "--device cuda:99: this machine has"),
        ("--device tpu", "--device must be cuda"),
        ("--dims 512,576", "the value dim"),
        ("--heads many", "must be whole numbers"),
        ("--seq 64,128", "invalid int value"),
    ],
)
def test_wrong_arguments_are_named(capsys, text, said):
    try:
        doctor.run(parse(text))
    except ConfigError as error:
        assert said in str(error)
    except SystemExit as error:  # argparse
        assert error.code == 2 and said in capsys.readouterr().err
    else:
        raise AssertionError(text)


def test_exit_codes_of_a_report():
    report = Report({"gpu": None}, [], [])
    assert report.exit_code(allow_unfused=True) == 2  # nothing was checked
    report.results = [mock.Mock(ok=True, fused=False)]
    assert report.exit_code(allow_unfused=False) == 3 and report.exit_code(allow_unfused=True) == 0
    report.environment = {"gpu": {"name": "a GPU without kernels"}}
    assert report.exit_code(allow_unfused=False) == 2
    report.results.append(mock.Mock(ok=False, fused=True))
    assert report.exit_code(allow_unfused=True) == 1


def test_nan_is_the_worst_error():
    found, expected = Comparison(1e-3), torch.ones(3)
    for values in ([1.0, 1.0, 1.0], [math.nan, 1.0, 1.0], [1.0, 1.0, 1.0]):
        found.compare("x", torch.tensor(values), expected)
    assert found.wrong() == ["x not finite"]


def test_same_bits():
    nan, zero = torch.tensor([math.nan]), torch.tensor([0.0])
    assert same_bits((nan, None), (nan.clone(), None))
    assert not same_bits((zero,), (-zero,))
    assert not same_bits((zero,), (None,))
    assert not same_bits((zero,), (zero.double(),))


def test_the_printed_table(capsys, add):
    add(FORWARD, altered(scale(1, 1 / math.log(2))))
    assert doctor.run(parse(SMALL)) == 1
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    headings = [line for line in lines if line[:2] == ["shape", "runs"]]
    assert headings[0][2:4] == ["out", "lse"] and headings[0][-1] == "verdict"
    row = next(line for line in lines if line[:1] == ["*"] and "made_up" in line)
    assert "WRONG" in row and "4.4e-01" in row
    assert lines[0][:3] == ["WRONG:", "2", "of"]


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    torch.use_deterministic_algorithms(False)  # some candidates would not run in this mode
    code, data = run(
        capsys, "--device cuda --heads 16,64 --topk 128 --seq 512 --rows 64 --sink both --packed on"
    )
    assert code in (0, 2), [r["verdict"] for r in data["results"] if not r["ok"]]
    assert all(result["ms"] > 0 for result in data["results"])
