"""Training entry point: ``python -m megatron_dsa.pretrain <any Megatron flags>``.

Megatron's wheel has ``pretrain()``, but no ``pretrain_gpt.py``.
"""

import importlib
import sys
from typing import TYPE_CHECKING

import torch

from megatron_dsa.arguments import add_dsa_arguments, check_dsa_flags, megatron_argv
from megatron_dsa.config.extras import load_extra
from megatron_dsa.errors import require
from megatron_dsa.patches import cpu_host, install
from megatron_dsa.training.checkpoint_files import read_tracker
from megatron_dsa.training.entry_errors import report_errors
from megatron_dsa.training.launching import check_launch, remove_stale_build_lock, this_rank
from megatron_dsa.training.preset_flags import preset_flags
from megatron_dsa.training.quiet_output import quiet_output, silence_host_warnings
from megatron_dsa.versions import require_supported_megatron, untested_versions

if TYPE_CHECKING:
    from megatron_dsa.training.model import embedding_ranks
    from megatron_dsa.training.setup import forward_step, loss_function, model_config_from_args

__all__ = [
    "embedding_ranks",
    "finish",
    "forward_step",
    "loss_function",
    "main",
    "model_config_from_args",
    "prepare_host",
]


def __getattr__(name: str):
    """Import names that need Megatron lazily, after :func:`prepare_host`."""
    if name not in ("embedding_ranks", "forward_step", "loss_function", "model_config_from_args"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "model" if name == "embedding_ranks" else "setup"
    return getattr(importlib.import_module(f"megatron_dsa.training.{module}"), name)


def prepare_host(argv: list[str]) -> None:
    """Prepare this machine before Megatron's import; add preset flags to ``argv``.

    Raises:
        VersionError: unsupported Python, torch or megatron-core.
        ConfigError: wrong launcher variable, or transformer-engine imported without a GPU.
    """
    require_supported_megatron()
    silence_host_warnings()
    # Help and fake process groups run in one process.
    if not {"--fake-process-group", "-h", "--help", "--help-dsa"} & set(argv):
        check_launch()
    if cpu_host.needed():
        require(
            sys.modules.get("transformer_engine") is None,
            "prepare_host() must be called before Megatron is imported on a machine without a GPU: "
            "Megatron has taken transformer-engine, which needs one. Import it after the call, as "
            "in the script of docs/guide/start.md",
        )
        install("no GPU")
    else:
        install("transformer-engine")
    preset_flags(argv)
    remove_stale_build_lock()
    if this_rank() == 0:
        for warning in untested_versions():
            print(f"> warning: {warning}")
    install("dataset helper")
    install("tracker file", read_tracker)  # ``--use-checkpoint-args`` reads the tracker file


def main() -> None:
    """Train a model or plan a run; print one sentence for an error."""
    silence_host_warnings()
    with report_errors():
        _main()


def _main() -> None:
    require_supported_megatron()
    check_dsa_flags(sys.argv[1:])
    if "--dsa-dry-run" in sys.argv[1:]:
        install("transformer-engine")  # the planner imports Megatron
        sys.exit(load_extra("planner.command", "--dsa-dry-run").dry_run(sys.argv))
    prepare_host(sys.argv)
    from megatron.core.enums import ModelType
    from megatron.training import arguments, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_dsa.training.checkpoints import prepare_loading
    from megatron_dsa.training.data import train_valid_test_datasets
    from megatron_dsa.training.model import embedding_ranks
    from megatron_dsa.training.setup import forward_step, model_config_from_args

    with quiet_output():
        args = arguments.parse_and_validate_args(extra_args_provider=add_dsa_arguments)
        sys.argv[:] = megatron_argv(sys.argv)
        model = model_config_from_args(args)
        with prepare_loading(args):
            training.pretrain(
                pretrain_cfg_container_from_args(args, model),
                train_valid_test_datasets,
                ModelType.encoder_or_decoder,
                forward_step,
                get_embedding_ranks=embedding_ranks(model),
            )
    finish()


def finish() -> None:
    """Print calls per implementation, and destroy the process group.

    Call once on every rank, after Megatron's ``pretrain()``.
    """
    from megatron.training import get_args, print_rank_0

    from megatron_dsa.ops.dispatch import report

    replays = "" if get_args().cuda_graph_impl == "none" else " (without replays of CUDA graphs)"
    print_rank_0(f"> megatron_dsa ran, calls per implementation{replays}:")
    for operation, counts in report().items():
        runs = ", ".join(f"{name} {count}" for name, count in counts.items())
        print_rank_0(f">   {operation}: {runs}")
    if torch.distributed.is_initialized():
        # A rank that exits early would break collectives of other ranks.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


# Processes that save checkpoints import this module again.
if __name__ == "__main__":
    main()
