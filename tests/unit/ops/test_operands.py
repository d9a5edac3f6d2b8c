"""Operations reject tensors that do not fit each other or the layout."""

import dataclasses

import pytest
import torch

from megatron_dsa import dsa_kernels as ops
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.ops.layout.positions import indices_to_positions, positions_to_indices
from megatron_dsa.ops.layout.sharding import Sharding
from megatron_dsa.ops.rope.api import norm_rope, rotate

TOKENS, HEADS, DIM, TOPK = 16, 2, 8, 5
CPU = torch.device("cpu")
INT, COMPLEX, FLOAT64 = torch.int32, torch.complex64, torch.float64
SETTINGS = {"softmax_scale": 0.3}


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape) % TOKENS


def layout_of(tokens=TOKENS):
    return bshd_layout(tokens, 1, CPU)


def inputs(**changes):
    parts = {
        "q": normal(TOKENS, HEADS, DIM),
        "k": normal(TOKENS, DIM),
        "weights": normal(TOKENS, HEADS),
    }
    return ops.IndexerInputs(**parts | changes)


def call_sparse(**changes):
    arguments = {
        "q": normal(TOKENS, HEADS, DIM),
        "kv": normal(TOKENS, DIM),
        "indices": numbers(TOKENS, TOPK),
        "v_dim": 6,
    }
    return ops.sparse_attention(**arguments | SETTINGS | changes)


def call_masked(**changes):
    arguments = {
        "q": normal(4, 2, 8),
        "kv": normal(9, 2, 10),
        "k_pe": normal(9, 3),
        "bits": torch.zeros(4, 1, 4, dtype=INT),
    }
    return ops.masked_attention(**arguments | SETTINGS | changes)


def call_key_bits(**changes):
    arguments = {"indices": numbers(4, 3), "topk_length": None, "num_keys": 9}
    return ops.key_bits(**arguments | changes)


def call_topk(layout=None, **changes):
    return ops.indexer_topk(inputs(**changes), layout or layout_of(), TOPK)


def call_sparse_loss(indexer=None, **changes):
    arguments = {
        "indices": numbers(TOKENS, TOPK),
        "teacher": normal(TOKENS, TOPK).abs(),
        "layout": layout_of(),
    }
    return ops.sparse_indexer_loss(inputs(**indexer or {}), **arguments | changes)


def call_dense_loss(indexer=None, **changes):
    arguments = {
        "q": normal(TOKENS, HEADS, DIM),
        "k": normal(TOKENS, 1, DIM),
        "layout": layout_of(),
    }
    return ops.dense_indexer_loss(inputs(**indexer or {}), **arguments | SETTINGS | changes)


def call_dense(**changes):
    arguments = {name: normal(TOKENS, HEADS, DIM) for name in "qkv"} | {"layout": layout_of()}
    return ops.dense_attention(**arguments | SETTINGS | changes)


def one_rank(tokens=8):
    return layout_from_megatron(tokens, 1, CPU, None, Sharding(cp=2))


def call_ring(**changes):
    arguments = {name: normal(8, HEADS, DIM) for name in "qkv"}
    return ops.dense_attention(
        **arguments | {"layout": one_rank(), "group": None} | SETTINGS | changes
    )


def call_latent(**changes):
    arguments = {
        "q": normal(8, HEADS, DIM),
        "latents": normal(16, 6),
        "w_uk": normal(HEADS, DIM - 2, 4),
        "w_uv": normal(HEADS, 3, 4),
        "layout": one_rank(),
    }
    return ops.gathered_latent_attention(**arguments | SETTINGS | changes)


def call_lists(kv=None, q=None, **changes):
    layout = layout_of()
    keys = compressed_keys(layout, 4)
    parts = {
        "layout": layout,
        "window": 3,
        "compressed": keys,
        "selected": numbers(TOKENS, 2) % 4,
        "selected_length": torch.full((TOKENS,), 2, dtype=torch.int32),
    }
    q = normal(TOKENS, HEADS, DIM) if q is None else q
    kv = normal(TOKENS + keys.count, DIM) if kv is None else kv
    return ops.sparse_attention(q, kv, KeyLists(**parts | changes), v_dim=6, **SETTINGS)


def call_training(layout=None, **changes):
    given = {name: x.requires_grad_(x.is_floating_point()) for name, x in changes.items()}
    training = ops.IndexerTraining(inputs(**given), layout or layout_of(), lambda: 1.0)
    return call_sparse(indexer=training)


def call_compress(keys=None, **changes):
    arguments = {"values": normal(TOKENS, 6), "scores": normal(TOKENS, 6), "ape": normal(4, 6)}
    keys = keys or compressed_keys(layout_of(), 4)
    return compress(keys=keys, overlap=False, **arguments | changes)


def call_rotate(**changes):
    arguments = {
        "x": normal(TOKENS, HEADS, DIM),
        "cos": normal(TOKENS, 2),
        "sin": normal(TOKENS, 2),
    }
    return rotate(**arguments | changes)


def call_norm_rope(**changes):
    arguments = {
        "x": normal(TOKENS, HEADS, DIM),
        "cos": normal(TOKENS, 2),
        "sin": normal(TOKENS, 2),
    }
    return norm_rope(**arguments | {"eps": 1e-6} | changes)


CALLS = {
    name.removeprefix("call_"): value
    for name, value in list(globals().items())
    if name.startswith("call_")
}


def cast(*names, dtype):
    shapes = {
        "q": (TOKENS, HEADS, DIM), "k": (TOKENS, DIM), "v": (TOKENS, HEADS, DIM),
        "kv": (TOKENS, DIM), "weights": (TOKENS, HEADS),
    }  # fmt: skip
    return {name: normal(*shapes[name], dtype=dtype) for name in names}


def nine(name):
    """Return a layout of 9 query tokens, of 9 key tokens, or of both, for tensors of 16."""
    layout = layout_of(9)
    if name == "both":
        return layout
    whole = layout_of()
    if name == "keys":
        start = torch.zeros_like(whole.start)
        return dataclasses.replace(whole, num_keys=9, start=start, end=whole.end.clamp_max(9))
    return dataclasses.replace(layout, num_keys=TOKENS)


#: Operation, arguments, message. Most of these were once computed, or read unwritten memory.
REFUSED = [
    *(
        (operation, {"layout": nine(which)}, "tokens that layout describes|as many keys as query")
        for operation in ("dense", "topk", "sparse_loss", "dense_loss")
        for which in ("both", "queries", "keys")
    ),
    ("training", {"layout": layout_of(9)}, "inputs.q must have the 9 query tokens"),
    ("training", {"k": normal(12, DIM)}, "inputs.k must have the 16 key tokens"),
    ("ring", {"layout": one_rank(4)}, "q must have the 4 query tokens"),
    ("latent", {"layout": one_rank(4)}, "q must have the 4 query tokens"),
    ("lists", {"kv": normal(TOKENS, DIM)}, r"kv\[4:\] must have the 16 key tokens"),
    ("lists", {"q": normal(9, HEADS, DIM)}, "q must have the 16 query tokens"),
    ("lists", {"selected": numbers(9, 2) % 4}, r"selected must be \[16, topk\]"),
    ("lists", {"selected": numbers(TOKENS, 2)}, "compressed slots below 4"),
    ("lists", {"selected": normal(TOKENS, 2)}, "selected must have dtype"),
    ("lists", {"selected_length": normal(TOKENS)}, "selected_length must have dtype"),
    ("lists", {"selected_length": None}, "selected needs compressed and selected_length"),
    ("lists", {"compressed": None}, "selected needs compressed and selected_length"),
    ("lists", {"compressed": compressed_keys(layout_of(8), 4)}, "compressed must have the 16"),
    ("lists", {"window": -1}, "window must not be negative, got -1"),
    ("compress", {"keys": compressed_keys(layout_of(12), 4)}, "values must have the 12 tokens"),
    *(
        ("sparse", cast("q", "kv", dtype=dtype), "q must have dtype")
        for dtype in (INT, COMPLEX)
    ),
    *(
        ("dense", cast("q", dtype=dtype) | {"k": normal(TOKENS, HEADS, DIM, dtype=dtype)}
         | cast("v", dtype=dtype), "q must have dtype")
        for dtype in (INT, COMPLEX)
    ),
    *(
        ("topk", cast("q", "k", "weights", dtype=dtype), "inputs.q must have dtype")
        for dtype in (INT, COMPLEX)
    ),
    ("topk", cast("k", dtype=torch.float64), "inputs.k must have dtype"),
    ("topk", cast("weights", dtype=INT), "inputs.weights must have dtype"),
    ("sparse_loss", {"indexer": cast("q", "k", dtype=INT)}, "inputs.q must have dtype"),
    ("dense_loss", {"indexer": cast("q", "k", dtype=COMPLEX)}, "inputs.q must have dtype"),
    ("dense_loss", cast("q", dtype=INT) | {"k": normal(TOKENS, 1, DIM, dtype=INT)}, "q must have"),
    ("dense_loss", {"lse": numbers(TOKENS, HEADS)}, "lse must have dtype"),
    ("dense_loss", {"other_lse": numbers(TOKENS, HEADS)}, "other_lse must have dtype"),
    ("topk", {"key_scales": torch.ones(TOKENS)}, "inputs.key_scales must be None"),
    ("dense_loss", {"k": normal(TOKENS, 3, DIM)}, "k must have 1 or 2 heads, got 3"),
    ("sparse", {"topk_length": torch.full((TOKENS,), 2.5)}, "topk_length must have dtype"),
    ("sparse_loss", {"topk_length": torch.full((TOKENS,), 2.5)}, "topk_length must have dtype"),
    ("sparse", {"topk_length": numbers(TOKENS).bool()}, "topk_length must have dtype"),
    ("sparse", {"attn_sink": torch.ones(HEADS, dtype=INT)}, "attn_sink must have dtype"),
    ("sparse", {"indices": normal(TOKENS, TOPK)}, "indices must have dtype"),
    ("sparse_loss", {"indices": numbers(TOKENS, TOPK).float()}, "indices must have dtype"),
    (
        "sparse_loss", {"indices": numbers(9, TOPK), "teacher": normal(9, TOPK)},
        r"indices must be \[16, K\]",
    ),
    ("sparse_loss", {"teacher": numbers(TOKENS, TOPK)}, "teacher must have dtype"),
    ("sparse", {"kv_grad": normal(9, DIM)}, r"kv_grad must be \[16, 8\], got shape \(9, 8\)"),
    ("sparse", {"kv_grad": normal(TOKENS, DIM, dtype=torch.bfloat16)}, "kv_grad must have dtype"),
    ("sparse", {"kv": [1.0]}, "kv must be a tensor .*, got list"),
    ("sparse", {"q": normal(TOKENS, HEADS)}, "q must be"),
    ("sparse", {"kv": normal(TOKENS, 9)}, "kv must be"),
    ("sparse", {"kv": normal(TOKENS, DIM, dtype=FLOAT64)}, "kv must have dtype"),
    ("sparse", {"indices": numbers(TOKENS, TOPK).long()}, "indices must have dtype int32"),
    ("sparse", {"v_dim": 9}, "v_dim must be in"),
    ("sparse", {"topk_length": numbers(3)}, "topk_length must be"),
    ("sparse", {"attn_sink": torch.zeros(3)}, "attn_sink must be"),
    *(
        ("masked", changes, message)
        for changes, message in (
            ({"q": normal(4, 8)}, "q must be"),
            ({"q": normal(4, 2, 3)}, "q must have more than the 3 dims of k_pe"),
            ({"q": normal(4, 2, 13)}, "q must have more .* fewer beyond them than the 10"),
            ({"kv": normal(9, 3, 10)}, "kv must be"),
            ({"kv": normal(9, 2, 10, dtype=FLOAT64)}, "kv must have dtype"),
            ({"k_pe": normal(8, 3)}, "k_pe must be"),
            ({"k_pe": normal(9, 3, dtype=torch.bfloat16)}, "k_pe must have dtype"),
            ({"k_pe_grad": normal(9, 2)}, "k_pe_grad must be"),
            ({"k_pe_grad": normal(9, 3, dtype=torch.bfloat16)}, "k_pe_grad must have dtype"),
            ({"bits": torch.zeros(4, 1, 4, dtype=torch.int64)}, "bits must have dtype int32"),
            ({"bits": torch.zeros(4, 2, 4, dtype=INT)}, "bits must be"),
            ({"topk": -2}, "topk must not be negative, got -2"),
            ({"want_p_sum": True}, "topk must be given with want_p_sum or indexer"),
            ({"indexer": ops.IndexerTraining(inputs(), layout_of(), lambda: 1.0), "topk": 3},
             "the 16 query tokens"),
        )
    ),
    ("key_bits", {"indices": numbers(4, 3).long()}, "indices must have dtype int32"),
    ("key_bits", {"indices": numbers(4)}, "indices must be"),
    ("key_bits", {"topk_length": numbers(3)}, "topk_length must be"),
    ("key_bits", {"num_keys": -1}, "num_keys must not be negative, got -1"),
    ("dense", {"v": normal(TOKENS, HEADS, DIM, dtype=torch.float64)}, "v must have dtype"),
    ("ring", {"q": numbers(8, HEADS, DIM)}, "q must have dtype"),
    ("ring", {"v": normal(8, DIM)}, r"v must be \[8, 2, Dv\]"),
    ("latent", {"q": numbers(8, HEADS, DIM)}, "q must have dtype"),
    ("latent", {"w_uv": normal(HEADS, 4)}, r"w_uv must be \[2, Dv, R\]"),
    ("compress", {"values": numbers(TOKENS, 6), "scores": numbers(TOKENS, 6)}, "values must have"),
    ("compress", {"scores": normal(TOKENS, 6, dtype=torch.float64)}, "scores must have dtype"),
    ("compress", {"ape": numbers(4, 6)}, "ape must have dtype float32, got int32"),
    *(
        (name, changes, message)
        for name in ("rotate", "norm_rope")
        for changes, message in (
            (cast("q", dtype=INT), "x must have dtype"),
            (cast("q", dtype=COMPLEX), "x must have dtype"),
            ({"cos": numbers(TOKENS, 2)}, "cos must have dtype float32, got int32"),
            ({"sin": normal(9, 2)}, r"sin must be \[16, 2\]"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_right_as_they_stand(name):
    """Rejections below must concern the changed argument."""
    if name == "ring":
        pytest.skip("needs a process group: see test_ring.py")
    CALLS[name]()


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(name, changes, message):
    if name in ("rotate", "norm_rope") and "q" in changes:
        changes = {"x": changes["q"]}
    with pytest.raises(ConfigError, match=message):
        CALLS[name](**changes)


@pytest.mark.parametrize("name", ["sparse", "topk", "sparse_loss", "dense_loss", "dense"])
def test_another_device_is_refused(name):
    """The meta device represents any other."""
    changes = {
        "sparse": {"kv": normal(TOKENS, DIM).to("meta")},
        "dense": {"k": normal(TOKENS, HEADS, DIM).to("meta")},
        "topk": {"layout": layout_on_meta()},
        "sparse_loss": {"layout": layout_on_meta()},
        "dense_loss": {"layout": layout_on_meta()},
    }[name]
    message = "layout must be on the device of|must be on the device of the other arguments"
    with pytest.raises(ConfigError, match=message):
        CALLS[name](**changes)


def layout_on_meta():
    return bshd_layout(TOKENS, 1, torch.device("meta"))


def test_positions_of_another_batch_are_refused():
    layout = packed_layout(torch.tensor([0, 6, 16], dtype=torch.int32), TOKENS)
    positions = torch.zeros(9, 3, dtype=torch.int32)
    for call, more in ((positions_to_indices, (3,)), (indices_to_positions, ())):
        with pytest.raises(ConfigError, match=r"indices must be \[16, K\], got shape \(9, 3\)"):
            call(positions, layout, *more)
        with pytest.raises(ConfigError, match="indices must have dtype int32, got int64"):
            call(torch.zeros(TOKENS, 3, dtype=torch.int64), layout, *more)
    with pytest.raises(ConfigError, match="indices must list at most 2 keys per query, got 3"):
        positions_to_indices(torch.zeros(TOKENS, 3, dtype=torch.int32), layout, 2)
