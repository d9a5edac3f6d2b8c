"""The flags that README shows can be planned for more GPUs than the one that it trains on."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_dsa.planning.command import plan_of
from megatron_dsa.planning.gpus import GPUS
from tests import host

README = Path(__file__).resolve().parents[3] / "README.md"


@pytest.mark.parametrize("world", [1, 8])
def test_plan_of_the_flags_of_readme(world):
    (block,) = re.findall(r"^flags=\(\n(.*?)^\)$", README.read_text("utf-8"), re.M | re.S)
    host.stop()  # plans have process groups of their own
    plan = plan_of(["pretrain", *shlex.split(block)], world, GPUS["h200"])
    assert plan.args.data_parallel_size == world
    assert plan.microbatches * plan.args.micro_batch_size * world == plan.args.global_batch_size
