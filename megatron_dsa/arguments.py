"""Command line flags, added to Megatron's own parser."""

from __future__ import annotations

import argparse

from megatron.core.transformer.enums import AttnBackend

from megatron_dsa.config import (
    CP_EXCHANGES,
    STAGES,
    TEACHERS,
    TP_MODES,
    CSATransformerConfig,
    DSAOptions,
)
from megatron_dsa.dispatch import DEFAULT_WORKSPACE_BYTES, on_meta
from megatron_dsa.dispatch.gpus import GPUS
from megatron_dsa.dispatch.policy import FLAG, VARIABLE, check_operations, parse_named
from megatron_dsa.errors import TRACEBACK_FLAG, ConfigError, require
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.sequence.sharding import CP_LAYOUTS

BACKENDS = ("dsa_fused", "dsa_unfused")
_FORMER_NAMES = {
    "compressor": "compressor",
    "norm-rope": "norm_rope",
    "rotate": "rotate",
    "lists": "key_lists",
    "scores": "indexer_scores",
    "listed-scores": "indexer_listed_scores",
    "topk": "indexer_topk",
    "forward": "sparse_attention_forward",
    "backward": "sparse_attention_backward",
    "teacher": "sparse_attention_probabilities",
    "dense": "dense_attention",
    "ring": "dense_attention",
    "sparse-loss": "sparse_indexer_loss",
    "dense-loss": "dense_indexer_loss",
    "indexer-backward": "sparse_indexer_loss",
}
#: Flags of earlier versions, and what they are called now.
RENAMED = {f"--dsa-{old}-impl": f"{FLAG} {new}=NAME" for old, new in _FORMER_NAMES.items()}
RENAMED["--csa-dense-mode"] = "--dsa-stage dense"
RENAMED["--dsa-health-fp8"] = "metrics.quality.score_recall"


class _BackendAction(argparse.Action):
    """``--attention-backend`` that also takes our values.

    Ours are stored apart (``args.dsa_attention_backend``) and leave Megatron's own setting at
    ``auto``: a value that is not in its enum would travel into its configuration and into the
    arguments pickled in checkpoints.
    """

    def __call__(self, parser, namespace, value, option_string=None):
        if value in BACKENDS:
            namespace.dsa_attention_backend = value
            setattr(namespace, self.dest, AttnBackend.auto)
            return
        if value not in AttnBackend.__members__:
            choices = ", ".join([*BACKENDS, *AttnBackend.__members__])
            parser.error(f"argument --attention-backend: invalid choice {value!r} (from {choices})")
        # The last occurrence on the command line wins.
        namespace.dsa_attention_backend = None
        setattr(namespace, self.dest, AttnBackend[value])


def _replace_attention_backend(parser: argparse.ArgumentParser, ours) -> None:
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
    """Let ``--help`` print help texts of Megatron that hold a bare percent sign."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            action.help and formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")


def add_dsa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's flags; pass it to Megatron as ``extra_args_provider``.

    ``--dsa-indexer-*`` are Megatron's own flags and keep their names and meaning.
    """
    _repair_help(parser)
    # Without it, argparse prints the names of all of Megatron's flags before an error.
    parser.usage = "%(prog)s [flags of Megatron and of megatron_dsa]"
    group = parser.add_argument_group("megatron_dsa")
    # Ours are printed first.
    parser._action_groups.insert(0, parser._action_groups.pop())
    _replace_attention_backend(parser, group)
    parser.set_defaults(dsa_attention_backend=None)
    group.add_argument("--help-dsa", action=_HelpAction, help="Print these flags alone and exit.")
    _add_training_arguments(group)
    _add_log_arguments(group)
    _add_parallel_arguments(group)
    add_dry_run_arguments(group)
    _add_implementation_arguments(group)
    _add_csa_arguments(group)
    return parser


class _HelpAction(argparse.Action):
    """Print the first group of flags, which is ours, and exit."""

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


def _add_training_arguments(group) -> None:
    """Add the flags of what is trained, and of what it starts from."""
    group.add_argument(
        "--dsa-stage",
        choices=STAGES,
        default="sparse",
        help="dense: plain MLA without indexer; warmup: dense attention, train the indexer on it; "
        "sparse (default): attend to the indexer's top-k.",
    )
    group.add_argument(
        "--dsa-warmup-train-all",
        action="store_true",
        help="In stage warmup, train the main model too (default: only the indexer).",
    )
    group.add_argument(
        "--dsa-load-hf",
        metavar="DIR",
        help="Start from a Hugging Face checkpoint, unless --load holds one of Megatron.",
    )
    group.add_argument(
        "--dsa-hf-without",
        nargs="+",
        default=[],
        metavar="FEATURE",
        help="Leave out what released Megatron lacks: hyper-connections, hash-routing (V4).",
    )
    group.add_argument(
        "--dsa-latent-norm-epsilon",
        type=float,
        help="Epsilon of the norms of MLA's latents (default: --norm-epsilon). GLM-5 has another.",
    )


def _add_log_arguments(group) -> None:
    """Add the flags of what the log says."""
    group.add_argument(
        "--dsa-log-dispatch",
        action="store_true",
        help="Log every implementation that was rejected, with its reason.",
    )
    group.add_argument(
        "--dsa-health-rows",
        type=int,
        default=DSAOptions.health_rows,
        help="Query rows per layer on which the selection is judged for the log, once per "
        "iteration; 0 turns this off (%(default)s).",
    )
    group.add_argument(
        "--dsa-evaluate-indexer",
        action="store_true",
        help="Compute and log the indexer loss in evaluation passes, too.",
    )
    group.add_argument(
        "--dsa-time-operations",
        action="store_true",
        help="Measure the time of every operation and write it to TensorBoard and W&B.",
    )


def _add_parallel_arguments(group) -> None:
    """Add the flags of how context- and tensor-parallel ranks divide the work."""
    group.add_argument(
        "--dsa-cp-layout",
        choices=CP_LAYOUTS,
        default=DSAOptions.cp_layout,
        help="How context parallelism shards rows: two chunks per rank, of every document "
        "(zigzag, default) or of packed rows (zigzag_rows), or one part per rank (contiguous).",
    )
    group.add_argument(
        "--dsa-cp-exchange",
        choices=CP_EXCHANGES,
        default=DSAOptions.cp_exchange,
        help="What context-parallel ranks exchange in the dense stages: MLA's latents, gathered, "
        "or keys and values of the local heads, round a ring; auto (default): the narrower.",
    )
    group.add_argument(
        "--dsa-tp-mode",
        choices=TP_MODES,
        default=DSAOptions.tp_mode,
        help="Under tensor parallelism a rank attends for all rows with its heads, or for its rows "
        "with all heads; auto (default): rows where it would have less than 64 heads.",
    )


def add_dry_run_arguments(group) -> None:
    """Add all flags of plans to a parser or to a group of one."""
    add_setting_arguments(group)
    group.add_argument(
        "--dsa-dry-run-attention-only",
        action="store_true",
        help="Plan the attention alone, for models of which the rest is not known: MLPs, experts, "
        "embedding and output layer are left out.",
    )


def add_setting_arguments(group) -> None:
    """Add the flags of what a plan is made for, which is not the model."""
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


def _add_implementation_arguments(group) -> None:
    """Add the flags of what runs, one per operation among them."""
    group.add_argument(
        TRACEBACK_FLAG,
        action="store_true",
        help="Show where an error comes from, which is said in a sentence else.",
    )
    group.add_argument(
        "--dsa-strict",
        action="store_true",
        help="Stop at start-up if an operation has no fused implementation that can run.",
    )
    group.add_argument(
        "--dsa-workspace-mib",
        type=int,
        default=DEFAULT_WORKSPACE_BYTES // 2**20,
        help="Memory that an implementation may use for temporaries, in MiB (%(default)s).",
    )
    group.add_argument(
        "--dsa-fp8-selection",
        action="store_true",
        help="Select keys by index scores in fp8 and score the best of them again: faster, and a "
        "key that fp8 misjudges by much is missed.",
    )
    group.add_argument(
        FLAG,
        nargs="+",
        default=[],
        metavar="OPERATION=NAME",
        help="Implementations that run or stop the start-up, by operation, for example "
        "sparse_attention_forward=flashmla. python -m megatron_dsa info --support-table lists all "
        f"names. Environment: {VARIABLE}, split by commas.",
    )
    for old, new in RENAMED.items():
        group.add_argument(old, action=_RefuseRenamed, new=new, nargs="*", help=argparse.SUPPRESS)


class _RefuseRenamed(argparse.Action):
    """Refuse a flag of an earlier version."""

    def __init__(self, option_strings, dest, new: str, **settings):
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **settings)
        self.new = new

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"argument {option_string}: it is {self.new} now")


def _add_csa_arguments(group) -> None:
    """Add the flags of DeepSeek-V4's attention, named like Megatron's configuration fields."""
    group.add_argument(
        "--csa-compress-ratios",
        type=int,
        nargs="+",
        help="One ratio per layer, multi-token prediction layers last: 0 window only, 4 CSA, more "
        "HCA. Gives the layers DeepSeek-V4's attention.",
    )
    group.add_argument(
        "--csa-window-size",
        type=int,
        default=CSATransformerConfig.csa_window_size,
        help="Latest positions that every query sees (%(default)s).",
    )
    group.add_argument(
        "--csa-compress-rotary-base",
        type=float,
        help="Rotary base of layers with compression; required, take it from the model.",
    )
    group.add_argument(
        "--o-groups",
        type=int,
        default=CSATransformerConfig.o_groups,
        help="Groups of heads with an output projection each (%(default)s).",
    )
    group.add_argument(
        "--o-lora-rank",
        type=int,
        default=CSATransformerConfig.o_lora_rank,
        help="Rank of a group's output projection (%(default)s).",
    )
    group.add_argument(
        "--dsa-csa-teacher",
        choices=TEACHERS,
        default=DSAOptions.csa_teacher,
        help="What the indexer learns: the probabilities of compressed keys beside window and sink "
        "(attention, default), or a softmax over compressed keys alone.",
    )


def csa_fields(args: argparse.Namespace) -> dict:
    """Return the fields of :class:`CSATransformerConfig` that the parsed flags give."""
    names = (
        "csa_compress_ratios",
        "csa_window_size",
        "csa_compress_rotary_base",
        "o_groups",
        "o_lora_rank",
    )
    return {name: getattr(args, name) for name in names}


def refuse_unused_csa_flags(args: argparse.Namespace) -> None:
    """Raise for flags of hybrid attention without the one that asks for it."""
    defaults = {name: getattr(CSATransformerConfig, name) for name in csa_fields(args)}
    defaults["dsa_csa_teacher"] = DSAOptions.csa_teacher
    given = [name for name, default in defaults.items() if getattr(args, name) != default]
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{flags}: has a meaning only with --csa-compress-ratios, add that")


def refuse_ignored_flags(args: argparse.Namespace) -> None:
    """Raise for flags that would have no effect on the run that the others describe."""
    rules = (
        (
            args.dsa_load_hf is not None or not args.dsa_hf_without,
            "--dsa-hf-without has a meaning only with --dsa-load-hf: add that or drop it",
        ),
        (
            args.dsa_stage == "warmup" or not args.dsa_warmup_train_all,
            f"--dsa-warmup-train-all has a meaning only in --dsa-stage warmup, got "
            f"{args.dsa_stage}, which trains everything: drop it",
        ),
        (
            args.dsa_stage != "dense" or not args.dsa_evaluate_indexer,
            "--dsa-evaluate-indexer has no meaning in --dsa-stage dense, which has no indexer: "
            "drop it",
        ),
        (
            not args.use_rope_scaling and args.rotary_seq_len_interpolation_factor is None,
            "--use-rope-scaling and --rotary-seq-len-interpolation-factor have no effect on MLA: "
            "use --rope-type yarn with --rotary-scaling-factor",
        ),
    )
    for ok, message in rules:
        require(ok, message)


def refuse_dry_run_flags(args: argparse.Namespace) -> None:
    """Raise for flags of plans in a training, which would go on as if they were not there."""
    if args.dsa_dry_run:
        raise ConfigError(
            "--dsa-dry-run: this script trains, it makes no plans; give the same flags to "
            "python -m megatron_dsa.pretrain"
        )
    for name in ("dsa_dry_run_world", "dsa_dry_run_gpu", "dsa_dry_run_attention_only"):
        # The last one is a flag of the planned model, too.
        if getattr(args, name) and not on_meta():
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: has a meaning only with --dsa-dry-run, add that")


def apply_yarn_flags(args: argparse.Namespace, config) -> None:
    """Set on an MLA configuration what Megatron's YaRN flags say, which it ignores for MLA.

    Raises:
        ConfigError: hybrid attention under YaRN without the original length, which cannot be
            guessed: it decides which frequencies are stretched.
    """
    original = args.yarn_original_max_position_embeddings
    stretched = config.rope_type == "yarn" and config.rotary_scaling_factor != 1
    if stretched and any(args.csa_compress_ratios or ()) and original is None:
        raise ConfigError(
            "--yarn-original-max-position-embeddings is required with --rope-type yarn and "
            "compressed layers: take it from the model's own configuration"
        )
    given = {
        "original_max_position_embeddings": original,
        "beta_fast": args.yarn_beta_fast,
        "beta_slow": args.yarn_beta_slow,
    }
    for name, value in given.items():
        if value is not None:
            setattr(config, name, value)


def megatron_argv(argv: list[str]) -> list[str]:
    """Return the command line with our backend names replaced by Megatron's ``auto``.

    Megatron parses ``sys.argv`` a second time (fault-tolerance set-up), without our flags: unknown
    flags do not disturb it, but a value that is not in its enum does.
    """
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
    """Return the :class:`DSAOptions` that the parsed flags ask for.

    Raises:
        ConfigError: ``--dsa-impl`` names what does not exist.
    """
    named = parse_named(args.dsa_impl, FLAG)
    check_operations(dict(named), OPERATIONS, FLAG)
    return DSAOptions(
        stage=args.dsa_stage,
        freeze_main=not args.dsa_warmup_train_all,
        fused=args.dsa_attention_backend != "dsa_unfused",
        strict=args.dsa_strict,
        workspace_bytes=args.dsa_workspace_mib * 2**20,
        health_rows=args.dsa_health_rows,
        evaluate_indexer=args.dsa_evaluate_indexer,
        csa_teacher=args.dsa_csa_teacher,
        cp_layout=args.dsa_cp_layout,
        tp_mode=args.dsa_tp_mode,
        cp_exchange=args.dsa_cp_exchange,
        fp8_selection=args.dsa_fp8_selection,
        latent_norm_epsilon=args.dsa_latent_norm_epsilon,
        named=named,
    )
