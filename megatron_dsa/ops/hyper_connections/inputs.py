"""What a call of a hyper-connection holds."""

from dataclasses import dataclass

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import accumulation_dtype
from megatron_dsa.ops.common.checks import FLOATS, require_tensor


@dataclass(frozen=True)
class Connection:
    """Parameters of one hyper-connection; ``n`` streams of ``C`` channels.

    Attributes:
        fn: ``[(2 + n) * n, n * C]`` fp32 (fp64 for fp64 streams): projects all streams of a token
            to what ``pre`` (n), ``post`` (n) and ``comb`` (n * n) are made of. A head has ``[n, n *
            C]``: ``pre`` alone.
        base: one number per row of ``fn``, added after ``scale``.
        scale: ``[3]``, one for each of the three; ``[1]`` for a head.
        eps: added to ``pre``, to the softmax of ``comb`` and to the sums that divide it.
        norm_eps: added to mean squares, of all streams and of what the layer reads.
        iterations: normalisations of the columns of ``comb``; one less of its rows.
    """

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    eps: float
    norm_eps: float
    iterations: int = 1


@dataclass(frozen=True)
class ReadInputs:
    """Inputs of a read, or of the head, as every implementation receives them.

    Attributes:
        streams: ``[tokens, n, C]``.
        connection: the parameters.
        weight: ``[C]``, of the RMSNorm of what is read; any floating dtype.
        workspace_bytes: budget for temporary memory.
    """

    streams: torch.Tensor
    connection: Connection
    weight: torch.Tensor
    workspace_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is differentiated: streams, ``fn``, ``base``, ``scale`` and the norm's weight."""
        c = self.connection
        return self.streams, c.fn, c.base, c.scale, self.weight

    @property
    def settings(self) -> tuple[float, float, int]:
        """``eps``, ``norm_eps`` and ``iterations``."""
        c = self.connection
        return c.eps, c.norm_eps, c.iterations

    def check(self, head: bool) -> None:
        """Raise a :class:`ConfigError` unless the shapes and dtypes fit."""
        x, c = self.streams, self.connection
        require_streams(x)
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


def require_streams(x: torch.Tensor) -> None:
    """Raise a :class:`ConfigError` unless ``x`` is ``[tokens, n, C]`` of a floating dtype."""
    fix = "flatten sequence and batch to tokens, and split the width into streams"
    require_tensor("streams", x, ("tokens", "streams", "channels"), FLOATS, fix=fix)
    require(
        x.shape[1] >= 1 and x.shape[2] >= 1,
        f"streams must have a stream and a channel, got shape {tuple(x.shape)}: {fix}",
    )


@dataclass(frozen=True)
class WriteInputs:
    """Inputs of a write, as every implementation receives them.

    Attributes:
        output: ``[tokens, C]``, what attention or the MLP returned, in the dtype of the streams.
        streams: ``[tokens, n, C]`` that it read.
        post: ``[tokens, n]`` fp32 (fp64 for fp64 streams), from the read.
        comb: ``[tokens, n, n]``, the same; entry ``i, j`` is the part of stream ``i`` in the new
            stream ``j``.
        workspace_bytes: budget for temporary memory.
    """

    output: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    workspace_bytes: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What is differentiated."""
        return self.output, self.streams, self.post, self.comb

    def check(self) -> None:
        """Raise a :class:`ConfigError` unless the shapes and dtypes fit."""
        x = self.streams
        require_streams(x)
        tokens, n, channels = x.shape
        fix, dtypes = "pass what this connection read", (accumulation_dtype(x.dtype),)
        require_tensor("output", self.output, (tokens, channels), (x.dtype,), x, fix)
        require_tensor("post", self.post, (tokens, n), dtypes, x, fix)
        require_tensor("comb", self.comb, (tokens, n, n), dtypes, x, fix)
