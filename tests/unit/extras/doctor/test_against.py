"""``doctor --against bundled``: agreement with megatron-core's layer, and planted errors."""

import json

import pytest
import torch

from megatron_dsa.config.presets import preset
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.doctor import against, bundled
from megatron_dsa.layers.dsa_core import DSACoreAttention
from tests.doctor_harness import parse
from tests.host import start


def run(capsys, more=""):
    start()
    code = against.run(parse(f"--against bundled --json {more}"))
    return code, json.loads(capsys.readouterr().out)


def test_the_layers_agree(capsys):
    code, data = run(capsys)
    assert code == 0 == data["exit_code"]
    assert len(data["cases"]) == 8
    for case in data["cases"].values():
        assert case["verdict"] == "ok"
        assert len(case["differences"]) == 3 + 12  # output, loss, input; parameters
        assert 0 < max(case["differences"].values()) < 2e-6


def test_the_printed_report(capsys):
    start()
    assert against.run(parse("--against bundled")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: our DSA layer and that of megatron-core ")
    assert "12 parameter gradients" in lines[3] and "bound" in lines[3]
    notes = [line for line in lines if line.startswith("note: ")]
    assert any("DeepSeek-V4's layer: not compared" in note for note in notes)


def few_cases(monkeypatch):
    monkeypatch.setattr(against, "_BATCHES", {"one sequence": None})
    monkeypatch.setattr(against, "_ROPES", {"rope": {"rope_type": "rope"}})


@pytest.mark.parametrize(
    ("weight", "figure"),
    [("linear_proj", "output"), ("core_attention.indexer.linear_wk", "linear_wk.weight")],
)
def test_a_scaled_weight_is_found(capsys, monkeypatch, weight, figure):
    few_cases(monkeypatch)
    layers = against._layers

    def scaled(*arguments):
        ours, theirs, remark = layers(*arguments)
        with torch.no_grad():
            ours.get_submodule(weight).weight.mul_(1.001)
        return ours, theirs, remark

    monkeypatch.setattr(against, "_layers", scaled)
    code, data = run(capsys)
    assert code == 1 and data["verdict"].startswith("DIFFERENT")
    assert all(figure in case["verdict"] for case in data["cases"].values())


def test_a_loss_of_another_size_is_found(capsys, monkeypatch):
    few_cases(monkeypatch)
    record = DSACoreAttention._record
    monkeypatch.setattr(
        DSACoreAttention,
        "_record",
        lambda self, name, loss, coeff, layout: record(self, name, loss, 1.01 * coeff, layout),
    )
    code, data = run(capsys)
    assert code == 1
    for case in data["cases"].values():
        assert case["verdict"].startswith("indexer loss 1.0e-02")


def test_a_parameter_without_gradient_is_found(capsys, monkeypatch):
    few_cases(monkeypatch)
    step = against._step

    def without(module, *arguments, **more):
        result = step(module, *arguments, **more)
        if type(module).__name__ == "DSASelfAttention":
            result.pop("q_layernorm.weight")
        return result

    monkeypatch.setattr(against, "_step", without)
    code, data = run(capsys)
    assert code == 1
    assert all("q_layernorm.weight is missing" in x["verdict"] for x in data["cases"].values())


def test_a_class_for_v4_is_named(capsys, monkeypatch):
    few_cases(monkeypatch)
    monkeypatch.setattr(against, "csa_modules", lambda: ["csa"])
    _, data = run(capsys)
    assert any("has csa, which is unknown here" in remark for remark in data["remarks"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("--sink on", "--sink has no effect with --against"), ("--rows 64", "--rows has no effect")],
)
def test_arguments_without_effect_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        against.run(parse(f"--against bundled {text}"))


def test_times_begin_with_a_ratio(monkeypatch):
    start()
    small = against._SMALL
    monkeypatch.setattr(against, "preset", lambda name, **more: preset(name, **small | more))
    times = iter([2.0, 3.0, 4.0])
    monkeypatch.setattr(against, "median_ms", lambda step: step() and next(times))
    found = against.Against(1e-5)
    against._time(found, heads=2, topk=16, tokens=64, device=torch.device("cpu"))
    assert [remark.split(":")[0] for remark in found.remarks] == [
        f"H2 K16 S64 bf16, kernels={kernels}" for kernels in bundled.FUSED
    ]
    (line,) = found.times
    assert line.startswith("0.50 ours / bundled (0.75 with the indexer's loss of every query")
    assert "2.00 (3.00) and 4.00 ms, H2 K16 S64 bf16, kernels=none" in line


@pytest.mark.gpu
def test_times_on_a_gpu(capsys):
    code, data = run(capsys, "--heads 16 --topk 512 --seq 1024")
    assert code == 0
    assert any("ours / bundled" in line for line in data["times"]), data["remarks"]


def test_fused_kernels_need_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("their refusal is of machines without a GPU")
    with pytest.raises(ValueError, match="requires a CUDA device"):
        bundled.bundled_layer(None, "tilelang")
