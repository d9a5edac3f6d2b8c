"""Training like ``python -m megatron_dsa.pretrain``, with measurements in every evaluation.

    python train.py <flags of the training> --measures FOLDER

Every evaluation goes over the held-out text once, in Megatron's own loop, and appends to
``FOLDER/measures.csv``: ``loss`` by position (error over documents), ``mass``, ``best mass`` and
``recall`` of the selection and ``indexer KL`` by layer, ``copy`` and ``look-up`` (accuracy by
distance, see ``probes.py``), and ``peak memory`` in GiB. ``FOLDER/documents.csv`` has the losses of
every document. ``--skip-train`` measures the checkpoint of ``--load``. Runs in one process.
"""

import argparse
import sys
from pathlib import Path

from megatron_dsa.pretrain import finish, prepare_host
from megatron_dsa.training.entry_errors import report_errors


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the package and of the measures."""
    from megatron_dsa.arguments import add_dsa_arguments

    parser = add_dsa_arguments(parser)
    group = parser.add_argument_group("measures")
    group.add_argument("--measures", type=Path, required=True, help="folder of the CSVs")
    group.add_argument("--probe-sequences", type=int, default=48, help="of each kind; 0: none")
    group.add_argument("--selection-sequences", type=int, default=16, help="0: none")
    group.add_argument("--selection-queries", type=int, default=32, help="of each sequence")
    return parser


def main() -> None:
    prepare_host(sys.argv)
    from measures import Measures
    from megatron.core.enums import ModelType
    from megatron.training import arguments, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_dsa.arguments import megatron_argv
    from megatron_dsa.pretrain import model_config_from_args
    from megatron_dsa.training.checkpoints import prepare_loading
    from megatron_dsa.training.quiet_output import quiet_output

    with quiet_output():
        args = arguments.parse_and_validate_args(extra_args_provider=add_arguments)
        sys.argv[:] = megatron_argv(sys.argv)
        measures = Measures(args)
        config = pretrain_cfg_container_from_args(args, model_config_from_args(args))
        with prepare_loading(args):
            training.pretrain(
                config,
                measures.data_sets(),
                ModelType.encoder_or_decoder,
                measures.forward_step,
                non_loss_data_func=measures,
            )
    finish()


if __name__ == "__main__":
    with report_errors():
        main()
