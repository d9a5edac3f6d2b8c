"""Command line tools: ``info`` lists implementations, ``doctor`` tests them, ``prepare-data``
makes a data set, ``import-hf`` and ``export-hf`` convert checkpoints, ``report`` shows runs, and
``generate`` and ``evaluate`` run trained models."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_dsa import __version__
from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.presets import MODELS, model_flags
from megatron_dsa.config.rules.ranges import Range, range_rules
from megatron_dsa.errors import TRACEBACK_FLAG, did_you_mean, require, suggest_names
from megatron_dsa.versions import require_supported_megatron

SCRIPT = "megatron-dsa"
RANGES: dict[str, Range] = {
    "--tokens": Range(1, 2**30, "it is a number of tokens to write"),
    "--temperature": Range(0, math.inf, "0 takes the most probable token"),
    "--seed": Range(0, 2**63 - 1, "torch's generators take 64 bits"),
    "--step": Range(0, math.inf, "it is an iteration"),
    "--shard-gb": Range(1e-9, 2**20, "it is the size of a file"),
    "--shard-mb": Range(1e-4, 2**20, "it is the size of a part of the input"),
    "--workers": Range(1, 2**12, "it is a number of processes"),
    **dict.fromkeys(
        ("--heads", "--dims", "--index-heads", "--index-dim"),
        Range(1, 2**16, "it is a count of heads, or a dimension of one"),
    ),
    **dict.fromkeys(
        ("--seq", "--topk", "--rows"), Range(1, 2**30, "it is a number of queries or keys")
    ),
    "--tolerance": Range(0, math.inf, "it is a relative error", open=True),
}


def _run(module: str, function: str, *paths: str) -> Callable[[argparse.Namespace], int]:
    """Defer the import of a command's module until the command runs.

    ``paths``: arguments whose files or folders must exist.
    """

    def run(arguments: argparse.Namespace) -> int:
        from megatron_dsa.patches import install

        for name in paths:
            path = getattr(arguments, name)
            require(Path(path).exists(), f"--{name} {path} does not exist: check the path")
        install("transformer-engine")
        return getattr(load_extra(module, f"this command ({function})"), function)(arguments)

    return run


def _print_flags(arguments: argparse.Namespace) -> int:
    if Path(arguments.config).exists():
        return _run("huggingface.flags", "print_flags")(arguments)
    require(
        arguments.config in MODELS,
        f"{arguments.config} is not there, and no name of --dsa-model: give a config.json, its "
        f"directory, or a name{did_you_mean(arguments.config, MODELS)}",
    )
    require(
        not arguments.without,
        f"--without is for a config.json, not for {arguments.config}: the flags to leave out can "
        "be taken from the line",
    )
    print(" ".join(model_flags(arguments.config)))
    return 0


#: Commands that run without Megatron.
WITHOUT_HOST = ("info", "doctor", "flags", "report")


def run_command(arguments: argparse.Namespace) -> int:
    if arguments.command not in WITHOUT_HOST:
        require_supported_megatron()
    for ok, message in range_rules(vars(arguments), RANGES):
        require(ok, message)
    for name, value in vars(arguments).items():
        given = value if isinstance(value, list) else [value]
        require(
            name in ("prompt", "title") or "" not in map(str, given),
            f"--{name.replace('_', '-')} must not be empty: name a file, a folder or a value",
        )
    return arguments.run(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; subparsers set ``run``, a function of the arguments."""
    script = Path(sys.argv[0]).name == SCRIPT
    prog = SCRIPT if script else "python -m megatron_dsa"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--version", action="version", version=f"megatron_dsa {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
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
    _add_doctor(commands)
    _add_data(commands)
    _add_conversions(commands)
    _add_trained(commands)
    report = commands.add_parser("report", help="a page on training runs, from TensorBoard's files")
    report.add_argument(
        "folders", nargs="+", type=Path, metavar="LOG_DIR",
        help="what --tensorboard-dir was, or a folder of such folders; several runs are compared",
    )  # fmt: skip
    report.add_argument(
        "--output", type=Path, nargs="+", default=[Path("report.html")], metavar="FILE",
        help="files to write, .html or .png (report.html)",
    )  # fmt: skip
    report.add_argument("--title", default="Training report")
    report.set_defaults(run=_run("report.command", "run"))
    suggest_names(parser)
    for each in commands.choices.values():
        each.add_argument(
            TRACEBACK_FLAG, action="store_true", help="show where an error comes from"
        )
        suggest_names(each)
        each.set_defaults(refuse=each.error)
    return parser


_DOCTOR = """\
Compare every implementation that can run here with float64, at your shape (by default
DeepSeek-V3.2's), and time it. All forwards of sparse attention are combined with all backwards, all
index scores with all top-k; indexer losses are checked with their gradients.
"""

_DOCTOR_CODES = """\
exit codes, for CI:
  0  every combination that was checked is right, and a fused implementation was among them
  1  a combination is wrong: an error above the tolerance, a result that is not finite or breaks a
     rule for empty rows, invalid ids or ties, repeats that differ although the implementation is
     declared deterministic, or a crash. This also holds for implementations that dispatch would
     not pick first: they are declared to work here. The table marks what dispatch would run.
  2  nothing wrong was found, but not enough was checked: no fused implementation can run on this
     GPU (--allow-unfused accepts that), or memory ran out; also for wrong arguments
  3  nothing wrong was found on the CPU, where only torch runs (--allow-unfused makes it 0)
"not checked" in the report lists every implementation that was left out, with the reason. Without a
GPU, the torch implementations are checked on the CPU at a smaller shape, which the report names.
With --against: 0, all differences are below the bound (--tolerance, 1e-5); 1, one is above.
A kernel that hangs has to be stopped by a time limit of yours.
"""


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers separated by commas, got {text!r}"
        ) from None


def _dims(text: str) -> tuple[int, int]:
    values = _numbers(text)
    if len(values) != 2 or values[1] > values[0]:
        raise argparse.ArgumentTypeError(
            "must be two numbers, the query/key dim and the value dim (a slice of the key, so not "
            f"larger), got {text!r}"
        )
    return values[0], values[1]


def _run_doctor(arguments: argparse.Namespace) -> int:
    if arguments.against is None:
        return _run("doctor", "run")(arguments)
    require_supported_megatron()
    return _run("doctor.against", "run")(arguments)


def _add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor", help="check every implementation against float64 on this machine and your shape",
        description=_DOCTOR, epilog=_DOCTOR_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    switch, add = ("off", "on", "both"), parser.add_argument
    add("--heads", type=_numbers, default=(128,), help="query heads per rank, e.g. 16,32,64,128")
    add("--dims", type=_dims, default=(576, 512), help="query/key dim, value dim (576,512)")
    add("--topk", type=_numbers, default=(2048,), help="keys per query, e.g. 640,1152,2048")
    add("--seq", type=int, default=4096, help="keys (4096)")
    add("--index-heads", type=int, default=64, help="index heads (64)")
    add("--index-dim", type=int, default=128, help="dim of an index head (128)")
    add(
        "--dtype", choices=("bf16", "fp16", "fp32"), default="bf16",
        help="of queries and keys (bf16)",
    )  # fmt: skip
    add("--sink", choices=switch, default="off", help="a learned sink per head (off)")
    add("--packed", choices=switch, default="off", help="several sequences per batch (off)")
    add("--rows", type=int, default=256, help="query tokens that are compared with float64 (256)")
    add(
        "--tolerance", type=float,
        help="largest relative error (5e-3, fp32 1e-5; lse 1e-4, p_sum and loss 1e-3)",
    )  # fmt: skip
    add("--device", help="e.g. cuda, cuda:1 or cpu; default: a GPU if there is one")
    add("--json", action="store_true", help="print the report as JSON")
    add("--allow-unfused", action="store_true", help="exit with 0 without a fused implementation")
    add(
        "--against", choices=("bundled",),
        help="compare our DSA layer with that of the installed megatron-core instead: outputs, "
        "losses and gradients in float32; on a GPU also times of V3.2's layer",
    )  # fmt: skip
    parser.set_defaults(run=_run_doctor, defaults=vars(parser.parse_args([])))


def _add_data(commands) -> None:
    data = commands.add_parser(
        "prepare-data", help="Megatron data set from JSON lines, parquet and text files"
    )
    data.add_argument("--output", required=True, help="path prefix of the .bin and .idx files")
    data.add_argument(
        "--input",
        nargs="+",
        metavar="FILE",
        help=".jsonl and .parquet: a document per record; any other ending: a text file in UTF-8, "
        "one document; also with .gz (default: Python's documentation)",
    )
    data.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder of a Hugging Face tokenizer (default: a token per byte of UTF-8)",
    )
    data.add_argument(
        "--jsonl-key", default="text", metavar="KEY", help="key or column of the text (text)"
    )
    data.add_argument(
        "--append-eod",
        action="store_true",
        help="end documents with the tokenizer's end-of-document token (bytes always do)",
    )
    data.add_argument(
        "--skip-broken", action="store_true", help="leave out records that cannot be read"
    )
    data.add_argument("--workers", type=int, help="processes (one per CPU core)")
    data.add_argument(
        "--shard-mb",
        type=float,
        default=32,
        help="input of a shard, which a kill loses, in MB (32)",
    )
    data.set_defaults(run=_run("prepare_data.command", "run"))


def _add_conversions(commands) -> None:
    into = commands.add_parser(
        "import-hf",
        help="Megatron checkpoint from a Hugging Face checkpoint (V3, V3.2, GLM-5, GLM-5.3, V4)",
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
        help="write only the adapters, in PEFT's format; not for DeepSeek-V4 (default: merge them "
        "into the weights)",
    )
    for command, function in ((into, "import_hf"), (out, "export_hf")):
        command.add_argument(
            "--shard-gb", type=float, default=5.0, help="size of a file of the result, in GB (5)"
        )
        paths = ("input",) if command is into else ("input", "config")
        command.set_defaults(run=_run("huggingface.commands", function, *paths))
    flags = commands.add_parser(
        "flags", help="Megatron's flags for the model of a config.json, or for a --dsa-model"
    )
    flags.add_argument(
        "config", help="config.json of the model, or its directory, or a name of --dsa-model"
    )
    flags.set_defaults(run=_print_flags)
    for command in (into, flags):
        command.add_argument(
            "--without",
            nargs="+",
            default=[],
            metavar="FEATURE",
            help="build a V4 without hyper-connections, hash-routing, multi-token-prediction",
        )


def _add_trained(commands) -> None:
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
    write.set_defaults(run=_run("generate.generate", "run", "load"))
    rate.add_argument(
        "--data-path",
        metavar="PREFIX",
        help="indexed data set, all of it (default: validation data of the training)",
    )
    rate.set_defaults(run=_run("generate.evaluate", "run", "load"))


def main(argv: list[str] | None = None) -> int:
    """Run a command line; return the exit code.

    Raises:
        ConfigError: an error the user can fix; ``python -m megatron_dsa`` prints it.
    """
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    return run_command(arguments)
