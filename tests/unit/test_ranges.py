"""Numbers of the command line: one table of ranges for trainings, plans and commands."""

import argparse
import contextlib
import io
import math
import time

import pytest
import torch

from megatron_dsa.config_rules.ranges import FLAGS
from megatron_dsa.dispatch.operation import describe_call
from megatron_dsa.dispatch.policy import Policy
from megatron_dsa.dsa_kernels import sparse_attention
from megatron_dsa.errors import ConfigError
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.options import DSAOptions
from megatron_dsa.tools import cli
from tests.functional.launch import TINY, command_line
from tests.host import start

#: Values of flags that ran, or ended in a traceback, without the table.
REFUSED = """--hidden-size 0|--num-layers 0|--num-layers -1|--num-layers 1000000|--seq-length 0
--seq-length 10000000000|--log-interval 0|--lr -1|--lr nan|--lr inf|--clip-grad nan
--clip-grad -1|--micro-batch-size 0|--global-batch-size 1000000000|--num-attention-heads 0
--kv-lora-rank -4|--v-head-dim 0|--ffn-hidden-size -1|--dsa-indexer-topk 0
--tensor-model-parallel-size 0|--vocab-size 100000000000|--muon-num-ns-steps 0
--seed 100000000000|--norm-epsilon 0|--norm-epsilon nan|--lora-alpha inf
--mtp-loss-scaling-factor -1|--adam-beta2 1|--adam-eps 0|--rotary-base 0
--attention-dropout nan|--dsa-indexer-loss-coeff -1
--train-iters -1|--o-groups 0|--lora-rank 0|--csa-compress-ratios -4
--hc-mult 1000000000000|--q-lora-rank 100000000000000000000|--dsa-workspace-mib 100000000000000
--adam-eps nan|--moe-aux-loss-coeff nan"""
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


@pytest.mark.parametrize("case", ["--global-batch-size 1000000000", "--seq-length 0"])
def test_plans_are_refused_at_once(case, capsys):
    start()
    from megatron_dsa.tools.planner.command import dry_run

    before = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        code = dry_run(["program", *command_line(TINY), "--dsa-dry-run", *case.split()])
    assert code == 2 and time.process_time() - before < 5
    assert capsys.readouterr().err.startswith(f"error: {case.split()[0]} must be finite and")


@pytest.mark.parametrize(
    "flag, value",
    [("--temperature", x) for x in ("inf", "nan", "-1")]
    + [("--seed", str(2**70)), ("--tokens", "0"), ("--step", "-1")],
)
def test_numbers_of_commands(flag, value):
    assert flag in cli.RANGES
    with pytest.raises(ConfigError, match=f"^{flag} must be finite"):
        cli.main(["generate", "--load", "none", "--prompt", "a", flag, value])


def test_text_that_is_no_unicode():
    with pytest.raises(ConfigError, match=r"^--prompt .* must be text in UTF-8"):
        cli.main(["generate", "--load", "none", "--prompt", "a\udcff"])


@pytest.mark.parametrize("temperature", [1e-40, 1e-320])
def test_low_temperatures_take_the_most_probable(temperature):
    start()
    from megatron_dsa.tools.generate import generate

    class Model(torch.nn.Linear):
        def forward(self, tokens, positions, mask):
            return torch.tensor([0.5, 3.0, -2.0]).expand(*tokens.shape, 3)

    written = generate(
        Model(1, 1), [0], 3, vocabulary=3, end=2, maximum=64, temperature=temperature
    )
    assert written == [1, 1, 1]


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0])
def test_softmax_scale(scale):
    q, kv = torch.randn(4, 2, 8), torch.randn(4, 8)
    indices = torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"^softmax_scale must be positive and finite"):
        sparse_attention(q, kv, indices, softmax_scale=scale, v_dim=4)


@pytest.mark.parametrize(
    "named, message",
    [
        (("sparse_atention_forward", "torch"), "'sparse_atention_forward', which does not exist"),
        (("sparse_attention_forward", "tritton"), "must be auto or one of"),
    ],
)
def test_names_of_a_policy(named, message):
    """Also of operations other than the one that is called."""
    call = describe_call("cpu", dtype=torch.float32, heads=2, qk_dim=8, v_dim=4, topk=1)
    with pytest.raises(ConfigError, match=message):
        OPERATIONS["sparse_attention_backward"].choose(call, Policy(named=(named,)))


@pytest.mark.parametrize("alpha", [math.inf, math.nan, 0.0])
def test_alpha_of_adapters(alpha):
    with pytest.raises(ConfigError, match="--lora-alpha must be positive and finite"):
        DSAOptions(lora_rank=4, lora_alpha=alpha, lora_targets=("all-linear",))
