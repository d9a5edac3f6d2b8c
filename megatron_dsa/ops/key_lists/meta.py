"""Key lists on the meta device."""

import torch

from megatron_dsa.ops.dispatch import Candidate
from megatron_dsa.ops.key_lists.api import ListInputs


def build(_candidate: Candidate, inputs: ListInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Meta function of ``key_lists``; ``KEY_LISTS.run`` calls it in a plan."""
    (rows,) = inputs.start.shape
    return inputs.start.new_empty(rows, inputs.width), inputs.start.new_empty(rows)
