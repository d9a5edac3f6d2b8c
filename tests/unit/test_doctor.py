"""The doctor: implementations that are wrong on purpose must be found, right ones must pass."""

import argparse
import dataclasses
import itertools
import json
import math

import pytest
import torch

from megatron_dsa import dispatch, doctor
from megatron_dsa.doctor import examine as examination
from megatron_dsa.doctor import session as sessions
from megatron_dsa.doctor.cases import difficult_lists, layout_of, layout_of_rows, sampled_rows
from megatron_dsa.doctor.measure import same_bits
from megatron_dsa.doctor.results import Part, Report
from megatron_dsa.doctor.shapes import shapes_from

FORWARD, BACKWARD, TEACHER = (
    "sparse_attention_forward",
    "sparse_attention_backward",
    "sparse_attention_probabilities",
)
#: Small enough for milliseconds; fp32, so that a right implementation is far from the tolerance.
SMALL = (
    "--device cpu --heads 4 --dims 24,16 --topk 16 --seq 80 --rows 20 --index-heads 3 "
    "--index-dim 8 --dtype fp32"
)


def parse(text):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(text.split())


def run(capsys, text=SMALL):
    """Run the command; return its exit code and its report as data."""
    code = doctor.run(parse(f"{text} --json"))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return code, json.loads(capsys.readouterr().out, parse_constant=refuse)


@pytest.fixture
def add(monkeypatch):
    """Add a candidate that wraps torch's: ``add(operation, wrap)`` with ``wrap(torch's) -> new``.

    It stands before the others as a fused implementation, called "made_up".
    """

    def add(operation, wrap, **support):
        (original,) = (c for c in dispatch.candidates(operation) if not c.fused)
        declared = {"deterministic": True} | support
        candidate = dataclasses.replace(
            original,
            name="made_up",
            fused=True,
            support=dataclasses.replace(original.support, **declared),
            load=lambda: wrap(original.load()),
        )
        others = dispatch.candidates(operation)
        monkeypatch.setitem(dispatch._candidates, operation, [candidate, *others])
        dispatch._choose.cache_clear()

    yield add
    dispatch._choose.cache_clear()


def verdicts(data, name="made_up"):
    """Results by the implementations in them, of those that contain ``name``."""
    found = {}
    for result in data["results"]:
        names = [n for part in result["parts"] for n in part["implementations"].values()]
        if name in names:
            found[tuple(names)] = result
    return found


def others_are_ok(data):
    return all(
        result["ok"]
        for result in data["results"]
        if not any("made_up" in part["implementations"].values() for part in result["parts"])
    )


def unchanged(original):
    return original


def altered(change):
    """A wrapper that lets ``change(problem, result list)`` spoil what torch returns."""

    def wrap(original):
        def implementation(problem, *args):
            result = list(original(problem, *args))
            change(problem, result)
            return tuple(result)

        return implementation

    return wrap


def test_right_implementations_pass(capsys):
    code, data = run(capsys, f"{SMALL} --allow-unfused --sink both --packed both")
    assert code == 0, [r["verdict"] for r in data["results"]]
    checks = {"sparse attention": 4, "teacher": 4, "index selection": 2, "indexer loss": 2}
    for check, shapes in checks.items():
        assert len([r for r in data["results"] if r["check"] == check]) == shapes, check
    for result in data["results"]:
        assert result["chosen"]
        for part in result["parts"]:
            assert part["same_bits"] is True
            assert all(error < 1e-4 for error in part["errors"].values())
    with_sink = next(result for result in data["results"] if "sink" in result["label"])
    assert set(with_sink["parts"][1]["errors"]) == {"dq", "dkv", "dsink", "p_sum"}


def test_without_a_gpu_nothing_is_proven(capsys):
    """The default shape is cut down, the report says so, and CI does not go green."""
    code = doctor.run(parse("--device cpu"))
    out = capsys.readouterr().out
    assert code == 2
    assert "NOT PROVEN: no fused implementation could be checked" in out
    assert "Checked at H8 D576/512 K64 S256 bf16, HI8 DI64" in out
    assert "NOT checked: fused kernels, the shape that was asked for, times" in out
    assert "sparse_attention_backward cudnn: wrong GPU" in out
    code, data = run(capsys, "--device cpu --heads 16,32,64 --topk 640,1152")
    assert code == 2
    assert len(data["asked"]) == 6 and len(data["shapes"]) == 1
    assert data["not_checked"] and all(entry["reason"] for entry in data["not_checked"])


def test_a_fused_implementation_that_is_right_proves_something(capsys, add):
    add(FORWARD, unchanged)
    add(BACKWARD, unchanged)
    code, data = run(capsys)
    assert code == 0, data["verdict"]
    pairs = verdicts(data)
    assert set(pairs) == {("made_up", "made_up"), ("made_up", "torch"), ("torch", "made_up")}
    assert [pair for pair, result in pairs.items() if result["chosen"]] == [("made_up", "made_up")]


def scale(position, factor):
    def change(problem, result):
        if result[position] is not None:
            result[position] = result[position] * factor

    return change


def nan_in_empty_rows(problem, result):
    result[0][result[1] == -math.inf] = math.nan


def plausible_empty_rows(problem, result):
    result[1][result[1] == -math.inf] = 0.0


def atomics_of_padding_hit_row_0(problem, result):
    result[1][0] += 1e-3


def gradient_of_empty_rows(problem, result):
    result[0][~(result[0] != 0).any(-1).any(-1)] = 1e-6


def half_precision(problem, result):
    result[0] = result[0].bfloat16()


def rounded_dkv(problem, result):
    result[1] = result[1].bfloat16()


def too_narrow(problem, result):
    result[0] = result[0][:, :1]


def drop(position):
    def change(problem, result):
        del result[position:]

    return change


def only_with_teacher(problem, result):
    if problem.want_p_sum:
        result[0] = result[0] * 2


@pytest.mark.parametrize(
    ("operation", "change", "said"),
    [
        (FORWARD, scale(0, 1.01), "out 1.0e-02"),
        (FORWARD, scale(1, 1 / math.log(2)), "lse 4.4e-01"),  # base 2
        (FORWARD, scale(2, 1.02), "p_sum 2.0e-02"),
        (FORWARD, nan_in_empty_rows, "out of an empty row is not 0"),
        (FORWARD, plausible_empty_rows, "lse of an empty row is not -inf"),
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
    pairs = verdicts(data)
    assert pairs
    for result in pairs.values():
        assert said in result["verdict"], result["verdict"]
        role = operation.rsplit("_", 1)[-1]
        crossed = len(result["parts"]) == 2
        assert not crossed or f"{role} made_up: " in result["verdict"]
    assert others_are_ok(data)
    assert data["verdict"].startswith(f"WRONG: {len(pairs)} of ")
    assert "1 of them what dispatch would run" in data["verdict"]


def test_base_2_lse_spoils_a_right_backward_and_the_forward_is_named(capsys, add):
    add(FORWARD, altered(scale(1, 1 / math.log(2))))
    _, data = run(capsys)
    verdict = verdicts(data)["made_up", "torch"]["verdict"]
    assert "WRONG forward made_up: lse" in verdict and "WRONG backward torch: dq" in verdict
    assert verdicts(data, "torch")["torch", "torch"]["verdict"] == "ok"


def noisy():
    """A last-bit difference between calls: far below the tolerance."""
    calls = itertools.count(1)

    def change(problem, result):
        result[0] = result[0] * (1 + 1e-6 * next(calls))

    return altered(change)


@pytest.mark.parametrize("operation", [FORWARD, BACKWARD])
@pytest.mark.parametrize("declared", [True, False])
def test_only_declared_determinism_is_demanded(capsys, add, operation, declared):
    # Tests run in deterministic mode, which an undeclared one must at least be able to honour.
    add(operation, noisy(), deterministic=declared, deterministic_mode=True)
    code, data = run(capsys)
    parts = [
        part
        for result in verdicts(data).values()
        for part in result["parts"]
        if "made_up" in part["implementations"].values()
    ]
    assert parts and all(part["same_bits"] is False for part in parts)
    wrong = ["repeats differ, though declared deterministic"] if declared else []
    assert all(part["wrong"] == wrong for part in parts)
    assert code == (1 if declared else 0)


def raises(original):
    def implementation(*args):
        raise ValueError("no such kernel image\nand a long traceback")

    return implementation


@pytest.mark.parametrize(
    "operation",
    [FORWARD, BACKWARD, TEACHER, "indexer_topk", "sparse_indexer_loss", "indexer_backward"],
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
        "sparse attention", "teacher", "index selection", "indexer loss",
    }  # fmt: skip


def test_a_crash_that_takes_the_gpu_with_it(capsys, add, monkeypatch):
    """An illegal access poisons the process: nothing after it may be called wrong."""
    add(BACKWARD, raises)
    monkeypatch.setattr(sessions.Session, "_alive", lambda session: False)
    code, data = run(capsys)
    assert code == 1
    wrong = [result for result in data["results"] if not result["ok"]]
    assert [r["parts"][1]["implementations"] for r in wrong] == [{BACKWARD: "made_up"}]
    reasons = {entry["operation"]: entry["reason"] for entry in data["not_checked"]}
    assert "the GPU was lost when made_up crashed" in reasons["selection"]
    assert "the GPU was lost when made_up crashed" in reasons[BACKWARD]


def test_too_little_memory_for_the_reference_proves_nothing(capsys, add, monkeypatch):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("out of memory")

    add("indexer_topk", unchanged)
    monkeypatch.setattr("megatron_dsa.doctor.attention.expected_attention", out_of_memory)
    code, data = run(capsys)
    assert code == 2
    assert "out of memory in the float64 reference" in data["verdict"]
    assert others_are_ok(data)


def select(pick):
    """A top-k that picks columns with ``pick(scores, visible, topk) -> bool mask``."""

    def wrap(original):
        def implementation(scores, visible, topk):
            mask = pick(scores, visible, topk)
            place = torch.where(mask, mask.cumsum(-1) - 1, topk)
            columns = torch.arange(mask.shape[1], dtype=torch.int32).expand_as(mask)
            out = torch.full((len(mask), topk + 1), -1, dtype=torch.int32)
            return out.scatter_(1, place, columns)[:, :topk]

        return implementation

    return wrap


def ties_to_the_largest(scores, visible, topk):
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(visible).scatter_(1, scores.shape[1] - 1 - order, True) & visible


def smallest_keys(scores, visible, topk):
    return visible & (visible.cumsum(-1) <= topk)


def looks_ahead(scores, visible, topk):
    return ties_to_the_largest(torch.where(visible, scores, 1e9), torch.ones_like(visible), topk)


def reordered(original):
    return lambda *args: original(*args).flip(-1)


def repeated(original):
    def implementation(*args):
        out = original(*args)
        out[:, 1] = out[:, 0]
        return out

    return implementation


def one_too_few(original):
    def implementation(*args):
        out = original(*args)
        out[:, -1] = -1
        return out

    return implementation


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (select(ties_to_the_largest), "all scores equal: not the best keys"),
        (select(smallest_keys), "recall"),
        (select(looks_ahead), "an invisible key is selected"),
        (reordered, "keys are not distinct and ascending"),
        (repeated, "keys are not distinct and ascending"),
        (one_too_few, "the list is no prefix"),
    ],
)
def test_wrong_selections_are_found(capsys, add, wrap, said):
    add("indexer_topk", wrap)
    code, data = run(capsys)
    assert code == 1 and others_are_ok(data)
    (result,) = verdicts(data).values()
    assert said in result["verdict"], result["verdict"]


def test_right_selection_by_other_means_passes(capsys, add):
    """The judge accepts an independent implementation, ties and all."""

    def pick(scores, visible, topk):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        return torch.zeros_like(visible).scatter_(1, order, True) & visible

    add("indexer_topk", select(pick))
    code, data = run(capsys, f"{SMALL} --packed both")
    assert code == 0, data["verdict"]
    assert len([r for r in data["results"] if r["check"] == "index selection"]) == 4


def test_wrong_scores_are_found(capsys, add):
    """Head weights without their sign: many selections are plausible, few are right."""

    class Scores:
        def __init__(self, original):
            self.original = original
            self.bytes_per_score = original.bytes_per_score

        def __call__(self, inputs, block, keys):
            positive = dataclasses.replace(inputs, weights=inputs.weights.abs())
            return self.original(positive, block, keys)

    add("indexer_scores", Scores)
    code, data = run(capsys)
    assert code == 1 and others_are_ok(data)
    (result,) = verdicts(data).values()
    assert "recall" in result["verdict"] and "score shortfall" in result["verdict"]


def scaled_gradients(original):
    def implementation(*args):
        q, k, weights = original(*args)
        return q, k * 2, weights

    return implementation


def scaled_loss(original):
    def implementation(problem):
        result = original(problem)
        return result._replace(value=result.value * 1.5)

    return implementation


def padding_pulls_at_row_0(original):
    def implementation(*args):
        result = original(*args)
        result.k[0] = 1e-3
        return result

    return implementation


@pytest.mark.parametrize(
    ("operation", "wrap", "said"),
    [
        ("sparse_indexer_loss", scaled_loss, "loss 5.0e-01"),
        ("indexer_backward", scaled_gradients, "dk 1.0e+00"),
        ("indexer_backward", padding_pulls_at_row_0, "dk of an unselected key is not 0"),
    ],
)
def test_wrong_losses_are_found(capsys, add, operation, wrap, said):
    add(operation, wrap)
    code, data = run(capsys)
    assert code == 1 and others_are_ok(data)
    (result,) = verdicts(data).values()
    assert said in result["verdict"], result["verdict"]


def test_a_wrong_teacher_is_found(capsys, add):
    def wrap(original):
        def unmasked(problem, lse):
            # Entries past the length keep what they would weigh if they were selected.
            return original(dataclasses.replace(problem, topk_length=None), lse)

        return unmasked

    add(TEACHER, wrap)
    code, data = run(capsys)
    assert code == 1 and others_are_ok(data)
    (result,) = verdicts(data).values()
    assert result["check"] == "teacher"
    assert "p_sum of an invalid entry is not 0" in result["verdict"]


@pytest.fixture
def as_if_on_gpu(monkeypatch):
    """Make the full-size calls that a GPU gets, on the CPU at a small shape."""

    class Timed(sessions.Session):
        def __init__(self, *args):
            super().__init__(*args)
            self.timed = True

    monkeypatch.setattr(examination, "Session", Timed)
    monkeypatch.setattr(sessions, "median_ms", lambda call: float(call() is not None))


def test_full_size_calls_are_timed(capsys, add, as_if_on_gpu):
    add(FORWARD, unchanged)
    code, data = run(capsys, f"{SMALL} --sink on")
    assert code == 0, data["verdict"]
    expected = {
        "sparse attention": [{"forward"}, {"backward"}],
        "teacher": [{"teacher"}],
        "index selection": [{"selection"}],
        "indexer loss": [{"loss and gradients"}],
    }
    for result in data["results"]:
        assert [set(part["ms"]) for part in result["parts"]] == expected[result["check"]]
    errors = data["results"][0]["parts"][1]["errors"]
    assert errors["dq at full size"] < 1e-4


@pytest.mark.parametrize(
    ("operation", "said"),
    [(FORWARD, "out at full size 1.0e+00"), (BACKWARD, "dq at full size 1.0e+00")],
)
def test_an_error_that_shows_only_at_full_size(capsys, add, as_if_on_gpu, operation, said):
    def change(problem, result):
        if len(problem.q) > 20:
            result[0] = result[0] * 2

    add(operation, altered(change))
    code, data = run(capsys)
    assert code == 1 and others_are_ok(data)
    assert all(said in result["verdict"] for result in verdicts(data).values())


@pytest.mark.parametrize(("error", "code"), [(torch.OutOfMemoryError, 0), (RuntimeError, 1)])
def test_full_size_that_fails(capsys, add, as_if_on_gpu, error, code):
    """Too little memory is the machine's fault; any other crash is the implementation's."""

    def wrap(original):
        def implementation(problem, *args):
            if len(problem.q) > 20:
                raise error("no luck")
            return original(problem, *args)

        return implementation

    add(BACKWARD, wrap)
    exit_code, data = run(capsys)
    assert exit_code == code and others_are_ok(data)
    for result in verdicts(data).values():
        said = result["verdict"] + " ".join(result["parts"][1]["remarks"])
        assert "at full size" in said and "backward" in said


@pytest.mark.parametrize("packed", ["off", "on"])
def test_the_inputs_are_as_difficult_as_promised(packed):
    (shape,) = shapes_from(parse(f"{SMALL} --packed {packed}"))
    device = torch.device("cpu")
    layout = layout_of_rows(layout_of(shape, device), sampled_rows(shape, device))
    lists = difficult_lists(shape, layout)
    listed = torch.arange(shape.topk) < lists.length[:, None]
    has_key = (lists.indices >= 0) & (lists.indices < shape.seq)
    assert ((lists.length == 0) & has_key.any(-1)).any()  # length 0 over real ids
    assert ((lists.length > 0) & ~has_key.any(-1)).any()  # nothing but -1
    assert (listed & (lists.indices == shape.seq)).any()
    assert (listed & (lists.indices == 2**31 - 1)).any()
    hole = listed[:, 1:-1] & (lists.indices[:, 1:-1] == -1)
    assert (hole & has_key[:, :-2] & has_key[:, 2:]).any()
    assert (has_key & ~listed & (lists.length > 0)[:, None]).any()  # stale ids
    assert len(lists.length.unique()) > 4  # ragged
    assert lists.unselected[0] and lists.unselected[-1] and (~lists.unselected).sum() > 20
    visible = (lists.indices >= layout.start[:, None]) & (lists.indices < layout.end[:, None])
    assert visible[lists.valid].all()
    # Some rows must be left as they were, or nothing would be compared.
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
        ("--heads 0", "positive whole numbers"),
        ("--seq 64,128", "must be one number"),
    ],
)
def test_wrong_arguments_are_named(capsys, text, said):
    try:
        code = doctor.run(parse(text))
    except SystemExit as error:  # argparse
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_exit_codes_of_a_report():
    report = Report({}, [], [])
    assert report.exit_code(allow_unfused=True) == 2  # nothing was checked at all


def test_nan_is_the_worst_error():
    part = Part((("operation", "name"),), True, True, 1e-3)
    expected = torch.ones(3)
    for values in ([1.0, 1.0, 1.0], [math.nan, 1.0, 1.0], [1.0, 1.0, 1.0]):
        part.compare("x", torch.tensor(values), expected)
    assert part.wrong() == ["x not finite"]


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
    (heading,) = (line for line in lines if line[:3] == ["shape", "forward", "backward"])
    assert heading[3:7] == ["out", "lse", "dq", "dkv"] and heading[-1] == "verdict"
    (row,) = (line for line in lines if line[:1] == ["*"] and "made_up" in line)
    assert "WRONG" in row and "4.4e-01" in row
    assert out.splitlines()[-1].startswith("WRONG: 1 of ")


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    """Everything that is declared to work on this GPU does, at a small but real shape."""
    torch.use_deterministic_algorithms(False)  # a mode in which some candidates would not run
    code, data = run(
        capsys, "--device cuda --heads 16,64 --topk 128 --seq 512 --rows 64 --sink both --packed on"
    )
    assert code in (0, 2), [r["verdict"] for r in data["results"] if not r["ok"]]
    timed = [part["ms"] for result in data["results"] for part in result["parts"]]
    assert all(all(ms > 0 for ms in figures.values()) and figures for figures in timed)
