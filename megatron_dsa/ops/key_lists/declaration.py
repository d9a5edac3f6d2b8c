"""Key lists: the operation and what implements it."""

from megatron_dsa.ops.dispatch import Candidate, Operation, Support
from megatron_dsa.ops.dispatch.gpus import PORTABLE
from megatron_dsa.ops.dispatch.packages import TRITON

_HERE = __package__

KEY_LISTS = Operation(
    "key_lists",
    "lists of window and compressed keys",
    (
        Candidate(
            "triton",
            f"{_HERE}.triton:build",
            Support(covers="one launch for any ratio", package=TRITON, **PORTABLE),
        ),
        Candidate("torch", f"{_HERE}.torch:build", Support(covers="any shape"), fused=False),
    ),
    meta=f"{_HERE}.meta:build",
)
