"""Operations of KDA layers: torch, and fla on a GPU, against the recurrence in float64."""

import dataclasses
from functools import partial

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch.packages import FLA
from megatron_dsa.ops.kda import spec
from megatron_dsa.ops.kda import torch as unfused
from megatron_dsa.ops.kda.api import delta_attention
from tests.helpers import leaf, relative_error

LARGE = 2**28
#: Batch and lengths of documents: below, at and above a chunk, of 1 to 3 tokens, empty; packed
#: where the batch is 0.
SEQUENCES = {
    "shorter than a chunk": (1, [5]),
    "whole chunks": (1, [64]),
    "chunks and a rest": (2, [71]),
    "packed": (0, [1, 2, 0, 3, 34, 1, 31, 27]),
    "packed, cut at chunks": (0, [32, 0, 64, 0]),
    "packed, one token each": (0, [1] * 40),
}
NAMES = {
    "kda_convolution": ("out", "dx", "dweight"),
    "kda_attention": ("out", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"),
    "kda_norm": ("out", "dx", "dgate", "dweight"),
}
REFERENCES = {
    "kda_convolution": spec.reference_convolution,
    "kda_attention": spec.reference_attention,
    "kda_norm": spec.reference_norm,
}


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def documents(name, device="cpu"):
    """Batch, tokens and ``cu_seqlens`` of a case."""
    batch, lengths = SEQUENCES[name]
    if batch:
        return batch, lengths[0], None
    return 1, sum(lengths), torch.tensor([0, *lengths], device=device).cumsum(0)


def make(operation, case, heads=3, dim=8, dtype=torch.float64, device="cpu", steep=1.0):
    """Inputs of an operation; ``steep`` scales the gates' inputs, up to decays of e^-5 and 1."""
    batch, tokens, cu_seqlens = case

    def new(*shape, seed, scale=1.0, dtype=dtype):
        return leaf(*shape, seed=seed, scale=scale, dtype=dtype, device=device)

    by_head = batch, tokens, heads, dim
    if operation == "kda_convolution":
        weight = new(heads * dim, 1, 4, seed=2, dtype=wide(dtype))
        return spec.ConvolutionInputs(
            new(batch, tokens, heads * dim, seed=1), weight, cu_seqlens, LARGE
        )
    if operation == "kda_norm":
        x, gate = new(*by_head, seed=1), new(*by_head, seed=2)
        return spec.NormInputs(x, gate, new(dim, seed=3), 1e-5, LARGE)
    q, k, v = (new(*by_head, seed=seed) for seed in (1, 2, 3))
    return spec.KDAInputs(
        q, k, v, new(*by_head, seed=4, scale=steep), new(batch, tokens, heads, seed=5),
        new(heads, seed=6, scale=0.3, dtype=wide(dtype)),
        new(heads * dim, seed=7, dtype=wide(dtype)), -5.0, cu_seqlens, LARGE,
    )  # fmt: skip


def leaves(inputs):
    """The differentiable inputs by their names."""
    fields = ((f.name, getattr(inputs, f.name)) for f in dataclasses.fields(inputs))
    return {name: x for name, x in fields if isinstance(x, torch.Tensor) and x.is_floating_point()}


def in_double(inputs):
    doubles = {name: x.detach().double().requires_grad_() for name, x in leaves(inputs).items()}
    return dataclasses.replace(inputs, **doubles)


def run(function, inputs):
    """The output and all gradients for a fixed upstream gradient."""
    out = function(inputs)
    grad = leaf(*out.shape, seed=9, dtype=torch.bfloat16, device=out.device).detach()
    return [out.detach(), *torch.autograd.grad(out, leaves(inputs).values(), grad.to(out.dtype))]


def check(operation, inputs, tolerance, function=None):
    function = function or getattr(unfused, operation)
    got = run(function, inputs)
    want = run(REFERENCES[operation], in_double(inputs))
    for name, x, y in zip(NAMES[operation], got, want, strict=True):
        assert x.shape == y.shape and relative_error(x, y) < tolerance, name
    for x, given in zip(got[1:], leaves(inputs).values(), strict=True):
        assert x.dtype == given.dtype


@pytest.mark.parametrize("case", SEQUENCES)
@pytest.mark.parametrize("operation", NAMES)
def test_against_the_recurrence(operation, case):
    check(operation, make(operation, documents(case)), 1e-12)


@pytest.mark.parametrize("operation", NAMES)
def test_one_step_of_the_workspace_at_a_time(operation):
    inputs = make(operation, documents("packed"))
    small = dataclasses.replace(inputs, workspace_bytes=1)
    if operation == "kda_attention":
        assert small.segment == spec.CHUNK < inputs.segment
    function = getattr(unfused, operation)
    for x, y in zip(run(function, small), run(function, inputs), strict=True):
        assert relative_error(x, y) < 1e-13


@pytest.mark.parametrize("steep", [1.0, 40.0], ids=["usual gates", "gates at both ends"])
def test_fp32(steep):
    """Sums of 32 log decays reach -160, whose exponential is 0 in fp32."""
    inputs = make("kda_attention", documents("chunks and a rest"), dtype=torch.float32, steep=steep)
    check("kda_attention", inputs, 1e-5)


@pytest.mark.parametrize("operation", NAMES)
def test_bf16_is_rounded_at_the_end(operation):
    inputs = make(operation, documents("packed"), dtype=torch.bfloat16)
    check(operation, inputs, 5e-3)


def test_equal_keys():
    """A key that is written again and again, which the corrections must take back."""
    inputs = make("kda_attention", (1, 70, None), dtype=torch.float32)
    with torch.no_grad():
        inputs.k.copy_(inputs.k[:, :1].clone())
        inputs.beta.fill_(20.0)
        inputs.g.fill_(-20.0)
    check("kda_attention", inputs, 5e-5)


@pytest.mark.parametrize("operation", ["kda_convolution", "kda_attention"])
def test_documents_do_not_see_each_other(operation):
    """Tokens of other documents, infinite even, change no bit of one, nor its gradients."""
    inputs = make(operation, documents("packed, cut at chunks"), dtype=torch.float32)
    poisoned = dataclasses.replace(
        inputs, **{n: x.detach().clone().requires_grad_() for n, x in leaves(inputs).items()}
    )
    with torch.no_grad():
        for x in leaves(poisoned).values():
            if x.dim() > 2 and x.shape[:2] == (1, 96):
                x[:, :32] = float("inf") if operation == "kda_convolution" else 1e4
    function = getattr(unfused, operation)
    for x, y in zip(*(run(function, each) for each in (inputs, poisoned)), strict=True):
        if x.shape[:2] == (1, 96):
            assert x[:, 32:].equal(y[:, 32:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_bound": -5.5}, "lower_bound must be at least -5 and below 0, got -5.5"),
        ({"lower_bound": 0.0}, "lower_bound must be at least -5"),
        ({"k": torch.zeros(2, 4, 3, 9)}, r"k must be \[2, 4, 3, 8\]"),
        ({"g": torch.zeros(2, 4, 3, 8).double()}, "g must have dtype float32"),
        ({"A_log": torch.zeros(3).bfloat16()}, "A_log must have dtype float32"),
        ({"dt_bias": torch.zeros(3)}, r"dt_bias must be \[24\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "the batch must be 1 with cu_seqlens, got 2"),
    ],
)
def test_messages(change, message):
    by_head = dict.fromkeys("qkvg", torch.zeros(2, 4, 3, 8))
    arguments = by_head | {
        "beta": torch.zeros(2, 4, 3), "A_log": torch.zeros(3), "dt_bias": torch.zeros(24),
        "lower_bound": -5.0,
    }  # fmt: skip
    assert delta_attention(**arguments).shape == (2, 4, 3, 8)
    with pytest.raises(ConfigError, match=message):
        delta_attention(**arguments | change)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("operation", NAMES)
def test_a_plan_counts_what_is_kept(operation, segments):
    """Output and, of the delta rule, the states before each segment."""
    fake, kept = getattr(spec, f"fake_{operation}"), []
    torchs = OPERATIONS[operation].candidates[-1]
    for device, run_it in (("cpu", getattr(unfused, operation)), ("meta", partial(fake, torchs))):
        inputs = make(operation, (2, 96, None), dtype=torch.bfloat16)
        settings = {
            name: x.detach().to(device).requires_grad_() for name, x in leaves(inputs).items()
        }
        if segments > 1:
            settings["workspace_bytes"] = 1
        inputs, tracker = dataclasses.replace(inputs, **settings), MemoryTracker()
        tracker.ignore(*leaves(inputs).values())
        with tracker:
            out = run_it(inputs)
        kept.append(tracker.live)
        assert out.grad_fn is not None
    assert kept[0] == kept[1] > 0


@pytest.mark.gpu
@pytest.mark.skipif(FLA.problem() is not None, reason="fla-core is not installed")
@pytest.mark.parametrize("case", ["packed", "one row", "batch"])
@pytest.mark.parametrize("operation", NAMES)
def test_fla_on_the_gpu(operation, case):
    """bf16 in the head dims of GLM-5.3, against float64; the same bits every time."""
    from megatron_dsa.ops.kda import fla

    lengths = [1, 2, 3, 0, 700, 64, 1, 129]
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    shape = {"packed": (1, 900, bounds), "one row": (1, 777, None), "batch": (2, 300, None)}[case]
    inputs = make(operation, shape, heads=4, dim=128, dtype=torch.bfloat16, device="cuda")
    function = getattr(fla, operation)
    check(operation, inputs, 1e-2, function)
    for x, y in zip(run(function, inputs), run(function, inputs), strict=True):
        assert x.equal(y)
