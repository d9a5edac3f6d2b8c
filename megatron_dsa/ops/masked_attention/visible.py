"""Bits of all keys that the queries of a layout see, for dense attention under a bit mask."""

import torch

from megatron_dsa.ops.dispatch import OpCall, Policy, describe_call
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.masked_attention.declaration import VISIBLE_BITS
from megatron_dsa.ops.masked_attention.inputs import VisibleBitsInputs

#: Most tokens of a microbatch whose layers share the bits: these take 128 MiB then.
MOST_KEPT = 32 * 1024


def visible_bits(layout: Layout, policy: Policy = Policy()) -> torch.Tensor:
    """Return the bits of the keys that each query sees (:mod:`.bits`), in the order of key rows.

    They take ``num_queries * num_keys / 8`` bytes: 8 MiB for 8k tokens, 128 MiB for 32k, 2 GiB for
    128k. Up to :data:`MOST_KEPT` keys the layers of a microbatch share them, and the last two
    layouts keep them; longer ones are formed again by every call.

    Args:
        layout: of unpacked or packed batches, or any other ranges of slots.
        policy: which implementations may run.

    Returns:
        int32 ``[num_queries, ceil(num_keys / 128), 4]``. No bit of a padding query is set.
    """

    def form() -> torch.Tensor:
        slots = None if layout.key_rows is None else layout.slots_of_key_rows().int()
        inputs = VisibleBitsInputs(
            layout.start, layout.end, slots, layout.num_keys, policy.workspace_bytes
        )
        return VISIBLE_BITS.run(describe_visible_call(layout.start.device), policy, inputs)

    return layout.derive_large("visible bits", form) if layout.num_keys <= MOST_KEPT else form()


def describe_visible_call(device: torch.device | str) -> OpCall:
    """Describe the call of ``visible_bits``, which knows neither heads nor dims."""
    return describe_call(device, dtype=torch.int32, heads=1, qk_dim=0, v_dim=0)
