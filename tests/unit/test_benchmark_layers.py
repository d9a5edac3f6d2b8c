"""Layers of the benchmark over several GPUs: plain collectives, chains, charts of old files."""

import csv
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ranks_layer, ranks_timing
from benchmarks.ranks_cases import ONE, Case
from benchmarks.ranks_plain import OVERLAPPED, PLAIN, collectives
from megatron_dsa import dispatch
from megatron_dsa.parallel.gather import finish_gather, start_gather
from tests.host import start

SETTINGS = {"repeats": 2, "budget": 1.0, "workspace_mib": 1}


class Work:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait(self):
        self.log.append(f"{self.name} is there")


@pytest.fixture
def log(monkeypatch):
    """What two ranks that hold the same would launch and wait for, in order."""
    log = []

    def gather(out, x, group=None, async_op=False):
        log.append("gather")
        out.copy_(torch.cat([x, x]))
        return Work("gather", log) if async_op else None

    def reduce(out, x, group=None, async_op=False):
        log.append("sum")
        out.copy_(2 * x.chunk(2)[0])
        return Work("sum", log) if async_op else None

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", reduce)
    return log


class _Noted(torch.autograd.Function):
    """Other work, between launch and arrival in the forward and on the way back."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        log.append("work")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append("work back")
        return grad, None


def gathered_under_work(log):
    keys, q = torch.ones(3, 1, 2, requires_grad=True), torch.ones(6, 2, requires_grad=True)
    gathering = start_gather(keys, SimpleNamespace(size=lambda: 2))
    noted = _Noted.apply(q, log)
    everything, grad_proxy = finish_gather(gathering)
    (everything * noted + grad_proxy).sum().backward()
    return keys.grad


def test_plain_collectives_are_waited_for_at_once(log):
    with collectives(OVERLAPPED):
        grad = gathered_under_work(log)
    assert log[:3] == ["gather", "work", "gather is there"]
    # Autograd goes back from the arrival.
    assert log[3:] == ["sum", "work back", "sum is there"]
    log.clear()
    with collectives(PLAIN):
        assert torch.equal(gathered_under_work(log), grad)
    ours = torch.distributed.all_gather_into_tensor
    assert log[:3] == ["gather", "gather is there", "work"]
    assert log.index("sum is there") == log.index("sum") + 1 < log.index("work back")
    log.clear()
    gathered_under_work(log)  # as before
    assert log[:3] == ["gather", "work", "gather is there"]
    with collectives(PLAIN):
        assert torch.distributed.all_gather_into_tensor is not ours
        out = torch.empty(4)
        assert torch.distributed.all_gather_into_tensor(out, torch.ones(2)) is None


@pytest.mark.parametrize("ratio", [None, 4])
def test_a_chain_is_the_module_again_and_again(ratio):
    device = start()
    case = Case("layers", "tiny", 128, ratio, layers=3)
    layer = ranks_layer.Layer(case, ONE, device, 1)
    x, module = layer.x.detach().clone().requires_grad_(), layer.module
    first = module(x, None)[0]
    second = module(between := x + first, None)[0]
    third = module(between + second, None)[0]
    third.backward(layer.gradient)
    expected = [third.detach(), x.grad, *(p.grad.clone() for p in gradients(module))]
    module.zero_grad()
    squares = layer.first_step()
    assert squares["out"] == pytest.approx(ranks_layer.squared_norm(third.detach()), rel=1e-6)
    found = [layer.forward().detach(), layer.x.grad, *(p.grad for p in gradients(module))]
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) <= 1e-2 * float(theirs.norm())
    # One layer alone gives something else.
    assert float((third - first).norm()) > 0.1 * float(first.norm())


def gradients(module):
    return [parameter for parameter in module.parameters() if parameter.grad is not None]


def test_times_are_those_of_one_layer(monkeypatch):
    device, calls = start(), []

    def measured(forward, step, clock, device, settings):
        calls.append((forward(), step()))
        return {"times": {"forward": [6.0, 8.0], "step": [20.0]}}

    monkeypatch.setattr(ranks_layer, "measured", measured)
    case = Case("layers", "tiny", 128, layers=4)
    result = ranks_layer.measure_layer(case, ONE, device, SETTINGS)
    assert result["times"] == {"forward": [1.5, 2.0], "step": [5.0]} and len(calls) == 1
    assert result["heads"] == 4 and "bytes_per_token" not in result


def test_whatever_dispatch_counts_is_reported():
    """Of the step only, by whatever name."""

    def forward():
        dispatch.count("not_of_the_step", "x")

    def step():
        dispatch.count("a_new_name", "exchanged")
        dispatch.count("a_new_name", "kept")

    device = start()
    clock = ranks_timing.Clock(device)
    result = ranks_timing.measured(forward, step, clock, device, SETTINGS)
    assert result["ran"] == "a_new_name=exchanged+kept"
    assert [len(times) for times in result["times"].values()] == [2, 2]


OLD = ("gpu", "torch", "cuda", "flash_mla", "cudnn_frontend", "tilelang", "triton", "part", "tp",
       "cp", "preset", "ratio", "rows", "cp_layout", "tp_mode", "operation", "status", "median_ms",
       "efficiency", "exposed_share")  # fmt: skip


def test_charts_read_files_from_before_columns_were_added(tmp_path):
    charts = pytest.importorskip("benchmarks.ranks_charts")
    row = dict.fromkeys(OLD, "") | {
        "gpu": "test", "torch": "2", "part": "layers", "tp": "1", "cp": "4", "preset": "v3.2",
        "rows": "65536", "cp_layout": "zigzag", "operation": "step", "status": "ok",
        "median_ms": "1.0", "efficiency": "0.9", "exposed_share": "0.1",
    }  # fmt: skip
    for name, added in (("old", {}), ("new", {"layers": "4", "collectives": "plain"})):
        path = tmp_path / f"{name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*OLD, *added])
            writer.writeheader()
            writer.writerow(row | added)
        (chart,) = charts.draw_ranks(path)
        assert chart.read_bytes().startswith(b"\x89PNG")
    assert charts._label(charts.ADDED | row) == "v3.2, 64k, cp4 zigzag"
    new = row | {"layers": "4", "collectives": "plain"}
    assert charts._label(new) == "v3.2 x 4, 64k, cp4 zigzag plain"
