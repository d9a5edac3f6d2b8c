"""Layer classes for specs, per ``--transformer-impl``."""

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.linears import LocalNorm, ReplicatedLinear, bf16_linear, bf16_weight_linear
from megatron_dsa.versions import why_not_transformer_engine


class LocalBackend(LocalSpecProvider):
    """Layers without transformer-engine."""

    def linear(self) -> type:
        return ReplicatedLinear

    def latent_linear(self) -> type:
        return ColumnParallelLinear

    def absorbed_linear(self) -> type:
        return self.column_parallel_linear()

    def indexer_linear(self, fp8: bool) -> type:
        return self.linear()

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False) -> type:
        return LocalNorm


def _te_backend():
    reason = why_not_transformer_engine(torch.cuda.is_available())
    if reason is not None:
        raise ConfigError(
            f"--transformer-impl transformer_engine cannot be used: {reason}. Install it on a "
            "machine with a GPU (pip install 'megatron-dsa[te]'), or pass --transformer-impl local"
        )
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class TransformerEngineBackend(TESpecProvider):
        def latent_linear(self) -> type:
            return self.linear()

        def absorbed_linear(self) -> type:
            return bf16_weight_linear(self.column_parallel_linear())

        def indexer_linear(self, fp8: bool) -> type:
            return self.linear() if fp8 else bf16_linear(self.linear())

    return TransformerEngineBackend()


def get_backend(transformer_impl: str) -> Any:
    if transformer_impl == "transformer_engine":
        return _te_backend()
    if transformer_impl == "local":
        return LocalBackend()
    raise ConfigError(
        f"--transformer-impl must be 'local' or 'transformer_engine', got {transformer_impl!r}"
    )


class SeparateNorms:
    """Backend without fused norms, for hyper-connections and adapters."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def fuse_layernorm_and_linear(self) -> bool:
        return False
