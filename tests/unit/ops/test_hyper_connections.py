"""Hyper-connections: torch against plain formulas, Triton against both, and compiled Triton."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.planner.host import host
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.dispatch.support import import_attribute
from megatron_dsa.ops.hyper_connections import torch as unfused
from megatron_dsa.ops.hyper_connections.api import read_head, read_streams, write_streams
from megatron_dsa.ops.hyper_connections.spec import WriteInputs, reference_read, reference_write
from tests.cases.hyper_connections import Case, check, in_float64, run
from tests.cases.triton_kernels import (
    assembly,
    assert_repeatable,
    interpret,
    let_interpreter_use_bf16,
    prepare_interpreter,
    recorded,
)
from tests.helpers import relative_error

PACKAGE = "megatron_dsa.ops.hyper_connections.triton"
NAMES = ("read", "write", "head")
#: One stream, three, one token, no token, one normalisation, sizes that are no powers of two.
CASES = [
    Case(5, 4, 16), Case(1, 4, 24, iterations=2), Case(7, 3, 10), Case(3, 1, 8, iterations=3),
    Case(6, 2, 33, iterations=1), Case(0, 4, 8),
]  # fmt: skip


def inputs_of(case, name, *args):
    if name == "write":
        return case.write_inputs(*args)
    return case.read_inputs(*args, head=name == "head")


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_torch(name, case):
    check(getattr(unfused, name), name, inputs_of(case, name), 1e-11)
    # With one stream the norm cancels pre, whose gradient is rounding.
    if case.streams > 1:
        check(getattr(unfused, name), name, inputs_of(case, name, torch.float32), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name):
    results, gradients = run(getattr(unfused, name), inputs_of(CASES[-1], name))
    assert all(r.shape[0] == 0 for r in results)
    assert all(not g.any() for g in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_small_workspace(name):
    inputs = inputs_of(CASES[2], name)
    small = run(getattr(unfused, name), replace(inputs, workspace_bytes=1))
    large = run(getattr(unfused, name), inputs)
    for mine, theirs in zip(small[0] + small[1], large[0] + large[1], strict=True):
        assert relative_error(mine, theirs) < 1e-13


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_rounded_where_the_model_rounds(name):
    inputs = inputs_of(Case(40, 4, 64), name, torch.bfloat16)
    check(getattr(unfused, name), name, inputs, 5e-3)


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_extreme_logits_are_finite(size):
    check_extreme(unfused, size)


def check_extreme(module, size, device="cpu"):
    inputs = Case(9, 4, 16).read_inputs(torch.float32, device)
    c = inputs.connection
    one_column = torch.full_like(c.base, -size)
    one_column[8::4] = size  # column 0 of comb takes everything
    for base in (c.base * size, one_column):
        given = replace(inputs, connection=replace(c, base=base.detach().requires_grad_()))
        results, gradients = run(module.read, given)
        assert all(x.isfinite().all() for x in results + gradients)
        comb = results[3]
        assert (comb >= 0).all() and relative_error(comb.sum(1), torch.ones(9, 4)) < 1e-5


def test_comb_is_doubly_stochastic():
    comb = run(unfused.read, Case(50, 4, 16, size=0.5).read_inputs())[0][3]
    for axis in (1, 2):
        assert (comb.sum(axis) - 1).abs().max() < 1e-4


def rounded_up(module, device="cpu", tokens=2048, channels=64):
    """Check that a write rounds as many results up as down, addition by addition.

    Double rounding or truncation would shift all streams in every layer.
    """
    inputs = Case(tokens, 4, channels).write_inputs(torch.bfloat16, device)
    with torch.no_grad():
        got = module.write(inputs).double().cpu()
        exact = unfused.write(in_float64(inputs)).cpu()
    different = got != exact
    count = int(different.sum())
    share = float((got > exact)[different].double().mean())
    assert count > 100_000
    assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(count), share
    # Rounded once: within half of a step, and fp32's loss.
    assert ((got - exact).abs() <= exact.abs() * 2**-8 + 2e-6).all()


def test_rounding_is_not_systematic():
    rounded_up(unfused)


def test_formulas_of_transformers():
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = transformers.DeepseekV4Config(
        hidden_size=12, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5
    )
    inputs = Case(9, 4, 12).read_inputs(torch.float32)
    connection, norm = theirs.DeepseekV4HyperConnection(config), theirs.DeepseekV4RMSNorm(12, 1e-5)
    with torch.no_grad():
        for mine, other in zip(
            inputs.tensors[1:], (*connection.parameters(), norm.weight), strict=True
        ):
            other.copy_(mine)
    x = inputs.streams.detach()
    read = read_streams(*(x, inputs.connection, inputs.weight))
    post, comb, collapsed = connection(x[None])
    assert relative_error(read.normed, norm(collapsed)[0]) < 1e-6
    assert relative_error(read.post, post[0]) < 1e-6
    assert relative_error(read.comb, comb[0]) < 1e-6
    output = torch.randn(9, 12)
    want = post[..., None] * output[:, None] + torch.matmul(comb.transpose(-1, -2), x)
    assert relative_error(write_streams(output, read), want[0]) < 1e-6

    inputs = Case(9, 4, 12).read_inputs(torch.float32, head=True)
    head = theirs.DeepseekV4HyperHead(config)
    with torch.no_grad():
        for mine, other in zip(inputs.tensors[1:4], head.parameters(), strict=True):
            other.copy_(mine)
        norm.weight.copy_(inputs.weight)
    want = norm(head(inputs.streams[None]))[0]
    got = read_head(inputs.streams, inputs.connection, inputs.weight)
    assert relative_error(got, want) < 1e-6


def test_write_takes_the_streams_from_the_read():
    given = Case(5, 4, 16).read_inputs()
    layers = []
    for read, write in ((read_streams, write_streams), (None, None)):
        if read is None:
            normed, *rest = reference_read(given)
            out = reference_write(WriteInputs(torch.sin(normed), *rest, 0))
        else:
            found = read(given.streams, given.connection, given.weight)
            out = write(torch.sin(found.normed), found)
        layers.append(torch.autograd.grad(out, given.tensors, torch.cos(out.detach())))
    for mine, theirs in zip(*layers, strict=True):
        assert relative_error(mine, theirs) < 1e-11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": torch.zeros(3, 64)}, "streams must be"),
        ({"weight": torch.zeros(15)}, "weight must be"),
        ({"fn": torch.zeros(16, 64)}, "fn must be"),
        ({"base": torch.zeros(24).bfloat16()}, "base must have dtype float32"),
        ({"scale": torch.zeros(1)}, "scale must be"),
        ({"iterations": 0}, "iterations must be at least 1"),
    ],
)
def test_messages(change, message):
    given = Case(3, 4, 16).read_inputs(torch.float32)
    if next(iter(change)) in ("streams", "weight"):
        given = replace(given, **change)
    else:
        given = replace(given, connection=replace(given.connection, **change))
    with pytest.raises(ConfigError, match=message):
        read_streams(given.streams, given.connection, given.weight, policy=Policy())


def test_triton_interpreted():
    interpret(__file__)


#: Kernels by module: those that move streams, and those of a few numbers per token.
MOVING = ("project", "mix", "mix_backward", "read_backward", "write", "write_backward")
SMALL = ("weigh", "weigh_backward")
ADDING = "add_parts"


@pytest.mark.parametrize("channels", [4096, 7168])
def test_compiles_without_a_gpu(monkeypatch, channels):
    launch = pytest.importorskip(f"{PACKAGE}.launch")
    monkeypatch.setattr(launch, "_processors", lambda x: 132)
    recorders = {}
    for module, names in (
        (launch.weights, ("project", *SMALL)),
        (launch.kernels, MOVING[1:]),
        (launch.weights, (ADDING,)),
    ):
        found = recorded(monkeypatch, module, names)
        recorders |= dict(zip(names, found, strict=True))
    case = Case(150, 4, channels)
    for name in NAMES:
        run(getattr(launch, name), inputs_of(case, name, torch.bfloat16))
    counts = {name: len(recorder.launches) for name, recorder in recorders.items()}
    assert counts == {name: 1 if "write" in name else 2 for name in counts}
    for name, recorder in recorders.items():
        for args, kwargs in recorder.launches:
            for capability in (89, 90):
                compiled = assembly(recorder.kernel, args, kwargs, capability)
                assert compiled.metadata.shared <= 99 * 1024, name
                ptx = compiled.asm["ptx"]
                if name in (*MOVING, ADDING):
                    assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx, name
                if name in ("mix", "mix_backward", "write", "write_backward"):
                    assert "st.global.v4.b32" in ptx and "st.global.b16" not in ptx, name
                if name == "write":
                    assert compiled.metadata.shared == 0


#: As many tokens as a twentieth of the budget, so that torch's memory dominates; and few, whose
#: partial sums matter.
PLANNED = {
    "torch": [Case(4000, 4, 512, iterations=2, workspace=2**24)],
    "triton": [Case(4000, 4, 512, iterations=2), Case(256, 4, 7168, iterations=2)],
}


@pytest.mark.parametrize(
    ("implementation", "case"), [(name, case) for name, cases in PLANNED.items() for case in cases]
)
@pytest.mark.parametrize("name", NAMES)
def test_plans_count_what_is_kept_and_allocated(monkeypatch, name, implementation, case):
    module = unfused
    if implementation == "triton":
        module = pytest.importorskip(f"{PACKAGE}.launch")
        monkeypatch.setattr(module, "_processors", lambda x: 132)
        for name_of in ("project", *SMALL):
            monkeypatch.setattr(module.weights, name_of, Silent())
        monkeypatch.setattr(module.weights, ADDING, Silent())
        for name_of in MOVING[1:]:
            monkeypatch.setattr(module.kernels, name_of, Silent())
    operation = OPERATIONS[f"hyper_connection_{name}"]
    (candidate,) = (c for c in operation.candidates if c.name == implementation)
    meta = import_attribute(operation.fake)
    real = memory_of(getattr(module, name), inputs_of(case, name, torch.bfloat16))
    inputs = inputs_of(case, name, torch.bfloat16)
    with host((9, 0)):
        planned = memory_of(lambda given: meta(candidate, given), on_meta(inputs))
    assert planned[0] == pytest.approx(real[0], rel=0.005)
    assert planned[1] == pytest.approx(real[1], rel=0.06 if implementation == "torch" else 0.02)


class Silent:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def on_meta(inputs):
    leaves = [x.detach().to("meta").requires_grad_() for x in inputs.tensors]
    if isinstance(inputs, WriteInputs):
        return WriteInputs(*leaves, inputs.workspace_bytes)
    connection = replace(inputs.connection, fn=leaves[1], base=leaves[2], scale=leaves[3])
    return replace(inputs, streams=leaves[0], connection=connection, weight=leaves[4])


def memory_of(call, inputs):
    """Return bytes that live between forward and backward, and the peak in both."""
    tracker = MemoryTracker()
    tracker.ignore(*inputs.tensors)
    with tracker:
        results = call(inputs)
        results = results if isinstance(results, tuple) else (results,)
        kept = tracker.live
        upstream = [torch.zeros_like(result) for result in results]
        gradients = torch.autograd.grad(results, inputs.tensors, upstream)
    assert len(gradients) == len(inputs.tensors)
    return kept, tracker.peak


#: Widths of V4-Flash and V4-Pro, one that no tile divides, one token, and a long microbatch.
GPU_CASES = [
    Case(8192, 4, 4096), Case(1000, 4, 7168), Case(1, 4, 4096), Case(333, 4, 1000),
    Case(77, 2, 4096),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_triton_on_the_gpu(name, case):
    launch = pytest.importorskip(f"{PACKAGE}.launch")
    inputs = inputs_of(case, name, torch.bfloat16, "cuda")
    check(getattr(launch, name), name, inputs, 5e-3, expected=unfused)

    def call():
        results = getattr(launch, name)(inputs)
        return results[0] if isinstance(results, tuple) else results

    assert_repeatable(call, inputs.tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_fp32_on_the_gpu(name):
    launch = pytest.importorskip(f"{PACKAGE}.launch")
    inputs = inputs_of(Case(300, 4, 1024), name, torch.float32, "cuda")
    check(getattr(launch, name), name, inputs, 1e-5, expected=unfused)


@pytest.mark.gpu
def test_extremes_and_rounding_on_the_gpu():
    launch = pytest.importorskip(f"{PACKAGE}.launch")
    check_extreme(launch, 1e30, "cuda")
    rounded_up(launch, "cuda", tokens=4096, channels=512)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    launch = pytest.importorskip(f"{PACKAGE}.launch")
    tokens, channels = 140_000, 4096
    inputs = Case(2, 4, channels).write_inputs(torch.bfloat16, "cuda")
    repeated = [x.detach().repeat(tokens // 2, *[1] * (x.dim() - 1)) for x in inputs.tensors]
    assert repeated[1].numel() > 2**31
    out = launch.write(WriteInputs(*repeated, 0))
    assert torch.equal(out[-2:], launch.write(inputs)) and torch.equal(out[:2], out[-2:])
    del out
    given = Case(2, 4, channels).read_inputs(torch.bfloat16, "cuda")
    with torch.no_grad():
        normed = launch.read(replace(given, streams=repeated[1]))[0]
        few = launch.read(replace(given, streams=repeated[1][-2:]))[0]
    assert relative_error(normed[-2:], few) < 5e-3
    del normed

    def gradient(streams):
        streams = streams.detach().requires_grad_()
        normed, handed_on, *_ = launch.read(replace(given, streams=streams))
        upstream = inputs.output.detach().repeat(len(streams) // 2, 1), streams.detach()
        return torch.autograd.grad((normed, handed_on), streams, upstream)[0]

    found = gradient(repeated[1])[-2:].clone()
    assert relative_error(found, gradient(repeated[1][-2:])) < 5e-3


def check_added(launch):
    """Check parameters' gradients from more parts than the loops of ``add_parts`` take at once."""
    for parts, dtype in (((1, 70, 130), torch.bfloat16), ((5, 264, 300), torch.float32)):
        shapes = ((parts[0], 24, 160), (parts[1], 100), (parts[2], 27))
        given = [torch.randn(*shape) for shape in shapes]
        like = torch.empty(24, 160), torch.empty(100, dtype=dtype)
        for found, of_parts in zip(launch._added(*like, *given), given, strict=True):
            bound = 5e-3 if found.dtype == torch.bfloat16 else 1e-6
            assert relative_error(found, of_parts.double().sum(0)) < bound


def main():
    from megatron_dsa.ops.hyper_connections.triton import launch

    prepare_interpreter()
    let_interpreter_use_bf16()
    cases = [case for case in CASES if case.streams in (2, 4)]
    # More tokens and columns than a block, in several parts; and a second block of tokens.
    cases += [Case(70, 4, 160, iterations=3), Case(150, 2, 30, iterations=2)]
    for name in NAMES:
        call = getattr(launch, name)
        for case in cases:
            if case.tokens:
                check(call, name, inputs_of(case, name, torch.float32), 1e-5)
            else:
                run(call, inputs_of(case, name, torch.float32))
        check(call, name, inputs_of(Case(20, 4, 40), name, torch.bfloat16), 5e-3)
    check_added(launch)
    check_extreme(launch, 1e30)
    rounded_up(launch, tokens=420, channels=64)


if __name__ == "__main__":
    main()
