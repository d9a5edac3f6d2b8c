"""Command line tools: ``info`` tells what would run here, ``doctor`` proves it, ``prepare-data``
makes a data set, ``import-hf`` and ``export-hf`` convert checkpoints, ``report`` shows runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_dsa.errors import TRACEBACK_FLAG


def _info(arguments: argparse.Namespace) -> int:
    if arguments.support_table:
        from megatron_dsa.tools.support_table import support_table

        print(support_table())
        return 0
    from megatron_dsa.dispatch import choices_unlogged
    from megatron_dsa.tools.info import collect_info, print_info

    with choices_unlogged():
        info = collect_info()
    if arguments.json:
        print(json.dumps(info, indent=2))
    else:
        print_info(info)
    return 0 if info["megatron-core"]["problem"] is None else 1


def _prepare_data(arguments: argparse.Namespace) -> int:
    from megatron_dsa.training.data import BYTE_VOCAB, python_documentation, write_byte_dataset

    if arguments.input:
        documents = [Path(path).read_text(encoding="utf-8") for path in arguments.input]
        source = f"{len(documents)} file(s)"
    else:
        documents = python_documentation()
        source = "Python's language reference"
    tokens = write_byte_dataset(documents, arguments.output)
    print(f"{tokens} byte tokens from {source} in {arguments.output}.bin and .idx; train with")
    print(
        f"  --data-path {arguments.output} --tokenizer-type NullTokenizer --vocab-size {BYTE_VOCAB}"
    )
    return 0


def run_command(arguments: argparse.Namespace) -> int:
    """Run a parsed command; returns the exit code."""
    from megatron_dsa.patches import cpu_host

    if cpu_host.needed():
        cpu_host.hide_transformer_engine()
    return arguments.run(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run``, a function of the arguments."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dsa", description=__doc__)
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="versions, GPU, and what every operation would run")
    info.add_argument("--json", action="store_true", help="machine-readable")
    info.set_defaults(run=_info)
    info.add_argument("--support-table", action="store_true", help="what everything can run")
    from megatron_dsa.tools import doctor

    check = commands.add_parser(
        "doctor", help="check every implementation against float64 on this machine and your shape"
    )
    doctor.add_arguments(check)
    check.set_defaults(run=doctor.run)
    data = commands.add_parser("prepare-data", help="byte-level Megatron data set from text files")
    data.add_argument("--output", required=True, help="path prefix of the .bin and .idx files")
    data.add_argument("--input", nargs="*", help="text files (default: Python's documentation)")
    data.set_defaults(run=_prepare_data)
    from megatron_dsa.tools.huggingface_commands import add_commands

    add_commands(commands)
    from megatron_dsa.tools.report import command

    command.add_command(commands)
    for each in commands.choices.values():
        each.add_argument(
            TRACEBACK_FLAG, action="store_true", help="show where an error comes from"
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Raises:
        ConfigError: what the user can mend; ``python -m megatron_dsa`` says it in a sentence.
    """
    return run_command(build_parser().parse_args(argv))
