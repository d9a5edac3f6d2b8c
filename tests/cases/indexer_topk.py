"""Inputs of the index selection with exact scores, layouts, and expected selections."""

import dataclasses

import torch

from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_topk.spec import selected_ids
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.testing.cases import Shape, visible_keys
from megatron_dsa.testing.indexer_topk import expected_scores, integer_index_inputs


def integer_inputs(tokens, *, device, relu=True):
    """Draw small integers: scores are exact in any order of sums, with many ties."""
    shape = Shape(1, 1, 1, 3, 4, 1, tokens, tokens, dtype=torch.float32)
    return integer_index_inputs(shape, tokens, torch.device(device), span=2, relu=relu)


def expected(inputs, layout, k):
    """Select by the reference; map slots to key indices."""
    slots = dataclasses.replace(layout, key_indices=None)
    by_slot = dataclasses.replace(inputs, k=layout.keys_in_slot_order(inputs.k))
    scores = expected_scores(by_slot, torch.arange(len(inputs.q), device=inputs.q.device))
    return layout.to_key_indices(selected_ids(scores, visible_keys(slots), k))


LAYOUTS = {
    "one sequence": lambda device: bshd_layout(60, 1, device),
    "batch of 3": lambda device: bshd_layout(20, 3, device),
    "packed": lambda device: packed_layout(
        torch.tensor([0, 2, 2, 31, 55], device=device, dtype=torch.int32), 60, 29
    ),
}


def op_call(**changes):
    """Describe a call of DeepSeek-V3.2's indexer on Hopper, with changes."""
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "topk": 2048, "dtype": torch.bfloat16}
    return OpCall(**{"device": "cuda", "capability": (9, 0)} | shape | changes)
