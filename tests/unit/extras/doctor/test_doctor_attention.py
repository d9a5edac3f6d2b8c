"""Wrong sparse attention must be found by the doctor, right one must pass."""

import itertools
import math

import pytest
import torch

from megatron_dsa.extras import doctor
from megatron_dsa.extras.doctor import session as sessions
from tests.doctor_harness import (
    BACKWARD,
    FORWARD,
    SMALL,
    TEACHER,
    altered,
    others_are_ok,
    parse,
    run,
    scale,
    unchanged,
    verdicts,
)


def test_right_implementations_pass(capsys):
    code, data = run(capsys, f"{SMALL} --allow-unfused --sink both --packed both")
    assert code == 0, [r["verdict"] for r in data["results"]]
    checks = {"forward": 4, "backward": 4, "teacher": 4, "index selection": 2, "indexer loss": 2}
    for check, shapes in checks.items():
        assert len([r for r in data["results"] if r["check"] == check]) == shapes, check
    for result in data["results"]:
        assert result["chosen"] and result["same_bits"] is True
        assert all(error < 1e-4 for error in result["errors"].values())
    with_sink = (r for r in data["results"] if "sink" in r["label"] and r["check"] == "backward")
    assert set(next(with_sink)["errors"]) == {"dq", "dkv", "dsink", "p_sum"}


def test_without_a_gpu_nothing_is_proven(capsys):
    """The report must mention the reduced shape, and CI must not pass."""
    code = doctor.run(parse("--device cpu"))
    out = capsys.readouterr().out
    assert code == 3
    assert out.startswith("NO GPU: torch on the CPU is right (")
    assert "Checked at H8 D576/512 K64 S256 bf16, HI8 DI64" in out
    assert "NOT checked: fused kernels, the shape that was asked for, times" in out
    assert "sparse_attention_backward cudnn: wrong GPU" in out
    code, data = run(capsys, "--device cpu --heads 16,32,64 --topk 640,1152")
    assert code == 3
    assert len(data["asked"]) == 6 and len(data["shapes"]) == 1
    assert data["not_checked"] and all(entry["reason"] for entry in data["not_checked"])


def test_a_fused_implementation_that_is_right_proves_something(capsys, add):
    add(FORWARD, unchanged)
    add(BACKWARD, unchanged)
    code, data = run(capsys)
    assert code == 0, data["verdict"]
    found = verdicts(data)
    pairs = {("made_up", "made_up"), ("made_up", "torch"), ("torch", "made_up")}
    assert set(found) == {("forward", "made_up"), *(("backward", *pair) for pair in pairs)}
    assert {key for key, result in found.items() if result["chosen"]} == {
        ("forward", "made_up"), ("backward", "made_up", "made_up"),
    }  # fmt: skip


def nan_in_empty_rows(call, result):
    result[0][result[1] == -math.inf] = math.nan


def plausible_empty_rows(call, result):
    result[1][result[1] == -math.inf] = 0.0


def atomics_of_padding_hit_row_0(call, result):
    result[1][0] += 1e-3


def gradient_of_empty_rows(call, result):
    result[0][~(result[0] != 0).any(-1).any(-1)] = 1e-6


def half_precision(call, result):
    result[0] = result[0].bfloat16()


def rounded_dkv(call, result):
    result[1] = result[1].bfloat16()


def too_narrow(call, result):
    result[0] = result[0][:, :1]


def drop(position):
    def change(call, result):
        del result[position:]

    return change


def only_with_teacher(call, result):
    if call.want_p_sum:
        result[0] = result[0] * 2


@pytest.mark.parametrize(
    ("operation", "change", "said"),
    [
        (FORWARD, scale(0, 1.01), "out 1.0e-02"),
        (FORWARD, scale(1, 1 / math.log(2)), "lse 4.4e-01"),  # base 2
        (FORWARD, scale(2, 1.02), "p_sum 2.0e-02"),
        (FORWARD, nan_in_empty_rows, "out of a query without keys is not 0"),
        (FORWARD, plausible_empty_rows, "lse without keys is not -inf"),
        (FORWARD, half_precision, "out is torch.bfloat16, not torch.float32"),
        (FORWARD, too_narrow, "out has shape"),
        (FORWARD, drop(1), "crashed"),
        (FORWARD, only_with_teacher, "out 1.0e+00"),
        (BACKWARD, scale(0, 0.5), "dq 5.0e-01"),
        (BACKWARD, scale(1, 1.1), "dkv 1.0e-01"),
        (BACKWARD, scale(1, math.nan), "dkv not finite"),
        (BACKWARD, scale(2, -1), "dsink 2.0e+00"),
        (BACKWARD, scale(3, 0.5), "p_sum 5.0e-01"),
        (BACKWARD, drop(2), "crashed"),
        (BACKWARD, atomics_of_padding_hit_row_0, "dkv of an unselected key is not 0"),
        (BACKWARD, gradient_of_empty_rows, "dq of an empty row is not 0"),
        (BACKWARD, rounded_dkv, "dkv is torch.bfloat16, not float32"),
    ],
)
def test_wrong_attention_is_found(capsys, add, operation, change, said):
    add(operation, altered(change))
    code, data = run(capsys, f"{SMALL} --sink on")
    assert code == 1
    found = [r for r in verdicts(data).values() if r["check"] == operation.rsplit("_", 1)[-1]]
    assert found
    for result in found:
        assert said in result["verdict"], result["verdict"]
    assert others_are_ok(data)
    wrong = [result for result in data["results"] if not result["ok"]]
    assert data["verdict"].startswith(f"WRONG: {len(wrong)} of ")
    assert f"{sum(r['chosen'] for r in wrong)} of them what dispatch" in data["verdict"]


def test_base_2_lse_spoils_a_right_backward_and_the_forward_is_named(capsys, add):
    add(FORWARD, altered(scale(1, 1 / math.log(2))))
    _, data = run(capsys)
    found = verdicts(data)
    assert "WRONG lse" in found["forward", "made_up"]["verdict"]
    assert "WRONG dq" in found["backward", "made_up", "torch"]["verdict"]
    assert verdicts(data, "torch")["backward", "torch", "torch"]["verdict"] == "ok"


def noisy():
    """Return a last-bit difference between calls, far below the tolerance."""
    calls = itertools.count(1)

    def change(call, result):
        result[0] = result[0] * (1 + 1e-6 * next(calls))

    return altered(change)


@pytest.mark.parametrize("operation", [FORWARD, BACKWARD])
@pytest.mark.parametrize("declared", [True, False])
def test_only_declared_determinism_is_demanded(capsys, add, operation, declared):
    # Tests run in deterministic mode, which even an undeclared candidate must support.
    add(operation, noisy(), deterministic=declared, deterministic_mode=True)
    code, data = run(capsys)
    checked = operation.rsplit("_", 1)[-1]
    found = [result for result in verdicts(data).values() if result["check"] == checked]
    assert found and all(result["same_bits"] is False for result in found)
    wrong = ["repeats differ, though declared deterministic"] if declared else []
    # torch's backward is not declared deterministic, nor are pairs with it.
    assert all(result["wrong"] == wrong for result in found)
    assert code == (1 if declared else 0)


def raises(original):
    def implementation(*args):
        raise ValueError("no such kernel image\nand a long traceback")

    return implementation


@pytest.mark.parametrize(
    "operation",
    [FORWARD, BACKWARD, TEACHER, "indexer_topk", "indexer_engine_scores", "sparse_indexer_loss"],
)
def test_a_crash_is_a_verdict_and_the_rest_goes_on(capsys, add, operation):
    add(operation, raises)
    code, data = run(capsys)
    assert code == 1
    found = verdicts(data)
    assert found and others_are_ok(data)
    for result in found.values():
        assert result["verdict"].startswith("crashed")
        assert "ValueError: no such kernel image" in result["verdict"]
        assert "traceback" not in result["verdict"]
    assert {result["check"] for result in data["results"]} == {
        "forward", "backward", "teacher", "index selection", "engine scores", "indexer loss",
    }  # fmt: skip


def test_a_crash_that_takes_the_gpu_with_it(capsys, add, monkeypatch):
    """An illegal access breaks the process: later candidates must not be called wrong."""
    add(BACKWARD, raises)
    monkeypatch.setattr(sessions.Session, "_alive", lambda session: False)
    code, data = run(capsys)
    assert code == 1
    wrong = [result for result in data["results"] if not result["ok"]]
    assert [r["implementations"] for r in wrong] == [{FORWARD: "torch", BACKWARD: "made_up"}]
    reasons = {entry["operation"]: entry["reason"] for entry in data["not_checked"]}
    for skipped in ("selection", BACKWARD, TEACHER):
        assert "the GPU was lost when torch + made_up crashed" in reasons[skipped]


def test_too_little_memory_for_the_reference_proves_nothing(capsys, add, monkeypatch):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("out of memory")

    add("indexer_topk", unchanged)
    monkeypatch.setattr("megatron_dsa.testing.sparse_attention.expected_attention", out_of_memory)
    code, data = run(capsys)
    assert code == 2
    assert "out of memory in the float64 reference" in data["verdict"]
    assert others_are_ok(data)
