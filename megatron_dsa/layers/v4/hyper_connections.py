"""Hyper-connections around Megatron's transformer layer.

Hidden states are ``n`` concatenated streams. Norms return a sublayer's input and the streams as
Megatron's output and residual; the write-back replaces the residual addition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dsa.config.model import options_of
from megatron_dsa.errors import require
from megatron_dsa.layers.linears import Fp32Parameters, new_norm_weight, new_parameter
from megatron_dsa.layers.required_ops import stream_ops
from megatron_dsa.layers.warm_up import resolve_kernels
from megatron_dsa.ops.hyper_connections.api import (
    Connection,
    StreamsRead,
    read_head,
    read_streams,
    write_streams,
)

#: Each sublayer's parameter prefix, norm and residual addition.
_SUBLAYERS = (
    ("attn", "input_layernorm", "self_attn_bda"),
    ("ffn", "pre_mlp_layernorm", "mlp_bda"),
)
_PARTS = ("fn", "base", "scale")


def _add_parameters(module: Any, kind: str, config, outputs: int, scales: int) -> None:
    """Add ``hc_{kind}_fn``, ``base`` and ``scale``, initialised as in transformers."""
    width = config.hc_mult * config.hidden_size
    values = (new_parameter(config, *s) for s in ((outputs, width), (outputs,), (scales,)))
    for part, parameter in zip(_PARTS, values, strict=True):
        # Ranks have different tokens, so ranks sum the parameters' gradients.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        setattr(module, f"hc_{kind}_{part}", parameter)
    if config.perform_initialization:
        config.init_method(getattr(module, f"hc_{kind}_fn"))
        torch.nn.init.ones_(getattr(module, f"hc_{kind}_scale"))


def _connection(module: Any, kind: str, config) -> Connection:
    fn, base, scale = (getattr(module, f"hc_{kind}_{part}") for part in _PARTS)
    return Connection(
        fn, base, scale, config.hc_eps, config.layernorm_epsilon, config.hc_sinkhorn_iters
    )


def _by_token(streams: torch.Tensor, config) -> torch.Tensor:
    return streams.reshape(-1, config.hc_mult, config.hidden_size)


class StreamsNorm(MegatronModule):
    """Read of the residual streams and norm before a sublayer."""

    connection: Callable[[], Connection]
    write: StreamsWrite
    #: Attribute that Megatron 0.20 reads.
    returns_residual = True

    def __init__(self, *, config, hidden_size: int, eps: float = 1e-5, **_ignored):
        super().__init__(config=config)
        require(
            eps == config.layernorm_epsilon,
            f"eps must be that of the configuration, {config.layernorm_epsilon}, got {eps}: both "
            "norms of a hyper-connection have the same",
        )
        self.weight = new_norm_weight(config, hidden_size)
        self.policy = options_of(config).policy

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sublayer's input ``[s, b, C]`` and the streams ``[s, b, n * C]``."""
        read = read_streams(
            _by_token(streams, self.config), self.connection(), self.weight, policy=self.policy
        )
        self.write.read = read
        return read.normed.view(*streams.shape[:2], -1), read.streams.view(streams.shape)


class StreamsWrite:
    """Write-back to the streams after a sublayer, instead of the residual addition."""

    def __init__(self) -> None:
        self.read: StreamsRead | None = None
        self.policy: Any = None

    def __call__(self, training: bool, _fused: bool) -> Callable:
        """Return a function of ``(output_with_bias, streams, dropout)``."""
        return functools.partial(self._write, training)

    def _write(self, training: bool, output_with_bias, streams: torch.Tensor, dropout: float):
        output, bias = output_with_bias
        if bias is not None:
            output = output + bias
        if dropout and training:
            output = torch.nn.functional.dropout(output, dropout)
        read, self.read = self.read, None
        assert read is not None
        # Megatron's residual may carry further autograd functions.
        read = read._replace(streams=streams.view(read.streams.shape))
        written = write_streams(output.flatten(0, 1), read, policy=self.policy)
        return written.view(streams.shape)


class HyperConnections(Fp32Parameters):
    """Mixin for a transformer layer with ``n`` residual streams.

    Takes and returns ``[s, b, n * C]``; the decoder's first layer takes ``[s, b, C]``.
    """

    fp32_parameters = tuple(f"hc_{kind}_{part}" for kind, *_ in _SUBLAYERS for part in _PARTS)
    config: Any
    layer_number: int
    is_mtp_layer: bool

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        n = self.config.hc_mult
        for kind, norm, write in _SUBLAYERS:
            _add_parameters(self, kind, self.config, (2 + n) * n, 3)
            reader, writer = getattr(self, norm), getattr(self, write)
            writer.policy = reader.policy
            reader.write = writer
            reader.connection = functools.partial(_connection, self, kind, self.config)
        resolve_kernels(stream_ops(self.config), options_of(self.config).policy, None)

    def _forward_attention(self, hidden_states: torch.Tensor, *args, **kwargs):
        if self.layer_number == 1 and not self.is_mtp_layer:
            hidden_states = hidden_states.repeat(1, 1, self.config.hc_mult)
        return super()._forward_attention(hidden_states, *args, **kwargs)  # type: ignore[misc]


class HyperConnectionLayer(HyperConnections, TransformerLayer):
    """Transformer layer with hyper-connections."""


class StreamsHead(Fp32Parameters, MegatronModule):
    fp32_parameters = tuple(f"hc_head_{part}" for part in _PARTS)

    def __init__(self, *, config, hidden_size: int, eps: float = 1e-5, **_ignored):
        super().__init__(config=config)
        self.weight = new_norm_weight(config, hidden_size)
        self.policy = options_of(config).policy
        _add_parameters(self, "head", config, config.hc_mult, 1)
        resolve_kernels(stream_ops(config, head=True), self.policy, None)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        connection = _connection(self, "head", self.config)
        tokens = _by_token(streams, self.config)
        normed = read_head(tokens, connection, self.weight, policy=self.policy)
        return normed.view(*streams.shape[:2], -1)


class StreamsMean(MegatronModule):
    def __init__(self, *, config, hidden_size: int, eps: float = 1e-5, **_ignored):
        super().__init__(config=config)
        self.weight, self.eps = new_norm_weight(config, hidden_size), eps

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        mean = streams.unflatten(-1, (self.config.hc_mult, -1)).mean(-2)
        return torch.nn.functional.rms_norm(mean, self.weight.shape, self.weight, self.eps)
