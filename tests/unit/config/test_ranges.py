"""Ranges of numbers on the command line, for trainings, plans and commands."""

import argparse
import contextlib
import io
import math
import time

import pytest
import torch

from megatron_dsa.config.model import validate
from megatron_dsa.config.options import DSAOptions
from megatron_dsa.config.presets import preset
from megatron_dsa.config.rules.ranges import FLAGS
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras import cli
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch.operation import describe_call
from megatron_dsa.ops.dispatch.policy import Policy
from tests.functional.launch import TINY, command_line
from tests.host import parsed, start

#: Values that otherwise ran, or ended in a traceback.
REFUSED = """--hidden-size 0|--num-layers 0|--num-layers -1|--num-layers 1000000|--seq-length 0
--seq-length 10000000000|--log-interval 0|--lr -1|--lr nan|--lr inf|--clip-grad nan
--clip-grad -1|--micro-batch-size 0|--global-batch-size 1000000000|--num-attention-heads 0
--kv-lora-rank -4|--v-head-dim 0|--ffn-hidden-size -1|--dsa-indexer-topk 0
--tensor-model-parallel-size 0|--vocab-size 100000000000|--muon-num-ns-steps 0
--seed 100000000000|--norm-epsilon 0|--norm-epsilon nan|--lora-alpha inf
--mtp-loss-scaling-factor -1|--adam-beta2 1|--adam-eps 0|--rotary-base 0
--attention-dropout nan|--dsa-indexer-loss-coeff -1
--train-iters -1|--adam-eps nan|--moe-aux-loss-coeff nan|--eval-iters -1|--save-interval 0
--weight-decay nan|--weight-decay -1|--adam-beta1 1.5|--init-method-std -1|--num-workers -1
--lora-rank 0|--q-lora-rank 0|--recompute-num-layers 0|--rotary-percent 2|--hc-mult 0
--lion-beta1 1|--muon-momentum -0.1|--save-retain-interval 0
--dsa-packed-documents 0|--dsa-workspace-mib -1|--distributed-timeout-minutes 0
--moe-input-jitter-eps -1|--glu-linear-offset nan
--eval-interval 0|--dsa-dry-run-world 10000000000|--num-experts 0
--train-iters -1|--o-groups 0|--csa-compress-ratios -4
--hc-mult 1000000000000|--q-lora-rank 100000000000000000000|--dsa-workspace-mib 100000000000000"""
CASES = [case.split() for case in REFUSED.replace("\n", "|").split("|")]


@pytest.fixture(scope="module")
def parser():
    start()
    from megatron.training.arguments import add_megatron_arguments

    from megatron_dsa.arguments import add_dsa_arguments

    return add_dsa_arguments(add_megatron_arguments(argparse.ArgumentParser()))


def test_rows_are_flags_and_defaults_hold(parser):
    assert set(FLAGS) <= set(parser._option_string_actions)
    assert parser.parse_args(command_line(TINY)).seq_length == TINY["--seq-length"]


@pytest.mark.parametrize("flag, value", CASES)
def test_numbers_out_of_range(flag, value, parser):
    with pytest.raises(ConfigError, match=f"^{flag} must be finite.*got .*: ") as raised:
        parser.parse_args([*command_line(TINY), flag, value])
    assert "give a number" in str(raised.value)


@pytest.mark.parametrize(
    "case", ["--global-batch-size 1000000000", "--seq-length 0", "--num-layers 513"]
)
def test_plans_are_refused_at_once(case, capsys):
    start()
    from megatron_dsa.extras.planner.command import dry_run

    before = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        code = dry_run(["program", *command_line(TINY), "--dsa-dry-run", *case.split()])
    assert code == 2 and time.process_time() - before < 5
    assert capsys.readouterr().err.startswith(f"error: {case.split()[0]} must be finite and")


@pytest.mark.parametrize("number", ["0", "-1", "10000000000"])
def test_gpus_of_a_plan(number):
    start()
    from megatron_dsa.extras.planner.command import dry_run

    with pytest.raises(ConfigError, match="^--dsa-dry-run-world must be finite.* got " + number):
        dry_run(["program", *command_line(TINY), "--dsa-dry-run", "--dsa-dry-run-world", number])


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
@pytest.mark.parametrize("value", ["abc", "-1", ""])
def test_variables_of_a_plan(name, value, monkeypatch):
    start()
    from megatron_dsa.extras.planner.command import dry_run

    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name} must be a number of at least ., got '{value}'"):
        dry_run(["program", *command_line(TINY), "--dsa-dry-run"])


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"--min-lr": 4e-3}, "--min-lr must be at most --lr = 0.003, got 0.004"),
        ({"--lr-warmup-init": 1}, "--lr-warmup-init must be at most --lr = 0.003, got 1"),
        ({"--lr-warmup-iters": 4}, "--lr-warmup-iters must be less than --train-iters = 4, got 4"),
        (
            {"--lr-warmup-iters": 3, "--lr-decay-iters": 2},
            "--lr-warmup-iters must be less than --lr-decay-iters = 2, got 3",
        ),
    ],
)
def test_numbers_of_two_flags(changes, says, parser):
    with pytest.raises(ConfigError, match=f"^{says}"):
        parser.parse_args(command_line(TINY | changes))


def test_values_that_mean_something_to_megatron(parser):
    """Negative: Megatron's meaning; 0: never. Without training there is no schedule."""
    for flags in (
        {"--moe-router-force-biased": -0.1, "--moe-expert-capacity-factor": -1},
        {"--moe-paged-stash-buffer-size-factor-cuda": -1.1},
        {"--exit-interval": 0, "--exit-duration-in-mins": 0, "--train-sync-interval": 0},
        {"--skip-train": True, "--lr-warmup-iters": 4},
    ):
        parser.parse_args(command_line(TINY | flags))
    name = "--microbatch-group-size-per-virtual-pipeline-stage"
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        parser.parse_args(command_line(TINY | {name: 0}))


def test_muon_scales_no_losses(monkeypatch):
    from megatron_dsa.pretrain import model_config_from_args

    args = parsed(command_line(TINY | {"--optimizer": "muon", "--fp16": True}), 1, monkeypatch)
    with pytest.raises(ConfigError, match=r"^--fp16 is not supported with --optimizer muon"):
        model_config_from_args(args)


@pytest.mark.parametrize("command", ["generate --load none --prompt a", "doctor"])
def test_numbers_of_commands(command):
    wrong = {
        "generate": "temperature inf|temperature nan|temperature -1|tokens 0|step -1|seed -1"
        f"|seed {2**70}",
        "doctor": "heads 0|heads 4,-1|topk 0|seq 0|dims 0,0|rows -1|index-heads 0|index-dim 0"
        "|tolerance nan|tolerance 0|tolerance -1|tolerance inf",
    }[command.split()[0]]
    for case in wrong.split("|"):
        flag, value = f"--{case}".split()
        assert flag in cli.RANGES
        with pytest.raises(ConfigError, match=f"^{flag} must be finite"):
            cli.main([*command.split(), flag, value])


@pytest.mark.parametrize(
    "command",
    ["prepare-data --output", "import-hf --input a --output", "generate --prompt a --load"],
)
def test_empty_words_name_nothing(command):
    with pytest.raises(ConfigError, match=r"^--(output|load) must not be empty"):
        cli.main([*command.split(), ""])


def test_text_that_is_no_unicode():
    with pytest.raises(ConfigError, match=r"^--prompt .* must be text in UTF-8"):
        cli.main(["generate", "--load", ".", "--prompt", "a\udcff"])


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_low_temperatures_take_the_most_probable(temperature):
    start()
    from megatron_dsa.extras.generate.generate import generate

    class Model(torch.nn.Linear):
        def forward(self, tokens, positions, mask):
            return torch.tensor([0.5, 3.0, -2.0]).expand(*tokens.shape, 3)

    written = generate(
        Model(1, 1), [0], 3, vocabulary=3, end=2, maximum=64, temperature=temperature
    )
    assert written == [1, 1, 1]


@pytest.mark.parametrize(
    "field, value",
    [
        ("workspace_bytes", 0),
        ("workspace_bytes", -1),
        ("workspace_bytes", math.nan),
        ("indexer_numerics", "deepgemm"),
        ("indexer_numerics", ""),
    ],
)
def test_fields_of_a_policy(field, value):
    with pytest.raises(ConfigError, match=f"^Policy: {field} must"):
        Policy(**{field: value})


@pytest.mark.parametrize(
    "named, message",
    [
        (("sparse_atention_forward", "torch"), "'sparse_atention_forward', which does not exist"),
        (("sparse_attention_forward", "tritton"), "must be auto or one of"),
    ],
)
def test_names_of_a_policy(named, message):
    call = describe_call("cpu", dtype=torch.float32, heads=2, qk_dim=8, v_dim=4, topk=1)
    with pytest.raises(ConfigError, match=message):
        OPERATIONS["sparse_attention_backward"].choose(call, Policy(named=(named,)))


@pytest.mark.parametrize("alpha", [math.inf, math.nan, 0.0])
def test_alpha_of_adapters(alpha):
    with pytest.raises(ConfigError, match="--lora-alpha must be finite and above 0"):
        DSAOptions(lora_rank=4, lora_alpha=alpha, lora_targets=("all-linear",))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dsa_indexer_topk", 2048.5, "--dsa-indexer-topk must be a whole number, got 2048.5"),
        ("dsa_indexer_n_heads", 64.0, "--dsa-indexer-n-heads must be a whole number, got 64.0"),
        ("dsa_indexer_topk", "2048", "--dsa-indexer-topk must be a (whole )?number, got '2048'"),
        ("rotary_base", "1e4", "--rotary-base must be a number, got '1e4'"),
        ("v_head_dim", None, "--v-head-dim is required"),
    ],
)
def test_values_from_python(name, value, message):
    config = preset("v3.2", transformer_impl="local", dsa_indexer_loss_coeff=1.0)
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        validate(config)
