"""Lengths and batches that ranks cannot divide are refused at start-up."""

import pytest

from megatron_dsa.errors import ConfigError
from megatron_dsa.training.flag_rules import check_flags
from tests.host import parsed
from tests.plans import EXPERTS, command

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
