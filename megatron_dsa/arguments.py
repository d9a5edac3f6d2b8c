"""Command line flags, added to Megatron's parser."""

import argparse
import contextlib
import dataclasses
import os
import sys
from types import UnionType
from typing import Any, get_args, get_origin

from megatron_dsa.config.fields import Option, choices_of, given_values, option_fields, said
from megatron_dsa.config.gpus import GPUS
from megatron_dsa.config.model import CSAFields, DSAOptions
from megatron_dsa.config.presets import MODELS, model_flags
from megatron_dsa.config.rules.ranges import FLAGS, range_rules, schedule_rules
from megatron_dsa.errors import TRACEBACK_FLAG, require, suggest_names
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch.policy import FLAG, check_operations

BACKENDS = ("dsa_fused", "dsa_unfused")
MODEL_FLAG = "--dsa-model"
#: Prefix of this package's flags, and prefixes of Megatron's flags for DSA.
DSA_PREFIX, MEGATRON_PREFIXES = "--dsa-", ("--dsa-indexer-", "--dsa-kernel-backend")
USAGE = "%(prog)s [flags of Megatron and of megatron_dsa]"
#: Module allowed in ``--spec`` with ``--dsa-model``.
SPECS = "megatron_dsa.specs"
_FORMER_OPERATIONS = {
    "compressor": "compressor", "norm-rope": "norm_rope", "rotate": "rotate", "lists": "key_lists",
    "scores": "indexer_scores", "topk": "indexer_topk", "forward": "sparse_attention_forward",
    "backward": "sparse_attention_backward", "teacher": "sparse_attention_probabilities",
    "dense": "dense_attention", "ring": "dense_attention", "sparse-loss": "sparse_indexer_loss",
    "dense-loss": "dense_indexer_loss", "indexer-backward": "sparse_indexer_loss",
}  # fmt: skip
_GONE = "it is gone, selection is exact unless --dsa-indexer-numerics says otherwise: drop it"
#: Removed flag -> replacement or reason.
FORMER = {
    **{
        f"--dsa-{old}-impl": f"it is {FLAG} {new}=NAME now"
        for old, new in _FORMER_OPERATIONS.items()
    },
    "--csa-dense-mode": "it is --dsa-stage dense now",
    "--dsa-health-rows": "it is --dsa-health-tokens now",
    "--dsa-dry-run-attention-only": "it is gone, plans are of whole models: drop it",
    "--dsa-health-fp8": _GONE,
    "--dsa-fp8-selection": _GONE,
    "--dsa-listed-scores-impl": _GONE,
}


class _BackendAction(argparse.Action):
    """Action of ``--attention-backend`` that also accepts :data:`BACKENDS`.

    Megatron's setting stays ``auto``: checkpoints pickle its enum, which lacks our values.
    """

    def __call__(self, parser, namespace, value, option_string=None):
        from megatron.core.transformer.enums import AttnBackend

        if value in BACKENDS:
            namespace.dsa_attention_backend = value
            setattr(namespace, self.dest, AttnBackend.auto)
            return
        if value not in AttnBackend.__members__:
            choices = ", ".join([*BACKENDS, *AttnBackend.__members__])
            parser.error(f"argument --attention-backend: invalid choice {value!r} (from {choices})")
        # The last value on the command line wins.
        namespace.dsa_attention_backend = None
        setattr(namespace, self.dest, AttnBackend[value])


def _replace_attention_backend(parser: argparse.ArgumentParser, ours) -> None:
    from megatron.core.transformer.enums import AttnBackend

    old = parser._option_string_actions["--attention-backend"]
    for option in old.option_strings:
        del parser._option_string_actions[option]
    for group in parser._action_groups:
        if old in group._group_actions:
            group._group_actions.remove(old)
    parser._actions.remove(old)
    ours.add_argument(
        *old.option_strings,
        dest=old.dest,
        default=old.default,
        action=_BackendAction,
        metavar="BACKEND",
        help="dsa_fused: sparse attention with fused kernels where they can run; dsa_unfused: "
        f"sparse attention in torch; or Megatron's {', '.join(AttnBackend.__members__)}.",
    )


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape bare percent signs, which break ``--help``."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            action.help and formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            assert action.help is not None
            action.help = action.help.replace("%", "%%")


def add_dsa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's flags, as Megatron's ``extra_args_provider``.

    Megatron defines ``--dsa-indexer-*``. Parsing raises :class:`ConfigError` for numbers out of
    range.
    """
    _repair_help(parser)
    # The usage that errors print would list all of Megatron's flags.
    parser.usage = USAGE
    group = parser.add_argument_group("megatron_dsa")
    parser._action_groups.insert(0, parser._action_groups.pop())
    _replace_attention_backend(parser, group)
    parser.set_defaults(dsa_attention_backend=None)
    # With ``sft``, Megatron averages evaluation losses over microbatches instead of tokens.
    parser._option_string_actions["--sft"].dest = "dsa_sft"
    parser.set_defaults(sft=False, dsa_sft=False)
    group.add_argument("--help-dsa", action=_HelpAction, help="Print these flags alone and exit.")
    _add_dsa_flags(group)
    _add_models(parser)
    suggest_names(parser)
    return parser


def _add_dsa_flags(group) -> None:
    _add_options(group, DSAOptions)
    _add_options(group, CSAFields)
    _add_run_arguments(group)
    add_dry_run_arguments(group)
    for old, why in FORMER.items():
        group.add_argument(old, action=_RefuseFormer, why=why, nargs="*", help=argparse.SUPPRESS)
    group.add_argument(
        MODEL_FLAG,
        choices=MODELS,
        help="Set the flags of this model; flags of the command line win. 'python -m megatron_dsa "
        "flags NAME' prints them.",
    )


def check_dsa_flags(words: list[str]) -> None:
    """Check this package's flags before Megatron's imports, which take seconds.

    Raises:
        ConfigError: a number is out of range.
        SystemExit: anything else, with code 2.
    """
    parser = argparse.ArgumentParser(usage=USAGE, add_help=False, allow_abbrev=False)
    _add_dsa_flags(parser)
    suggest_names(parser)
    if {"-h", "--help", "--help-dsa"} & set(words):
        return
    parsed, others = parser.parse_known_args(words)
    flags = [word.partition("=")[0] for word in others]
    wrong = [x for x in flags if x.startswith(DSA_PREFIX) and not x.startswith(MEGATRON_PREFIXES)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    numbers = {flag: _numbers(given_values(words, flag)[-1:]) for flag in FLAGS}  # last value wins
    for ok, message in (*range_rules(vars(parsed), FLAGS), *range_rules(numbers, FLAGS)):
        require(ok, message)


def _numbers(words: list[str]) -> list[float]:
    found = []
    for word in words:
        with contextlib.suppress(ValueError):  # Megatron's parser rejects words that are no numbers
            found.append(float(word))
    return found


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(dsa_model_changes=[])
    parse = parser.parse_known_args

    def parse_known_args(args=None, namespace=None):
        words = list(sys.argv[1:] if args is None else args)
        flags = _flags_of_model(parser, words)
        parsed, unknown = parse([*flags, *words], namespace)
        if flags:
            _refuse_other_models(parser, parsed)
            parsed.dsa_model_changes = _changes(parser, flags, parse(flags)[0], parsed)
            if os.environ.get("RANK", "0") == "0":
                print(f"> {MODEL_FLAG} {parsed.dsa_model} sets {' '.join(flags)}")
                for change in parsed.dsa_model_changes:
                    print(f"> megatron_dsa {change}")
        values = vars(parsed)
        for ok, message in (*range_rules(values, FLAGS), *schedule_rules(values)):
            require(ok, message)
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _flags_of_model(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    named = given_values(words, MODEL_FLAG)
    if len(named) > 1:
        parser.error(f"argument {MODEL_FLAG}: it was given {len(named)} times, name one model")
    return model_flags(named[0]) if named and named[0] in MODELS else []


def _refuse_other_models(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    others = {
        "--use-checkpoint-args": args.use_checkpoint_args,
        "--yaml-cfg": args.yaml_cfg,
        "--spec": args.spec and args.spec[0] != SPECS,
    }
    for flag, given in others.items():
        if given:
            than = f", other than {SPECS}'s," if flag == "--spec" else ""
            parser.error(
                f"argument {MODEL_FLAG}: not allowed with {flag}{than} which describes the model, "
                "too: drop one of them"
            )


def _changes(parser, flags: list[str], model, parsed) -> list[str]:
    options = parser._option_string_actions
    names = {options[word].dest: word for word in flags if word in options}
    return [
        f"{flag} is {said(getattr(parsed, dest))} by the command line, "
        f"{said(getattr(model, dest))} in {MODEL_FLAG} {parsed.dsa_model}"
        for dest, flag in names.items()
        if getattr(parsed, dest) != getattr(model, dest)
    ]


class _HelpAction(argparse.Action):
    """Print this package's flags and exit."""

    def __init__(self, option_strings, dest, **settings):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **settings)

    def __call__(self, parser, namespace, values, option_string=None):
        group = parser._action_groups[0]
        formatter = parser._get_formatter()
        formatter.add_usage(parser.usage, parser._actions, [])
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
        print(formatter.format_help(), end="")
        parser.exit()


def _add_options(group, config_class: type) -> None:
    for each, about in option_fields(config_class):
        group.add_argument(about.flag, **_argparse_settings(each, about))


def _argparse_settings(each: dataclasses.Field, about: Option) -> dict[str, Any]:
    if each.type is bool:
        return {"action": "store_true", "help": about.help}
    default: Any = each.default
    settings = {"default": default, "metavar": about.metavar, "help": about.help}
    if about.parse is not None:
        return settings | {"nargs": "+", "default": list(default)}
    if each.default is not None:
        settings["help"] += " Default: %(default)s."
    if about.unit != 1:
        settings["default"] = default // about.unit
    if (choices := choices_of(each)) is not None:
        return settings | {"choices": choices}
    kind = get_args(each.type)[0] if isinstance(each.type, UnionType) else each.type
    if get_origin(kind) is list:
        return settings | {"nargs": "+", "type": get_args(kind)[0]}
    return settings | {"type": kind}


def field_values(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    return {
        each.name: _field_value(each, about, getattr(args, about.dest))
        for each, about in option_fields(config_class)
    }


def _field_value(each: dataclasses.Field, about: Option, given: Any) -> Any:
    if each.type is bool:
        return given != each.default
    if about.parse is not None:
        return about.parse(given, about.flag)
    return given if about.unit == 1 else given * about.unit


def _add_run_arguments(group) -> None:
    add, switch = group.add_argument, {"action": "store_true"}
    add(
        "--dsa-load-hf",
        metavar="DIR",
        help="Start from a Hugging Face checkpoint, unless --load holds one of Megatron.",
    )
    add(
        "--dsa-hf-without",
        nargs="+",
        default=[],
        metavar="FEATURE",
        help="Leave out of a V4's checkpoint what the model is built without: hyper-connections, "
        "hash-routing.",
    )
    add(
        "--lora-load",
        metavar="DIR",
        help="Start from adapters in PEFT's format, unless --load holds some; --lora-rank and "
        "--lora-alpha have to be theirs. Not for DeepSeek-V4.",
    )
    add(
        "--dsa-log-dispatch",
        **switch,
        help="Log every implementation that was rejected, with its reason.",
    )
    add(
        "--dsa-time-operations",
        **switch,
        help="Measure the time of every operation and write it to TensorBoard and W&B.",
    )
    add(
        "--dsa-packed-documents",
        type=int,
        metavar="N",
        help="Documents that each packed sequence has room for, at most. All batches then have one "
        "size, which --cuda-graph-impl local needs. A sequence of more documents is an error.",
    )
    add(
        "--dsa-sft-long",
        choices=("drop", "truncate"),
        help="Conversations of --sft that are longer than --seq-length: drop (the default) or "
        "truncate them.",
    )
    add(
        TRACEBACK_FLAG, **switch,
        help="Show the traceback of an error that otherwise ends in a sentence.",
    )  # fmt: skip


def add_dry_run_arguments(group) -> None:
    group.add_argument(
        "--dsa-dry-run",
        action="store_true",
        help="Check the job and print its plan (layers, kernels, memory, traffic), in one process "
        "and without a GPU; train nothing.",
    )
    group.add_argument(
        "--dsa-dry-run-world",
        type=int,
        metavar="N",
        help="GPUs of the planned job (default: the environment variable WORLD_SIZE, or 1).",
    )
    group.add_argument(
        "--dsa-dry-run-gpu",
        choices=GPUS,
        help="GPU of the planned job (default: this machine's, or h200).",
    )


class _RefuseFormer(argparse.Action):
    def __init__(self, option_strings, dest, why: str, **settings):
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **settings)
        self.why = why

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"argument {option_string}: {self.why}")


def megatron_argv(argv: list[str]) -> list[str]:
    """Return ``argv`` for Megatron's second parse, with ``auto`` instead of our backends."""
    from megatron.core.transformer.enums import AttnBackend

    out = []
    for previous, item in zip(["", *argv], argv, strict=False):
        flag, _, value = item.partition("=")
        if flag == "--attention-backend" and value in BACKENDS:
            item = f"{flag}={AttnBackend.auto.name}"
        elif previous == "--attention-backend" and item in BACKENDS:
            item = AttnBackend.auto.name
        out.append(item)
    return out


def options_from_args(args: argparse.Namespace) -> DSAOptions:
    """Return :class:`DSAOptions` from parsed flags.

    Raises:
        ConfigError: ``--dsa-impl`` names an unknown operation or implementation.
    """
    packed, sequences = args.dataloader_inter_document_masking, args.micro_batch_size or 1
    options = DSAOptions(
        fused=args.dsa_attention_backend != "dsa_unfused",
        sequence_length=args.seq_length,
        interleaved_sequences=1 if packed else sequences,
        packed_sequences=sequences if packed else 1,
        **field_values(DSAOptions, args),
    )
    check_operations(dict(options.named), OPERATIONS, FLAG)
    return options
