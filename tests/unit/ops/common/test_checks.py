"""Checks of values on a device."""

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.ops.common.checks import require_on_device


def test_the_cpu_raises_the_message():
    require_on_device(torch.tensor(True), "short", lambda: pytest.fail("not asked for"))
    with pytest.raises(ConfigError, match="long"):
        require_on_device(torch.tensor(False), "short", lambda: "long")


@pytest.mark.gpu
def test_the_longest_message_is_taken():
    require_on_device(torch.tensor(True, device="cuda"), "x" * 300, lambda: "")
    torch.cuda.synchronize()
