"""Checks of values on a device."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.device_checks import LONGEST_MESSAGE, require_on_device


def test_the_cpu_raises_the_message():
    require_on_device(torch.tensor(True), "short", lambda: pytest.fail("not asked for"))
    with pytest.raises(ConfigError, match="long"):
        require_on_device(torch.tensor(False), "short", lambda: "long")


def test_other_devices_are_not_waited_for(monkeypatch):
    """24: a meta tensor has no value, so that asking for it would raise."""
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda *args: asserted.append(args))
    holds = torch.empty((), dtype=torch.bool, device="meta")
    require_on_device(holds, "x" * 300, lambda: pytest.fail("not asked for"))
    ((value, message),) = asserted
    assert value is holds and message == "x" * LONGEST_MESSAGE


@pytest.mark.gpu
def test_the_longest_message_is_taken():
    """A longer one raises on the host."""
    require_on_device(torch.tensor(True, device="cuda"), "x" * 300, lambda: "")
    torch.cuda.synchronize()
