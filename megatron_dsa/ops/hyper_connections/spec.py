"""Hyper-connections: inputs, implementations, fake kernels, references."""

from dataclasses import dataclass

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_tensor
from megatron_dsa.ops.dispatch import Candidate, OpCall, Operation, Reason, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON
from megatron_dsa.ops.dispatch.support import HALF
from megatron_dsa.ops.hyper_connections.triton.tiles import read_backward_tiles, weight_parts
from megatron_dsa.ops.meta import differentiable, empty_sums, take_workspace

_HERE = __package__

#: Numbers of streams that the Triton kernels support: a tile holds all streams.
STREAMS = (2, 4)
#: Maximum channels: the mix kernel holds all channels of a token in registers.
MOST_CHANNELS = 16384
#: Streaming multiprocessors (SMs) of an H100 or H200, assumed in memory plans.
_PROCESSORS = 132


def _why_not_triton(call: OpCall) -> Reason | None:
    if call.heads not in STREAMS:
        return Reason(f"takes {' or '.join(map(str, STREAMS))} streams", f", got {call.heads}")
    if call.qk_dim > MOST_CHANNELS:
        return Reason(f"takes up to {MOST_CHANNELS} channels", f", got {call.qk_dim}")
    return None


def _operation(name: str, title: str) -> Operation:
    fused = Support(
        "2 or 4 streams; all gradients", TRITON, dtypes=(*HALF, torch.float32),
        probe=_why_not_triton, **PORTABLE,
    )  # fmt: skip
    return Operation(
        f"hyper_connection_{name}",
        title,
        (
            Candidate("triton", f"{_HERE}.triton.launch:{name}", fused),
            Candidate("torch", f"{_HERE}.torch:{name}", Support("any shape"), fused=False),
        ),
        fake=f"{_HERE}.spec:fake_{name}",
    )


READ = _operation("read", "weights of a hyper-connection, mix and norm, forward and backward")
WRITE = _operation("write", "write-back of a hyper-connection, forward and backward")
HEAD = _operation("head", "last mix of the streams and norm, forward and backward")


@dataclass(frozen=True)
class Connection:
    """Parameters of one hyper-connection; ``n`` streams of ``C`` channels.

    Attributes:
        fn: ``[(2 + n) * n, n * C]`` fp32 (fp64): projection to the logits of ``pre``, ``post`` and
            ``comb``; ``[n, n * C]``, only ``pre``, for a head.
        base: one number per output of ``fn``, added after multiplication by ``scale``.
        scale: ``[3]``, for pre, post, comb; ``[1]`` for a head.
        eps: added to ``pre``, to the softmax of ``comb`` and to the sums in its denominators.
        norm_eps: added to the mean squares of both norms.
        iterations: normalisations over dim 0 of ``comb``; one fewer over dim 1.
    """

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    eps: float
    norm_eps: float
    iterations: int = 1


@dataclass(frozen=True)
class ReadInputs:
    streams: torch.Tensor
    connection: Connection
    weight: torch.Tensor
    workspace_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        c = self.connection
        return self.streams, c.fn, c.base, c.scale, self.weight

    @property
    def settings(self) -> tuple[float, float, int]:
        c = self.connection
        return c.eps, c.norm_eps, c.iterations

    def check(self, head: bool) -> None:
        x, c = self.streams, self.connection
        _require_streams(x)
        streams, channels = x.shape[1:]
        outputs = streams if head else (2 + streams) * streams
        dtypes, fix = (accumulation_dtype(x.dtype),), "pass the parameters of this connection"
        require_tensor("fn", c.fn, (outputs, streams * channels), dtypes, x, fix)
        require_tensor("base", c.base, (outputs,), dtypes, x, fix)
        require_tensor("scale", c.scale, (1 if head else 3,), dtypes, x, fix)
        require_tensor("weight", self.weight, (channels,), FLOATS, x, "pass the norm's weight")
        require(
            c.iterations >= 1,
            f"iterations must be at least 1, got {c.iterations}: pass the model's own number",
        )


@dataclass(frozen=True)
class WriteInputs:
    """Inputs of ``write_streams``: ``comb[i, j]`` is stream ``i``'s share of new stream ``j``."""

    output: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    workspace_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.output, self.streams, self.post, self.comb

    def check(self) -> None:
        x = self.streams
        _require_streams(x)
        tokens, n, channels = x.shape
        fix, dtypes = "pass what this connection read", (accumulation_dtype(x.dtype),)
        require_tensor("output", self.output, (tokens, channels), (x.dtype,), x, fix)
        require_tensor("post", self.post, (tokens, n), dtypes, x, fix)
        require_tensor("comb", self.comb, (tokens, n, n), dtypes, x, fix)


def _require_streams(x: torch.Tensor) -> None:
    fix = "flatten sequence and batch to tokens, and split the width into streams"
    require_tensor("streams", x, ("tokens", "streams", "channels"), FLOATS, fix=fix)
    require(
        x.shape[1] >= 1 and x.shape[2] >= 1,
        f"streams must have a stream and a channel, got shape {tuple(x.shape)}: {fix}",
    )


def fake_read(candidate: Candidate, inputs: ReadInputs) -> tuple[torch.Tensor, ...]:
    return _fake_read(candidate.fused, inputs, head=False)


def fake_head(candidate: Candidate, inputs: ReadInputs) -> torch.Tensor:
    return _fake_read(candidate.fused, inputs, head=True)


def _fake_read(fused: bool, inputs: ReadInputs, head: bool):
    size = inputs.workspace_bytes

    def forward(x, *parameters):
        numbers = () if head and not fused else _numbers(x, parameters[0])
        numbers = numbers[:4] if head else numbers
        normed = x.new_empty(x.shape[0], x.shape[2])
        _take(fused, x, size)
        results = (normed,) if head else (normed, x, *numbers[4:])
        return results, (x, *parameters, *(numbers[:4] if fused else ()))

    def backward(x, *kept):
        return _gradients(fused, size, x, kept[:4])

    return differentiable(inputs.tensors, forward, backward, results=1 if head else 4)


def fake_write(candidate: Candidate, inputs: WriteInputs) -> torch.Tensor:
    fused, size = candidate.fused, inputs.workspace_bytes

    def forward(*tensors):
        out = torch.empty_like(tensors[1])
        _take(fused, out, size)
        return (out,), tensors

    def backward(*kept):
        gradients = tuple(map(torch.empty_like, kept))
        _take(fused, kept[0], size)
        return gradients

    return differentiable(inputs.tensors, forward, backward)


def _take(fused: bool, like: torch.Tensor, size: int) -> None:
    if not fused:
        take_workspace(like, size)


def _numbers(x, fn):
    tokens, n, _ = x.shape
    shapes = ((fn.shape[0],), (), (), (n,), (n,), (n, n))
    return tuple(empty_sums(x, tokens, *shape) for shape in shapes)


def _gradients(fused: bool, workspace_bytes: int, x, parameters):
    temporaries = []
    if fused:
        (tokens, n, channels), fn = x.shape, parameters[0]
        _, parts, _ = read_backward_tiles(tokens, channels, n, fn.shape[0], _PROCESSORS)
        temporaries = [
            fn.new_empty(weight_parts(tokens, _PROCESSORS), channels),
            x.new_empty(tokens, channels), fn.new_empty(parts, *fn.shape),
            fn.new_empty(tokens, fn.shape[0] + n + 1),
        ]  # fmt: skip
    gradients = tuple(map(torch.empty_like, (x, *parameters)))
    _take(fused, x, workspace_bytes)
    del temporaries
    return gradients


def reference_read(inputs) -> tuple[torch.Tensor, ...]:
    n = inputs.streams.shape[1]
    normed, posts, combs = [], [], []
    for x in inputs.streams.unbind():
        m, base, scale = _projected(x, inputs), inputs.connection.base, inputs.connection.scale
        pre = torch.sigmoid(m[:n] * scale[0] + base[:n]) + inputs.connection.eps
        posts.append(2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n]))
        logits = (m[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
        combs.append(sinkhorn(logits, inputs.connection.iterations, inputs.connection.eps))
        normed.append(_mixed(x, pre, inputs))
    return torch.stack(normed), inputs.streams, torch.stack(posts), torch.stack(combs)


def reference_write(inputs) -> torch.Tensor:
    out = []
    for y, x, post, comb in zip(*inputs.tensors, strict=True):
        y, x = y.to(post.dtype), x.to(post.dtype)
        n = len(post)
        new = [post[j] * y + sum(comb[i, j] * x[i] for i in range(n)) for j in range(n)]
        out.append(torch.stack(new).to(inputs.streams.dtype))
    return torch.stack(out)


def reference_head(inputs) -> torch.Tensor:
    c = inputs.connection
    normed = []
    for x in inputs.streams.unbind():
        pre = torch.sigmoid(_projected(x, inputs) * c.scale[0] + c.base) + c.eps
        normed.append(_mixed(x, pre, inputs))
    return torch.stack(normed)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    comb = torch.softmax(logits, 1) + eps
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb


def _projected(x, inputs) -> torch.Tensor:
    fn = inputs.connection.fn
    flat = x.flatten().to(fn.dtype)
    return fn @ flat * torch.rsqrt(flat.square().mean() + inputs.connection.norm_eps)


def _mixed(x, pre, inputs) -> torch.Tensor:
    u = sum(weight * stream for weight, stream in zip(pre, x.to(pre.dtype), strict=True))
    u = u + (u.to(x.dtype).to(u.dtype) - u).detach()
    u = u * torch.rsqrt(u.square().mean() + inputs.connection.norm_eps)
    return (u * inputs.weight.to(u.dtype)).to(x.dtype)
