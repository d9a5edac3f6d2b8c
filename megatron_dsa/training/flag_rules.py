"""Flags that are refused because they would have no effect, and flags that Megatron ignores."""

from __future__ import annotations

import argparse

from megatron_dsa.config import CSATransformerConfig, DSAOptions, option_fields
from megatron_dsa.dispatch import on_meta
from megatron_dsa.errors import ConfigError, require


def refuse_unused_csa_flags(args: argparse.Namespace) -> None:
    """Raise for flags of V4's attention without the one that asks for it."""
    options = [*option_fields(CSATransformerConfig)]
    options += [pair for pair in option_fields(DSAOptions) if pair[0].name.startswith("csa_")]
    given = [about.flag for each, about in options if getattr(args, about.dest) != each.default]
    if given:
        flags = ", ".join(given)
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
        ConfigError: V4's attention under YaRN without the original length, which cannot be
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
