"""Inputs of hyper-connections, and comparisons of results and gradients."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.hyper_connections import spec
from megatron_dsa.ops.hyper_connections.spec import Connection, ReadInputs, WriteInputs
from tests.helpers import relative_error

EPS, NORM_EPS = 1e-6, 1e-5
RESULTS = ("normed", "streams", "post", "comb")
TENSORS = ("streams", "fn", "base", "scale", "weight")
REFERENCE = SimpleNamespace(
    read=spec.reference_read, write=spec.reference_write, head=spec.reference_head
)


@dataclass(frozen=True)
class Case:
    """Sizes of a call; ``size`` is about that of the logits."""

    tokens: int
    streams: int
    channels: int
    iterations: int = 20
    size: float = 1.0
    workspace: int = 2**26

    def read_inputs(self, dtype=torch.float64, device="cpu", head=False):
        """Draw leaves of a read or a head."""
        n, wide = self.streams, accumulation_dtype(dtype)
        generator = torch.Generator(device).manual_seed(self.tokens + self.channels)

        def values(*shape, scale=1.0, mean=0.0, dtype=wide):
            x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return (x * scale + mean).to(dtype).requires_grad_()

        outputs = n if head else n * (n + 2)
        x = values(self.tokens, n, self.channels, dtype=dtype)
        connection = Connection(
            values(outputs, n * self.channels, scale=self.size * (n * self.channels) ** -0.5),
            values(outputs, scale=0.5),
            values(1 if head else 3, mean=1.0, scale=0.3),
            EPS, NORM_EPS, self.iterations,
        )  # fmt: skip
        weight = values(self.channels, mean=1.0, scale=0.2, dtype=dtype)
        return ReadInputs(x, connection, weight, self.workspace)

    def write_inputs(self, dtype=torch.float64, device="cpu"):
        """Draw leaves of a write, with positive weights."""
        read = self.read_inputs(dtype, device)
        x = read.streams
        generator = torch.Generator(device).manual_seed(3)
        n, wide = self.streams, accumulation_dtype(dtype)
        post, comb = (
            torch.rand(self.tokens, *shape, generator=generator, device=device).to(wide)
            for shape in ((n,), (n, n))
        )
        output = torch.randn(x[:, 0].shape, generator=generator, device=device).to(dtype)
        leaves = (output.requires_grad_(), x, post.requires_grad_(), comb.requires_grad_())
        return WriteInputs(*leaves, self.workspace)


def in_float64(inputs):
    wide = [x.detach().double().requires_grad_() for x in inputs.tensors]
    if isinstance(inputs, WriteInputs):
        return WriteInputs(*wide, inputs.workspace_bytes)
    connection = replace(inputs.connection, fn=wide[1], base=wide[2], scale=wide[3])
    return replace(inputs, streams=wide[0], connection=connection, weight=wide[4])


def run(call, inputs, upstream=None):
    """Return results, and gradients of all inputs for fixed output gradients."""
    results = call(inputs)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(7)
    given = [
        torch.randn(r.shape, generator=generator).bfloat16().to(r.device, r.dtype) for r in results
    ]
    gradients = torch.autograd.grad(results, inputs.tensors, given)
    return [r.detach().clone() for r in results], list(gradients)


def check(call, name, inputs, tolerance, expected=REFERENCE):
    """Compare a call (read, write or head) with ``expected`` in float64."""
    got = run(call, inputs)
    want = run(getattr(expected, name), in_float64(inputs))
    for kind, mine, theirs in zip(("result", "gradient"), got, want, strict=True):
        for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.shape == b.shape, (kind, place)
            if a.numel():
                assert relative_error(a, b) < tolerance, (kind, place, relative_error(a, b))
    for x, gradient in zip(inputs.tensors, got[1], strict=True):
        assert gradient.dtype == x.dtype
    return got
