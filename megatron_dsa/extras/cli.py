"""Command line tools: ``info`` shows what would run here, ``doctor`` proves it, ``prepare-data``
makes a data set, ``import-hf`` and ``export-hf`` convert checkpoints, ``report`` shows runs, and
``generate`` and ``evaluate`` run trained models."""

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_dsa.config.rules.ranges import Range, range_rules
from megatron_dsa.errors import TRACEBACK_FLAG, ConfigError, require

#: Flag -> range, for all commands.
RANGES: dict[str, Range] = {
    "--tokens": Range(1, 2**30, "it is a number of tokens to write"),
    "--temperature": Range(0, math.inf, "0 takes the most probable token"),
    "--seed": Range(0, 2**63 - 1, "torch's generators take 64 bits"),
    "--step": Range(0, math.inf, "it is an iteration"),
    "--shard-gb": Range(1e-9, 2**20, "it is the size of a file"),
    **dict.fromkeys(
        ("--heads", "--dims", "--index-heads", "--index-dim"),
        Range(1, 2**16, "it is a count of heads, or a dimension of one"),
    ),
    **dict.fromkeys(
        ("--seq", "--topk", "--rows"), Range(1, 2**30, "it is a number of queries or keys")
    ),
    "--tolerance": Range(0, math.inf, "it is a relative error", open=True),
}


def _run(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that imports its module when it runs: the host is prepared before."""

    def run(arguments: argparse.Namespace) -> int:
        tools = importlib.import_module(f"megatron_dsa.extras.{module}")
        return getattr(tools, function)(arguments)

    return run


_BYTE_ORDER_MARK = "\ufeff"


def _text_of(path: str) -> str:
    try:
        text = Path(path).read_bytes().decode("utf-8")  # read_text would translate ends of lines
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--input {path} must be a text file in UTF-8 ({error}): convert it, or leave it out"
        ) from None
    if text.startswith(_BYTE_ORDER_MARK):
        print(f"note: --input {path} begins with a byte order mark, left out", file=sys.stderr)
    text = text.removeprefix(_BYTE_ORDER_MARK)
    if not text:
        print(f"note: --input {path} is empty, left out", file=sys.stderr)
    return text


def _prepare_data(arguments: argparse.Namespace) -> int:
    from megatron_dsa.training.data import BYTE_VOCAB, python_documentation, write_byte_dataset

    if arguments.input:
        documents = [text for path in arguments.input if (text := _text_of(path))]
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
    from megatron_dsa.patches import install

    for ok, message in range_rules(vars(arguments), RANGES):
        require(ok, message)
    for name, value in vars(arguments).items():
        given = value if isinstance(value, list) else [value]
        require(
            name in ("prompt", "title") or "" not in map(str, given),
            f"--{name.replace('_', '-')} must not be empty: name a file, a folder or a value",
        )
    install("transformer-engine")
    return arguments.run(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets ``run``, a function of the arguments."""
    parser = argparse.ArgumentParser(prog="python -m megatron_dsa", description=__doc__)
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="versions, GPU, and what every operation would run")
    info.add_argument("--json", action="store_true", help="machine-readable")
    info.add_argument("--support-table", action="store_true", help="what everything can run")
    info.add_argument(
        "--muon", metavar="MODEL", help="what --optimizer muon updates in a released model"
    )
    info.add_argument(
        "--muon-per-head", choices=["none", "attention", "all"], default="none",
        help="of --muon: value of --dsa-muon-per-head",
    )  # fmt: skip
    info.set_defaults(run=_run("info", "print_info"))
    from megatron_dsa.extras import doctor

    check = commands.add_parser(
        "doctor", help="check every implementation against float64 on this machine and your shape"
    )
    doctor.add_arguments(check)
    check.set_defaults(run=doctor.run)
    data = commands.add_parser("prepare-data", help="byte-level Megatron data set from text files")
    data.add_argument("--output", required=True, help="path prefix of the .bin and .idx files")
    data.add_argument(
        "--input",
        nargs="+",
        help="text files in UTF-8, taken byte for byte but for a byte order mark (default: "
        "Python's documentation)",
    )
    data.set_defaults(run=_prepare_data)
    _add_conversions(commands)
    _add_trained(commands)
    from megatron_dsa.extras.report import command

    command.add_command(commands)
    for each in commands.choices.values():
        each.add_argument(
            TRACEBACK_FLAG, action="store_true", help="show where an error comes from"
        )
    return parser


def _add_conversions(commands) -> None:
    """Add the commands between Hugging Face and Megatron."""
    into = commands.add_parser(
        "import-hf", help="Megatron checkpoint from a Hugging Face checkpoint (V3, V3.2, GLM-5, V4)"
    )
    into.add_argument("--input", required=True, help="directory of config.json and safetensors")
    into.add_argument("--output", required=True, help="directory for --load")
    out = commands.add_parser(
        "export-hf", help="Hugging Face checkpoint from a Megatron checkpoint"
    )
    out.add_argument("--input", required=True, help="what --save of the training run was")
    out.add_argument("--step", type=int, help="iteration (default: the latest)")
    out.add_argument("--config", required=True, help="config.json of the model, or its directory")
    out.add_argument("--output", required=True, help="directory for config.json and safetensors")
    out.add_argument(
        "--quantise",
        choices=("fp8", "released"),
        help="weights in fp8 with a scale per block, or as config.json says (fp4 experts of V4); "
        "weights that did not change get the bytes of the checkpoint beside --config",
    )
    out.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters alone, in PEFT's format, but for DeepSeek-V4 (default: merge them "
        "into the weights)",
    )
    for command, function in ((into, "import_hf"), (out, "export_hf")):
        command.add_argument(
            "--shard-gb", type=float, default=5.0, help="size of a file of the result, in GB (5)"
        )
        command.set_defaults(run=_run("huggingface.commands", function))
    flags = commands.add_parser(
        "flags", help="Megatron's flags for the model of a config.json, or for a --dsa-model"
    )
    flags.add_argument(
        "config", help="config.json of the model, or its directory, or a name of --dsa-model"
    )
    flags.set_defaults(run=_run("huggingface.commands", "print_flags"))
    for command in (into, flags):
        command.add_argument(
            "--without",
            nargs="+",
            default=[],
            metavar="FEATURE",
            help="build a V4 without hyper-connections, hash-routing, multi-token-prediction",
        )


def _add_trained(commands) -> None:
    """Add the commands that run a trained model."""
    write = commands.add_parser(
        "generate",
        help="text of a trained model, by full forward passes, without a cache: for a quick look",
    )
    rate = commands.add_parser("evaluate", help="loss and perplexity of a trained model")
    for command in (write, rate):
        command.add_argument("--load", required=True, help="what --save of the training was")
        command.add_argument("--step", type=int, help="iteration (default: the latest)")
    write.add_argument(
        "--prompt", nargs="+", required=True, help="texts to continue; '' starts a document"
    )
    write.add_argument("--tokens", type=int, default=64, help="tokens to write, at most (64)")
    write.add_argument(
        "--temperature", type=float, default=0.0,
        help="above 0, draw tokens from the softmax of logits divided by it (0: the most probable)",
    )  # fmt: skip
    write.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    write.set_defaults(run=_run("generate.generate", "run"))
    rate.add_argument(
        "--data-path",
        metavar="PREFIX",
        help="indexed data set, all of it (default: validation data of the training)",
    )
    rate.set_defaults(run=_run("generate.evaluate", "run"))


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Raises:
        ConfigError: an error that the user can mend; ``python -m megatron_dsa`` prints a sentence.
    """
    return run_command(build_parser().parse_args(argv))
