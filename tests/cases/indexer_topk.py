"""Inputs of the index selection that make scores exact, layouts, and what is selected."""

import torch

from megatron_dsa.dispatch.support import OpCall
from megatron_dsa.dsa_kernels import IndexerInputs
from megatron_dsa.ops.indexer_topk import reference
from megatron_dsa.sequence.layout import bshd_layout, packed_layout


def integer_inputs(rows, heads=3, dim=4, *, device, seed=0, span=2, relu=True):
    """Small integers: scores are exact in fp32 whatever the order of sums, and ties abound."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(-span, span + 1, shape, generator=generator).float()  # noqa: E731
    return IndexerInputs(
        draw(rows, heads, dim).to(device), draw(rows, dim).to(device),
        draw(rows, heads).to(device), relu,
    )  # fmt: skip


def expected(inputs, layout, k):
    """Selection per the reference, in slot order mapped to rows."""
    keys = layout.keys_in_slot_order(inputs.k)
    scores = reference.index_scores(
        inputs.q.double(), keys.double(), inputs.weights.double(), inputs.relu
    )
    slots = torch.arange(layout.num_keys, device=scores.device)
    visible = (slots >= layout.start[:, None]) & (slots < layout.end[:, None])
    return layout.to_key_rows(reference.topk(scores, visible, k))


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
