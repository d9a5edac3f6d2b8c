"""Operations of hyper-connections: inputs, calls, necessary traffic, checks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.connections import eager
from benchmarks.settings import Settings
from benchmarks.timing import Clock, measure
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.hyper_connections.api import (
    Connection,
    StreamsRead,
    read_head,
    read_streams,
    write_streams,
)
from megatron_dsa.testing.comparison import MODEL_SHAPES, Comparison

DTYPE = torch.bfloat16
STREAMS, EPS, ITERATIONS = 4, 1e-6, 20
OPERATIONS = ("read", "write", "head")
#: Compared with float64.
CHECKED_TOKENS = 512
#: Most seconds of timed calls.
SECONDS = 1.0
#: Necessary traffic in ``C`` elements per token. A read moves the streams twice: their projection
#: precedes the mix. Its backward reads streams, gradient and mixed gradient, and reads and writes
#: for the sum.
TRAFFIC = {
    "read_forward": 9, "read_backward": 19,
    "write_forward": 9, "write_backward": 14,
    "head_forward": 9, "head_backward": 15,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A pass of an operation, and a way: ``triton``, ``torch`` or ``compiled``."""

    part: str
    tokens: int
    channels: int
    way: str
    workspace_bytes: int

    @property
    def operation(self) -> str:
        """Return ``read``, ``write`` or ``head``."""
        return self.part.partition("_")[0]

    @property
    def backward(self) -> bool:
        """Return whether gradients are timed."""
        return self.part.endswith("_backward")


def inputs_of(job: Job, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Draw the differentiated tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def values(*shape: int, dtype=torch.float32, scale=1.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=generator, device=device) * scale
        return x.to(dtype).requires_grad_()

    tokens, channels, n = job.tokens, job.channels, STREAMS
    x = values(tokens, n, channels, dtype=DTYPE)
    if job.operation == "write":
        return values(tokens, channels, dtype=DTYPE), x, values(tokens, n), values(tokens, n, n)
    rows, scales = (n, 1) if job.operation == "head" else (n * (n + 2), 3)
    fn = values(rows, n * channels, scale=(n * channels) ** -0.5)
    return x, fn, values(rows), values(scales), values(channels, dtype=DTYPE)


def expression(job: Job) -> Callable:
    if job.operation == "write":
        return eager.write
    plain = eager.read if job.operation == "read" else eager.head
    return lambda *tensors: plain(*tensors, EPS, EPS, ITERATIONS, DTYPE)


def function(job: Job) -> Callable:
    if job.way == "compiled":
        return torch.compile(expression(job), dynamic=False)
    named = ((f"hyper_connection_{job.operation}", job.way),)
    policy = Policy(workspace_bytes=job.workspace_bytes, named=named)

    def run(x, *rest):
        if job.operation == "write":
            return write_streams(x, StreamsRead(x, *rest), policy=policy)
        *parameters, weight = rest
        connection = Connection(*parameters, EPS, EPS, ITERATIONS)
        if job.operation == "head":
            return read_head(x, connection, weight, policy=policy)
        # The streams are also an output: their gradient comes from the write.
        return read_streams(x, connection, weight, policy=policy)

    return run


def outputs_of(job: Job, run: Callable, inputs) -> list[torch.Tensor]:
    """Return all outputs; a plain read does not return the streams."""
    found = run(*inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    if job.operation == "read" and len(found) == 3:
        found.insert(1, inputs[0].view_as(inputs[0]))
    return found


def compare(pairs) -> Comparison:
    """Compare ``(name, found, expected)`` triples."""
    result = Comparison(MODEL_SHAPES[DTYPE])
    for name, found, right in pairs:
        result.compare(name, found, right)
    return result


def measure_operation(job: Job, device: torch.device, clock: Clock, settings: Settings) -> dict:
    inputs, run = inputs_of(job, device), function(job)
    checked = min(job.tokens, CHECKED_TOKENS)
    # In a read and a head only the streams are per token, in a write all inputs.
    per_token = [place == 0 or job.operation == "write" for place in range(len(inputs))]
    wide = [
        (x[:checked] if cut else x).detach().double().requires_grad_()
        for x, cut in zip(inputs, per_token, strict=True)
    ]

    def outputs() -> list[torch.Tensor]:
        return outputs_of(job, run, inputs)

    def expected() -> list[torch.Tensor]:
        return outputs_of(job, expression(job), wide)

    if job.backward:
        kept = outputs()
        generator = torch.Generator(device).manual_seed(1)
        given = [torch.randn(x.shape, generator=generator, device=device).to(x.dtype) for x in kept]

        def call():
            return torch.autograd.grad(kept, inputs, given, retain_graph=True)

        def check(gradients):
            rights = torch.autograd.grad(expected(), wide, [g[:checked].double() for g in given])
            return compare(
                (f"gradient {place}", found[: len(right)], right)
                for place, (found, right, cut) in enumerate(
                    zip(gradients, rights, per_token, strict=True)
                )
                # Gradients of parameters include other tokens.
                if cut or checked == job.tokens
            )

    else:
        call = outputs

        def check(found):
            pairs = zip(found, expected(), strict=True)
            return compare(
                (f"output {place}", x[:checked], right) for place, (x, right) in enumerate(pairs)
            )

    row = measure(call, check, clock, settings.repeats, min(settings.budget, SECONDS))
    if row["status"] == "ok":
        moved = TRAFFIC[job.part] * job.tokens * job.channels * DTYPE.itemsize
        row["tb_per_s"] = moved / row["ms"] / 1e9
    return row
