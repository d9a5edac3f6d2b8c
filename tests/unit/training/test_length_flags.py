"""Sizes that would fail in the first step are rejected at start-up, with their flags."""

import pytest

from megatron_dsa.errors import ConfigError
from megatron_dsa.training.flag_rules import check_flags
from tests.host import parsed, stop
from tests.plans import EXPERTS, HYBRID, command, plan

LONG = {"--max-position-embeddings": 128}
TP = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}
CP = {"--context-parallel-size": 2}
PACKED = {
    "--dataloader-inter-document-masking": True,
    "--dsa-cp-layout": "zigzag_rows",
    "--micro-batch-size": 2,
    "--global-batch-size": 4,
}
BALANCED = EXPERTS | {
    "--moe-router-load-balancing-type": "seq_aux_loss",
    "--moe-aux-loss-coeff": 0.01,
}


def check(changes, world, monkeypatch):
    check_flags(parsed(command(LONG | changes)[1:], world, monkeypatch))


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        (TP | {"--seq-length": 97}, 2, "--seq-length must be a multiple of 2 .*got 97.*use 96"),
        (TP | CP | {"--seq-length": 100}, 4, None),
        (
            TP | CP | {"--tensor-model-parallel-size": 4, "--seq-length": 100},
            8,
            "--seq-length must be a multiple of 8 .*got 100.*use 96",
        ),
        (TP | PACKED | BALANCED, 2, "--micro-batch-size must be 1 with .*seq_aux_loss"),
        (CP | PACKED | BALANCED, 2, "--micro-batch-size must be 1 with .*seq_aux_loss"),
        (PACKED | BALANCED, 1, None),
        (TP | PACKED | EXPERTS, 2, None),
    ],
)
def test_lengths(changes, world, message, monkeypatch):
    if message is None:
        check(changes, world, monkeypatch)
        return
    with pytest.raises(ConfigError, match=message):
        check(changes, world, monkeypatch)


PP = {"--pipeline-model-parallel-size": 2}
YARN = {
    "--rope-type": "yarn",
    "--rotary-scaling-factor": 4,
    "--yarn-original-max-position-embeddings": 24,
}
FULL = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
#: Model and ranks, processes, the wrong flags, and the start of the message.
SIZES = [
    (YARN, 1, "--yarn-beta-fast 0", "--yarn-beta-fast must be finite and above 0"),
    (YARN, 1, "--yarn-beta-slow -1", "--yarn-beta-slow must be finite and above 0"),
    (YARN | HYBRID, 1, "--yarn-beta-slow 0", "--yarn-beta-slow must be finite and above 0"),
    (YARN, 1, "--yarn-original-max-position-embeddings 0", "--yarn-original-max-position-emb"),
    (YARN, 1, "--mscale -1", "--mscale must be finite and at least 0"),
    (YARN, 1, "--mscale-all-dim -7.2", "--mscale-all-dim must be finite and at least 0"),
    (TP, 2, "--ffn-hidden-size 97", r"--ffn-hidden-size \(97\) must be a multiple of --tensor"),
    (TP, 2, "--padded-vocab-size 265", "--padded-vocab-size .* of --tensor-model-parallel-size"),
    (TP | EXPERTS, 2, "--moe-shared-expert-intermediate-size 33", "--moe-shared-expert-intermed"),
    (
        TP | EXPERTS,
        2,
        "--moe-ffn-hidden-size 49 --expert-tensor-parallel-size 2",
        "--moe-ffn-hidden-size .* of --expert-tensor-parallel-size",
    ),
    (EXPERTS, 1, "--expert-model-parallel-size 2", "--expert-model-parallel-size .* must divide"),
    (TP | EXPERTS, 2, "--expert-tensor-parallel-size 3", r"--expert.*parallel-size \(3\) times"),
    (PP, 2, "--decoder-first-pipeline-num-layers 5", r"--num-layers 2 cannot .*\[5, -3\] layers"),
    (PP, 2, "--decoder-last-pipeline-num-layers 5", r"--num-layers 2 cannot .*\[-3, 5\] layers"),
    (
        PP,
        2,
        "--num-layers 4 --num-virtual-stages-per-pipeline-rank 3",
        "--num-layers 4 cannot be split over .* 2 times 3 virtual stages",
    ),
    (EXPERTS, 1, "--num-experts 1", r"--moe-router-topk \(2\) must be at most --num-experts"),
    (EXPERTS, 1, "--moe-router-topk 9", r"--moe-router-topk \(9\) must be at most --num-experts"),
    (
        EXPERTS,
        1,
        "--moe-router-num-groups 8 --moe-router-group-topk 1",
        r"--moe-router-topk \(2\) .* at most the 1 experts",
    ),
    (
        EXPERTS,
        1,
        "--moe-router-num-groups 4 --moe-router-group-topk 3",
        r"--moe-router-topk \(2\) must be at least --moe-router-group-topk \(3\)",
    ),
    (EXPERTS, 1, "--moe-router-num-groups 4", "--moe-router-group-topk is required"),
    (EXPERTS, 1, "--moe-layer-freq 0", "--moe-layer-freq must be a positive number, or a list"),
    (EXPERTS, 1, "--moe-layer-freq [1]", "--moe-layer-freq must be .* each of the 2 layers"),
    (EXPERTS, 1, "--moe-layer-freq [1,2]", "--moe-layer-freq must be .* 0 .dense. and 1"),
    (FULL, 1, "--recompute-num-layers 0", "--recompute-num-layers must be finite and at least 1"),
]


@pytest.mark.parametrize(("model", "world", "wrong", "message"), SIZES)
def test_sizes(model, world, wrong, message):
    """Without the rules Megatron or torch fail in the model or the first step."""
    stop()  # plans need their own process groups
    words = wrong.split()
    with pytest.raises(ConfigError, match=message) as raised:
        plan(model | dict(zip(words[::2], words[1::2], strict=True)), world)
    assert len(str(raised.value).splitlines()) <= 2  # no second complaint about the same problem


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        (TP | EXPERTS | {"--moe-ffn-hidden-size": 49, "--expert-tensor-parallel-size": 1}, 2),
        (PP | {"--num-layers": 3, "--decoder-first-pipeline-num-layers": 1}, 2),
        (PP | {"--num-layers": 3, "--account-for-embedding-in-pipeline-split": True}, 2),
        (EXPERTS | {"--moe-router-num-groups": 4, "--moe-router-group-topk": 1}, 1),
        (
            EXPERTS
            | {"--moe-router-topk": 3}
            | {"--moe-router-num-groups": 4, "--moe-router-group-topk": 2},
            1,
        ),
        (YARN | {"--mscale": 0, "--mscale-all-dim": 0}, 1),
    ],
)
def test_sizes_that_fit(changes, world):
    stop()
    plan(changes, world)
