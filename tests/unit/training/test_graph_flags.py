"""Training flags that are incompatible with CUDA graphs."""

import contextlib

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.training.flag_rules import check_flags
from tests.host import parsed
from tests.plans import command

PACKED = {"--dataloader-inter-document-masking": True}
WHOLE = {"--cuda-graph-impl": "full_iteration", "--no-check-for-nan-in-loss-and-grad": True}
LOCAL = {"--cuda-graph-impl": "local"}


def checked(changes, monkeypatch):
    args = parsed(command(changes)[1:], 1, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_flags(args)


@pytest.mark.parametrize(
    "changes",
    [LOCAL, LOCAL | {"--cuda-graph-modules": "attn"}, WHOLE]
    + [LOCAL | PACKED | {"--dsa-packed-documents": 8}],
)
def test_accepted(changes, monkeypatch):
    checked(changes, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LOCAL | {"--dsa-time-operations": True}, "--dsa-time-operations is not supported with"),
        (LOCAL | PACKED, "--dsa-packed-documents is required with"),
        (LOCAL | PACKED | {"--dsa-packed-documents": 0}, "must be finite and at least 1"),
        (WHOLE | PACKED, "sends the lengths of documents through the host"),
        (PACKED | {"--dsa-packed-documents": 8}, "has a meaning only with"),
        (WHOLE | {"--timing-log-level": 1}, "--timing-log-level must be 0"),
        (WHOLE | {"--rampup-batch-size": "2 2 8"}, "must be unset with --cuda-graph-impl full_it"),
    ],
)
def test_refused(changes, message, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        checked(changes, monkeypatch)


def test_a_gpu_is_needed(monkeypatch):
    args = parsed(command(LOCAL)[1:], 1, monkeypatch)
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        refused = pytest.raises(ConfigError, match="--cuda-graph-impl local needs a GPU")
        with contextlib.nullcontext() if there else refused:
            check_flags(args)
