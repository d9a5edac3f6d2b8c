"""The sparse attention of the installed megatron-core."""

import contextlib
import copy
import logging
import pkgutil
from collections.abc import Iterator

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_dsa_module_spec_for_backend,
)
from megatron.core.transformer import experimental_attention_variant
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels
from megatron.core.transformer.spec_utils import build_module
from megatron.core.utils import _validate_dsa_kernel_backend_dependencies

from megatron_dsa.layers.backends import get_backend

FUSED = ("cudnn", "tilelang")


def bundled_layer(config, kernels: str) -> tuple[torch.nn.Module, str]:
    """Build megatron-core's DSA layer; return the layer and a remark on how it differs from ours.

    ``kernels``: ``none`` (torch), or one of :data:`FUSED`.

    Raises:
        ValueError: from Megatron, if these kernels cannot run here.
    """
    _validate_dsa_kernel_backend_dependencies(kernels)
    config = copy.copy(config)
    config.experimental_attention_variant = "dsa"
    config.dsa_kernel_backend = kernels
    remarks = [f"kernels={kernels}"]
    if config.dsa_indexer_rotate_activation and dsa.hadamard_transform is None:
        config.dsa_indexer_rotate_activation = False
        remarks.append("no Hadamard rotation (fast_hadamard_transform is missing)")
    backend = get_backend(config.transformer_impl)
    spec = get_dsa_module_spec_for_backend(config, backend)
    # Without transformer-engine the down projections must be column-parallel.
    down = backend.latent_linear()
    spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = down
    return build_module(spec, config=config, layer_number=1), "; ".join(remarks)


def bundled_loss() -> torch.Tensor:
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    loss = tracker["values"].sum()
    tracker.clear()
    return loss


def csa_modules() -> list[str]:
    found = pkgutil.iter_modules(experimental_attention_variant.__path__)
    return [each.name for each in found if "csa" in each.name]


@contextlib.contextmanager
def declined_hooks() -> Iterator[list[str]]:
    """Collect the functions that megatron-core reports in its DEBUG log as not fused."""
    found: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            given = record.args if isinstance(record.args, tuple) else ()
            found.extend(str(name) for name in given[1:2] if name not in found)

    logger, listener = logging.getLogger(dsa_kernels.__name__), Listener(logging.DEBUG)
    before, forwards = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(listener)
    try:
        yield found
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
        logger.propagate = forwards
