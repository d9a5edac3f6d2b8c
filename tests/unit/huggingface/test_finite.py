"""Values that are no numbers, counted."""

import math

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.huggingface.finite import NonFinite


def test_values_that_a_dtype_does_not_hold_are_named():
    found = NonFinite("checkpoint here", "choose another")
    found.count("fits", torch.tensor([65504.0, -1e-30]), torch.float16)
    found.count("none", torch.ones(0, 4), torch.float16)
    found.check()
    found.count("large", torch.tensor([1e5, math.nan, 1.0]), torch.float16)
    with pytest.raises(ConfigError, match=r"large: 1 NaN, 1 too large for float16 of 3 values"):
        found.check()
    for number in range(30):
        found.count(f"x{number}", torch.tensor([math.inf]), torch.float32)
    with pytest.raises(ConfigError, match="31 tensors") as error:
        found.check()
    assert "x18:" in str(error.value) and "x19:" not in str(error.value)
    assert "and 11 more tensors" in str(error.value)
