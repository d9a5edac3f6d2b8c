"""This package's flags with Megatron's, and values passed to Megatron."""

import argparse
import dataclasses
import re
import sys
from pathlib import Path

import pytest

from megatron_dsa.errors import ConfigError
from tests.functional.launch import TINY, command_line
from tests.host import parsed, start, unstreamed

FLAGS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "flags.md"


def both_parsers():
    start()
    from megatron.training.arguments import add_megatron_arguments

    from megatron_dsa.arguments import add_dsa_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_dsa_arguments(add_megatron_arguments(parser))


PACKING = ("--dataloader-inter-document-masking",)


def parse(*flags):
    return both_parsers().parse_args(list(flags))


@pytest.mark.parametrize(
    ("flags", "megatrons", "ours"),
    [
        ("--attention-backend=dsa_fused", "auto", "dsa_fused"),
        ("--attention-backend dsa_unfused", "auto", "dsa_unfused"),
        ("--attention-backend flash", "flash", None),
        ("--attention-backend unfused", "unfused", None),
        ("--attention-backend dsa_unfused --attention-backend flash", "flash", None),
        ("", "auto", None),
    ],
)
def test_attention_backends(flags, megatrons, ours):
    from megatron_dsa.arguments import options_from_args

    args = parse(*flags.split())
    assert (args.attention_backend.name, args.dsa_attention_backend) == (megatrons, ours)
    assert options_from_args(args).fused == (ours != "dsa_unfused")


def test_unknown_backend_lists_all(capsys):
    with pytest.raises(SystemExit):
        parse("--attention-backend", "dsa_fast")
    message = capsys.readouterr().err
    assert "dsa_fast" in message and "dsa_fused" in message and "flash" in message


def test_options():
    from megatron_dsa.arguments import options_from_args

    args = parse(
        "--dsa-stage", "warmup", "--dsa-warmup-train-all", "--dsa-strict",
        "--dsa-workspace-mib", "64", "--dsa-health-tokens", "0",
        "--dsa-indexer-topk", "77", "--dsa-indexer-use-sparse-loss",
    )  # fmt: skip
    options = options_from_args(args)
    assert (options.stage, options.freeze_main, options.strict) == ("warmup", False, True)
    assert (options.workspace_bytes, options.health_tokens) == (64 * 2**20, 0)
    # Megatron's flags, name and meaning unchanged.
    assert (args.dsa_indexer_topk, args.dsa_indexer_use_sparse_loss) == (77, True)


@pytest.mark.parametrize(("flags", "interleaved", "packed"), [((), 3, 1), (PACKING, 1, 3)])
def test_options_know_the_sequences_of_a_microbatch(flags, interleaved, packed):
    from megatron_dsa.arguments import options_from_args

    args = parse("--seq-length", "4096", "--micro-batch-size", "3", *flags)
    options = options_from_args(args)
    assert (options.sequence_length, options.interleaved_sequences) == (4096, interleaved)
    assert options.packed_sequences == packed


def test_every_option_has_a_flag():
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_dsa.config.fields import option_fields
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import CSATransformerConfig

    names = {each.name for each in dataclasses.fields(DSAOptions)}
    assert names - {each.name for each, _ in option_fields(DSAOptions)} == {
        "fused", "sequence_length", "interleaved_sequences", "packed_sequences",
    }  # fmt: skip
    inherited = len(dataclasses.fields(MLATransformerConfig))
    own = {each.name for each in dataclasses.fields(CSATransformerConfig)[inherited:]}
    assert own - {each.name for each, _ in option_fields(CSATransformerConfig)} == {
        "dsa", "moe_hash_vocab_size", "layer_pattern",
    }  # fmt: skip


def test_flags_that_are_not_given_leave_the_defaults():
    from megatron_dsa.arguments import field_values, options_from_args
    from megatron_dsa.config.fields import option_fields
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import CSATransformerConfig

    args = parse()
    assert options_from_args(args) == DSAOptions()
    defaults = {each.name: each.default for each, _ in option_fields(CSATransformerConfig)}
    assert field_values(CSATransformerConfig, args) == defaults


#: Words after each flag, and the value of its field.
GIVEN = {
    "--dsa-stage": ("dense", "dense"),
    "--dsa-warmup-train-all": ("", False),
    "--dsa-strict": ("", True),
    "--dsa-workspace-mib": ("3", 3 * 2**20),
    "--dsa-health-tokens": ("0", 0),
    "--dsa-evaluate-indexer": ("", True),
    "--dsa-cp-layout": ("contiguous", "contiguous"),
    "--dsa-tp-mode": ("heads", "heads"),
    "--dsa-cp-exchange": ("keys", "keys"),
    "--dsa-fp8-indexer": ("", True),
    "--dsa-latent-norm-epsilon": ("1e-5", 1e-5),
    "--dsa-impl": ("rotate=torch key_lists=torch", (("rotate", "torch"), ("key_lists", "torch"))),
    "--dsa-csa-teacher": ("compressed", "compressed"),
    "--dsa-muon-per-head": ("all", "all"),
    "--csa-compress-ratios": ("0 4 128", [0, 4, 128]),
    "--csa-window-size": ("9", 9),
    "--csa-compress-rotary-base": ("160000", 160000.0),
    "--o-groups": ("2", 2),
    "--o-lora-rank": ("64", 64),
}


def test_every_flag_reaches_its_field():
    from megatron_dsa.arguments import field_values
    from megatron_dsa.config.fields import option_fields
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import CSATransformerConfig

    args = parse(*(word for flag in GIVEN for word in [flag, *GIVEN[flag][0].split()]))
    found = {}
    for config_class in (DSAOptions, CSATransformerConfig):
        values = field_values(config_class, args)
        found |= {about.flag: values[each.name] for each, about in option_fields(config_class)}
    for flag, (_, value) in GIVEN.items():
        assert found[flag] == value, flag


def test_an_option_is_one_field():
    from typing import Literal

    from megatron_dsa import arguments
    from megatron_dsa.config.fields import option
    from megatron_dsa.config.rules.ranges import option_rules

    @dataclasses.dataclass(frozen=True)
    class Options:
        size: int = option(4 * 2**10, "--dsa-workspace-mib", "Size.", unit=2**10)
        kind: Literal["a", "b"] = option("a", "--kind", "Kind.")

    parser = argparse.ArgumentParser()
    arguments._add_options(parser, Options)
    given = Options(
        **arguments.field_values(Options, parser.parse_args(["--dsa-workspace-mib", "8"]))
    )
    assert given == Options(size=8 * 2**10)
    assert "Size. Default: 4." in parser.format_help()

    def complaints(**values):
        return [message for ok, message in option_rules(Options, Options(**values)) if not ok]

    assert complaints() == []
    of_size, of_kind = complaints(size=2**9, kind="c")
    assert of_size.startswith("--dsa-workspace-mib must be finite and at least 1 ")
    assert "got 0.5: " in of_size and of_kind == "--kind must be one of a, b, got 'c'"


def documented_flags():
    """Return the entries of the table in ``docs/guide/flags.md``: flag, its words, its default."""
    text = FLAGS_PAGE.read_text(encoding="utf-8").split("\n## ")[0]
    rows = re.findall(r"^\| `(--[\w-]+) ?(.*?)` \| (.*?) \| ", text, re.M)
    return {flag: (words.split("\\|"), default) for flag, words, default in rows}


def test_the_page_of_flags_names_all_of_them():
    ours = both_parsers()._action_groups[0]._group_actions
    shown = {act.option_strings[0] for act in ours if act.help != argparse.SUPPRESS}
    assert set(documented_flags()) == shown


def test_the_page_of_flags_shows_their_choices_and_defaults():
    from megatron_dsa.arguments import BACKENDS

    table = documented_flags()
    assert table.pop("--attention-backend") == (list(BACKENDS), f"`{BACKENDS[0]}`")
    actions = both_parsers()._option_string_actions
    for flag, (words, default) in table.items():
        action = actions[flag]
        assert (list(action.choices) if action.choices else words[:1]) == words, flag
        value = re.fullmatch(r"`([^`]*)`", default)
        if action.nargs == 0:
            assert default == "off", flag
        else:
            expected = None if action.default in (None, []) else str(action.default)
            assert (value and value[1]) == expected, flag


def test_megatron_parses_the_command_line_again():
    """Its fault-tolerance set-up reads sys.argv without our flags."""
    start()
    from megatron_dsa.arguments import megatron_argv

    argv = ["x", "--attention-backend", "dsa_fused", "--attention-backend=dsa_unfused", "--seed"]
    assert megatron_argv(argv) == [
        "x", "--attention-backend", "auto", "--attention-backend=auto", "--seed",
    ]  # fmt: skip
    assert megatron_argv(["--attention-backend", "flash"]) == ["--attention-backend", "flash"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dsa-dry-run"], "python -m megatron_dsa.pretrain"),
        (["--dsa-dry-run-world", "8"], "--dsa-dry-run-world .* only with --dsa-dry-run"),
        (["--dsa-dry-run-gpu", "h200"], "--dsa-dry-run-gpu .* only with --dsa-dry-run"),
    ],
)
def test_a_training_is_not_taken_for_a_plan(flags, message):
    start()
    from megatron_dsa.pretrain import model_config_from_args

    with pytest.raises(ConfigError, match=message):
        model_config_from_args(parse("--multi-latent-attention", *flags))


LORA = ["--lora-rank", "2", "--lora-targets", "o_proj"]
FP8_START = ["--load", "somewhere", "--no-load-optim", "--fp8-param-gather"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dsa-hf-without", "hash-routing"], "--dsa-hf-without .* only with --dsa-load-hf"),
        (["--dsa-warmup-train-all"], "--dsa-warmup-train-all .* only in --dsa-stage warmup"),
        (
            ["--dsa-warmup-train-all", "--dsa-stage", "dense"],
            "--dsa-warmup-train-all .* only in --dsa-stage warmup: add that or drop it",
        ),
        (
            ["--dsa-evaluate-indexer", "--dsa-stage", "dense"],
            "--dsa-evaluate-indexer .* only in --dsa-stage warmup or sparse",
        ),
        (
            ["--dsa-load-hf", "somewhere", "--fp8-param-gather"],
            "--fp8-param-gather is not supported with --dsa-load-hf: .* import-hf",
        ),
        (
            ["--dsa-load-hf", "somewhere", "--apply-layernorm-1p"],
            "--apply-layernorm-1p is not supported with --dsa-load-hf",
        ),
        (
            ["--load", "somewhere", "--finetune", "--fp8-param-gather"],
            "--fp8-param-gather: .* add --no-load-optim --load-main-params-from-ckpt",
        ),
        (
            ["--pretrained-checkpoint", "somewhere", "--fp8-param-gather"],
            "--fp8-param-gather: .* add --no-load-optim --load-main-params-from-ckpt",
        ),
        (
            FP8_START,
            "--fp8-param-gather: .* add --no-load-optim --load-main-params-from-ckpt",
        ),
        (
            ["--hc-mult", "4", "--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"],
            "--main-grads-dtype must be fp32 with .*, or --hc-mult or ",
        ),
        (
            [
                *("--softmax-type", "learnable", "--use-precision-aware-optimizer"),
                *("--main-grads-dtype", "bf16"),
            ],
            "--main-grads-dtype must be fp32 with .* --softmax-type learnable",
        ),
        (
            [
                *("--num-layers", "4", "--linear-attention-freq", "2"),
                *("--linear-num-key-heads", "4", "--linear-num-value-heads", "4"),
                *("--linear-key-head-dim", "16", "--linear-value-head-dim", "16"),
                *("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"),
            ],
            "--main-grads-dtype must be fp32 with --csa-compress-ratios, --linear-attention-freq",
        ),
        (["--use-rope-scaling"], "--use-rope-scaling .* no effect on MLA"),
        (
            ["--rotary-seq-len-interpolation-factor", "2"],
            "--rotary-seq-len-interpolation-factor .* no effect on MLA",
        ),
        (["--o-groups", "4"], "--o-groups 4 has a meaning only with --csa-compress-ratios"),
        (["--lora-load", "somewhere"], "--lora-load somewhere has a meaning only with --lora-rank"),
        ([*LORA, "--optimizer", "muon"], "--lora-rank must be unset with --optimizer muon"),
        ([*LORA, "--use-torch-fsdp2"], "--use-torch-fsdp2 is not supported with --lora-rank"),
        (["--dsa-muon-per-head", "all"], "--dsa-muon-per-head .* only with --optimizer muon or ad"),
        (["--moe-hash-seed", "4"], "--moe-hash-seed 4 has a meaning only with --moe-hash-layers"),
    ],
)
def test_flags_without_an_effect_are_named(flags, message):
    start()
    from megatron_dsa.pretrain import model_config_from_args
    from megatron_dsa.training.flag_rules import check_flags

    with pytest.raises(ConfigError, match=message):
        model_config_from_args(parse("--multi-latent-attention", *flags))
    for allowed in (
        [],
        ["--dsa-stage", "warmup", "--dsa-warmup-train-all", "--dsa-evaluate-indexer"],
        ["--dsa-load-hf", "somewhere", "--dsa-hf-without", "hash-routing"],
        ["--load", "somewhere", "--fp8-param-gather"],
        ["--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"],
        [*FP8_START, "--load-main-params-from-ckpt", *unstreamed()],
    ):
        check_flags(parse("--multi-latent-attention", *allowed))


def test_weights_that_are_dequantised_late_are_refused():
    start()
    from megatron_dsa.training.flag_rules import check_flags

    if not unstreamed():
        pytest.skip("this Megatron always dequantises before it loads")
    flags = parse("--multi-latent-attention", *FP8_START, "--load-main-params-from-ckpt")
    with pytest.raises(ConfigError, match=r"--fp8-param-gather: .* --no-stream-ckpt-dequant"):
        check_flags(flags)


def test_a_run_with_a_checkpoint_of_its_own_resumes(tmp_path):
    """Megatron ignores the pretrained checkpoint then, also with FP8 parameters."""
    start()
    from megatron_dsa.training.flag_rules import check_flags

    flags = ["--pretrained-checkpoint", "somewhere", "--load", str(tmp_path), "--fp8-param-gather"]
    with pytest.raises(ConfigError, match="--load-main-params-from-ckpt"):
        check_flags(parse("--multi-latent-attention", *flags))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    check_flags(parse("--multi-latent-attention", *flags))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--dsa-indexer-loss-coeff": None}, "--dsa-indexer-loss-coeff is required in --dsa-stage"),
        ({"--dsa-kernel-backend": "tilelang"}, "--dsa-kernel-backend must be none"),
        ({"--no-rope-freq": 2}, "--no-rope-freq is not supported"),
        ({"--use-transformer-engine-op-fuser": True}, "--use-transformer-engine-op-fuser"),
    ],
)
def test_a_command_line_is_refused_before_a_model_is_built(changes, message, monkeypatch):
    from megatron_dsa.pretrain import model_config_from_args

    args = parsed(command_line(TINY | changes), 1, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        model_config_from_args(args)


def test_import_needs_nothing_optional():
    import subprocess

    code = (
        "import sys\n"
        "for name in ('megatron', 'flash_mla', 'tilelang', 'cudnn', 'transformer_engine'):\n"
        "    sys.modules[name] = None\n"
        "import megatron_dsa.dsa_kernels, megatron_dsa.ops.layout.layout\n"
        "assert not any(n.startswith('megatron.') for n in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_implementations_are_named_by_operation():
    from megatron_dsa.arguments import options_from_args

    args = parse("--dsa-impl", "sparse_attention_forward=tilelang", "indexer_topk=torch")
    named = (("sparse_attention_forward", "tilelang"), ("indexer_topk", "torch"))
    assert options_from_args(args).named == named
    assert options_from_args(parse()).named == ()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("torch", "--dsa-impl must hold OPERATION=IMPLEMENTATION, got 'torch'"),
        ("indexer_top=torch", "--dsa-impl names the operation 'indexer_top', .* indexer_topk"),
    ],
)
def test_a_wrong_name_is_refused(word, says):
    from megatron_dsa.arguments import options_from_args

    with pytest.raises(ConfigError, match=says):
        options_from_args(parse("--dsa-impl", word))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--dsa-forward-impl", "torch"], "it is --dsa-impl sparse_attention_forward=NAME now"),
        (["--dsa-forward-impl=torch"], "it is --dsa-impl sparse_attention_forward=NAME now"),
        (["--dsa-fp8-selection"], "argument --dsa-fp8-selection: it is gone, selection is exact"),
    ],
)
def test_a_former_flag_names_its_successor(flags, says, capsys):
    with pytest.raises(SystemExit):
        parse(*flags)
    assert says in capsys.readouterr().err
