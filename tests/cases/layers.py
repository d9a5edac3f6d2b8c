"""Attention layers and batches shared over ranks."""

import dataclasses

import torch

from megatron_dsa.config.model import DSAOptions
from tests.ranks import Case

DSA = Case(
    config="small_config",
    by_sequence=(
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "linear_gate",
        "attn_sink",
    ),
    by_columns=("linear_proj",),
    rows=96,
)
HYBRID = Case(
    config="small_csa_config",
    by_sequence=("linear_q_up_proj", "attn_sink", "linear_o_group_proj"),
    by_columns=("linear_proj",),
    changes={"dsa_indexer_topk": 3},  # few of 24 groups, so that ranks exchange queries
    rows=96,
)
#: Sequences shorter than the window, than a group, empty, and with padding.
PACKED = {"lengths": (30, 3, 0, 40, 10), "padded": (32, 8, 0, 40, 16)}
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mla_up_proj"],
}
SAMPLED = {"indexer_loss_queries": 1 / 3}
BY_HEADS = SAMPLED | {"indexer_loss_heads": 1 / 2}
MASKED = {"selected_attention": "masked"}
#: Not with context parallelism.
POOLED = {
    "indexer_pool_size": 4, "qk_pos_emb_head_dim": 0, "dsa_indexer_rotate_activation": False,
}  # fmt: skip
#: A sink per head and an output gate (Hy4).
SINKS = {"softmax_type": "learnable", "output_gate": True}
VISIBLE = {
    "stage": "warmup", "freeze_main": False, "sequence_length": 96,
    "dsa_indexer_use_sparse_loss": False,
}  # fmt: skip
#: Operations of masked dense attention to all visible keys; fused only.
OF_VISIBLE = ("visible_bits", "masked_attention_forward", "masked_attention_backward")
LAYERS = {
    "DSA": (DSA, (), {}),
    "DSA dense loss": (DSA, (), {"dsa_indexer_use_sparse_loss": False}),
    "DSA in blocks": (DSA, (), {"recompute": "latent_output"}),
    "DSA masked": (DSA, (), MASKED),
    "DSA masked dense loss": (DSA, (), MASKED | {"dsa_indexer_use_sparse_loss": False}),
    "DSA masked recomputed": (DSA, (), MASKED | RECOMPUTED),
    "DSA masked fp32": (DSA, (), MASKED | {"dtype": torch.float32}),
    "DSA with sinks": (DSA, (), SINKS),
    "DSA with sinks, recomputed": (DSA, (), SINKS | RECOMPUTED),
    "DSA masked, with sinks": (DSA, (), SINKS | MASKED | SAMPLED),
    "DSA masked, with sinks, recomputed": (DSA, (), SINKS | MASKED | RECOMPUTED),
    "DSA pooled": (DSA, (), POOLED),
    "DSA pooled masked sampled": (DSA, (), POOLED | MASKED | SAMPLED),
    "DSA pooled masked recomputed": (DSA, (), POOLED | MASKED | RECOMPUTED),
    "dense MLA without rope, visible, recomputed": (
        DSA,
        (),
        VISIBLE | RECOMPUTED | {"qk_pos_emb_head_dim": 0},
    ),
    "dense MLA, pooled warm-up": (
        DSA,
        (),
        POOLED | {"stage": "warmup", "dsa_indexer_use_sparse_loss": False},
    ),
    "dense MLA": (DSA, (), {"stage": "dense"}),
    "dense MLA, warm-up": (DSA, (), {"stage": "warmup", "dsa_indexer_use_sparse_loss": False}),
    "dense MLA, keys in a ring": (
        DSA,
        (),
        {"stage": "warmup", "cp_exchange": "keys", "dsa_indexer_use_sparse_loss": False},
    ),
    "dense MLA, visible": (DSA, (), {"stage": "dense", "sequence_length": 96}),
    "dense MLA, visible, warm-up": (DSA, (), VISIBLE),
    "dense MLA, visible, recomputed": (DSA, (), VISIBLE | RECOMPUTED),
    "window": (HYBRID, (0,), {}),
    "CSA": (HYBRID, (4,), {}),
    "CSA in blocks": (HYBRID, (4,), {"recompute": "queries"}),
    "CSA sampled, in blocks": (HYBRID, (4,), SAMPLED | {"recompute": "queries"}),
    "CSA dense loss": (HYBRID, (4,), {"dsa_indexer_use_sparse_loss": False}),
    "CSA old teacher": (HYBRID, (4,), {"csa_teacher": "compressed"}),
    "CSA warm-up": (HYBRID, (4,), {"stage": "warmup", "dsa_indexer_use_sparse_loss": False}),
    "HCA": (HYBRID, (6,), {}),
    "HCA of long groups": (HYBRID, (20,), {}),
    "DSA recomputed": (DSA, (), RECOMPUTED),
    "CSA recomputed": (HYBRID, (4,), RECOMPUTED),
    "DSA sampled": (DSA, (), SAMPLED),
    "DSA sampled by heads": (DSA, (), BY_HEADS),
    "DSA masked sampled": (DSA, (), MASKED | SAMPLED),
    "DSA masked sampled by heads": (DSA, (), MASKED | BY_HEADS),
    "dense MLA, warm-up sampled": (
        DSA,
        (),
        {"stage": "warmup", "dsa_indexer_use_sparse_loss": False} | SAMPLED,
    ),
    "CSA sampled": (HYBRID, (4,), SAMPLED),
    "CSA warm-up sampled": (
        HYBRID,
        (4,),
        {"stage": "warmup", "dsa_indexer_use_sparse_loss": False} | SAMPLED,
    ),
    "DSA fp32": (DSA, (), {"dtype": torch.float32}),
    "CSA fp32": (HYBRID, (4,), {"dtype": torch.float32}),
    "HCA fp32": (HYBRID, (6,), {"dtype": torch.float32}),
}
ROWS = {
    "one": {},
    "two": {"batch": 2},
    "packed": PACKED,
}


def _parts(options):
    return options.head_parts if options.indexer_loss_queries < 1 else 0


def in_small_blocks(options):
    """Return options with a workspace of a few tokens, below the flag's minimum."""
    options = dataclasses.replace(options)
    object.__setattr__(options, "workspace_bytes", 2**14)
    return options


def case(layer, rows, mode=""):
    """Return a layer with a batch; ``mode`` is the division of tokens and heads."""
    base, arguments, changes = LAYERS[layer]
    fields = {field.name for field in dataclasses.fields(DSAOptions)}
    options = {key: value for key, value in changes.items() if key in fields}
    changes = {key: value for key, value in changes.items() if key not in options}
    words = mode.split()
    cp_layout = next((w for w in words if w in ("zigzag", "contiguous", "zigzag_rows")), "zigzag")
    tp_mode = next((w for w in words if w in ("heads", "sequence", "select")), "auto")
    options = DSAOptions(cp_layout=cp_layout, tp_mode=tp_mode, **options)
    if layer.endswith("blocks"):
        options = in_small_blocks(options)
    return dataclasses.replace(
        base, arguments=arguments, changes=base.changes | changes | {"options": options},
        cp_layout=cp_layout, sampled_parts=_parts(options),
        fused=OF_VISIBLE if "visible" in layer else (), **ROWS[rows],
    )  # fmt: skip
