"""Plans of the tiny model, for tests."""

import os
from unittest import mock

import torch

from megatron_dsa.config.gpus import GPU, GPUS
from megatron_dsa.extras.planner.command import plan_of
from megatron_dsa.layers import from_megatron as microbatch
from megatron_dsa.ops.layout import layout
from tests.functional.launch import TINY

CPU = GPU("CPU", None, 1e3)
HYBRID = {
    "--csa-compress-ratios": "0 4 16",
    "--num-layers": 3,
    "--csa-window-size": 16,
    "--csa-compress-rotary-base": 10000,
    "--o-groups": 2,
    "--o-lora-rank": 16,
    "--v-head-dim": 24,
    "--dsa-indexer-topk": 6,
    "--dsa-indexer-rope-interleaved": True,
}
EXPERTS = {
    "--num-experts": 8,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 48,
    "--moe-layer-freq": "[0,1]",
    "--moe-shared-expert-intermediate-size": 32,
    "--moe-token-dispatcher-type": "alltoall",
}
BF16 = {"--bf16": True}


def forget_layouts():
    """Drop cached tables of layouts, which a plan counts."""
    layout.bshd_layout.cache_clear()
    microbatch._unpacked.cache_clear()


def command(changes=None):
    """Return the tiny model's command line with other flags; ``None`` drops one."""
    argv = ["pretrain"]
    for flag, value in (TINY | (changes or {})).items():
        if value is not None:
            argv += [flag] if value is True else [flag, *str(value).split(" ")]
    return argv


def plan(changes=None, world=1, gpu=GPUS["h200"], device=torch.device("meta")):
    with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        return plan_of(command(changes), world, gpu, device)


def only_chunk(plan):
    (stage,) = plan.stages
    (chunk,) = stage.chunks
    return chunk
