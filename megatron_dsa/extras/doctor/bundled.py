"""Sparse attention that is bundled with the installed megatron-core."""

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

#: Values of ``--dsa-kernel-backend`` that name fused kernels.
FUSED = ("cudnn", "tilelang")


def bundled_layer(config, kernels: str) -> tuple[torch.nn.Module, str]:
    """Build megatron-core's DSA layer of a configuration; return it with its differences to ours.

    ``config.transformer_impl`` names its linears and norms.

    Args:
        config: a :class:`megatron_dsa.config.transformer.DSATransformerConfig`, left as it is.
        kernels: ``none`` (torch), or one of :data:`FUSED`.

    Raises:
        ValueError: these kernels cannot run here; from Megatron, with the packages to install.
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
    # Without transformer-engine it takes column-parallel layers only.
    down = backend.latent_linear()
    spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = down
    return build_module(spec, config=config, layer_number=1), "; ".join(remarks)


def bundled_loss() -> torch.Tensor:
    """Return the indexer's loss of the steps since the last call, from Megatron's own tracker."""
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    loss = tracker["values"].sum()
    tracker.clear()
    return loss


def csa_modules() -> list[str]:
    """Return the modules of the installed megatron-core with V4's compressed attention, if any."""
    found = pkgutil.iter_modules(experimental_attention_variant.__path__)
    return [each.name for each in found if "csa" in each.name]


@contextlib.contextmanager
def declined_hooks() -> Iterator[list[str]]:
    """Collect which fused functions of megatron-core's DSA are declined inside, in a list.

    It then goes on unfused, without a word in its log at usual levels.
    """
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
