"""The family ``csa``: shapes, traffic, plain expressions, checks that find errors."""

import pytest
import torch

from benchmarks.__main__ import plan_of
from benchmarks.attention.shapes import PRESETS
from benchmarks.csa import Case, eager, pieces, prepare
from benchmarks.csa.pieces import SHAPES, Job, Piece, pieces_of
from benchmarks.megatron_layer import MODELS
from benchmarks.settings import Settings, Work
from megatron_dsa.config.presets import PRESETS as RELEASED
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.compressor import reference as compressor_reference
from megatron_dsa.ops.compressor.api import CompressorInputs
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.key_lists.spec import plain_lists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.rope import reference as rope_reference
from tests.helpers import relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("preset", ["v4-flash", "v4-pro"])
def test_shapes_are_those_of_the_models(preset):
    shape, model = SHAPES[preset], RELEASED[MODELS[preset]]
    assert shape.heads == model["num_attention_heads"] == PRESETS[preset].heads
    assert shape.dim == model["v_head_dim"] == PRESETS[preset].qk_dim
    assert shape.index_dim == model["dsa_indexer_head_dim"]
    assert shape.rope == model["qk_pos_emb_head_dim"]
    assert shape.topk == model["dsa_indexer_topk"]
    assert shape.window == model["csa_window_size"]
    assert shape.topk + shape.window == PRESETS[preset].topk


def test_pieces_are_measured_once():
    _, found = plan_of("csa", [])
    for tokens in (4096, 16384, 65536):
        names = [work for case, works in found if case.tokens == tokens for work in works]
        assert len(names) == len(set(names))
    # 65536 tokens of 128 heads would need several tensors of 8.6 GB.
    parts = {work.part for case, works in found if case.tokens == 65536 for work in works}
    assert "norm_rope_forward, heads 64, dim 512" in parts
    assert "norm_rope_forward, heads 128, dim 512" not in parts
    assert {"key_lists, ratio 4, topk 512", "key_lists, ratio 4, topk 1024"} <= parts


def test_implementations_exist():
    for operation in ("compressor", "norm_rope", "rotate", "key_lists"):
        assert {"triton", "torch"} <= {c.name for c in OPERATIONS[operation].candidates}


@pytest.mark.parametrize(
    ("operation", "fields", "width", "expected"),
    [
        # values and scores of two halves of 512 in bf16, 1024 pooled keys
        ("compressor_forward", {"ratio": 4, "dim": 512}, None, 4096 * 4096 + 1024 * 1024),
        ("compressor_backward", {"ratio": 4, "dim": 512}, None, 8192 * 4096 + 1024 * 1024),
        ("compressor_forward", {"ratio": 4, "dim": 128}, None, 4096 * 1024 + 1024 * 256),
        ("compressor_backward", {"ratio": 128, "dim": 512}, None, 4 * 4096 * 1024 + 32 * 1024),
        ("norm_rope_forward", {"heads": 64, "dim": 512}, None, 2 * 4096 * 2**16),
        ("norm_rope_backward", {"heads": 64, "dim": 512}, None, 3 * 4096 * 2**16),
        ("rotate_forward", {"heads": 128, "dim": 512}, None, 2 * 4096 * 2**17),
        ("key_lists", {"ratio": 4, "topk": 512}, 640, 4 * 4096 * 640),
    ],
)
def test_bytes_by_hand(operation, fields, width, expected):
    assert pieces.necessary_bytes(Piece(operation, **fields), 4096, width) == expected


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False)])
def test_eager_compressor(ratio, overlap):
    rows, dim = 64, 6
    width = dim * (2 if overlap else 1)
    values, scores, ape = normal(rows, width), normal(rows, width, seed=1), normal(ratio, width)
    groups = compressed_keys(bshd_layout(rows, 1, CPU), ratio).groups
    expected = compressor_reference.compress(
        CompressorInputs(values, scores, ape, groups, ratio, overlap, 2**20)
    )
    found = eager.compress(values, scores, ape, ratio, overlap)
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("inverse", [False, True])
def test_eager_rope(inverse):
    x, angles = normal(5, 3, 12), normal(5, 4)
    tables = angles.cos(), angles.sin()
    found = eager.rotate(x, *tables, inverse)
    assert relative_error(found, rope_reference.rotate(x, *tables, inverse)) < 1e-12
    found = eager.norm_rope(x, *tables, 1e-3)
    assert relative_error(found, rope_reference.norm_rope(x, *tables, 1e-3)) < 1e-12


@pytest.mark.parametrize(("ratio", "topk"), [(0, None), (4, 5), (16, None)])
def test_eager_key_lists(ratio, topk):
    rows, window = 64, 7
    layout = bshd_layout(rows, 1, CPU)
    keys = compressed_keys(layout, ratio) if ratio else None
    selected = length = None
    if topk:
        selected, length = pieces.random_selection(rows, topk, ratio, CPU)
        visible = (torch.arange(rows) + 1) // ratio
        assert torch.equal(length, visible.clamp_max(topk).int())
        assert (selected < visible[:, None]).all() and ((selected >= 0).sum(1) == length).all()
    lists = KeyLists(layout, window, keys, selected, length)
    indices, count = plain_lists(lists._inputs(slice(0, rows)))
    offset = keys.count if ratio else 0
    slots = 0 if topk else offset
    found, found_count = eager.key_lists(layout.position, window, offset, selected, ratio, slots)
    assert torch.equal(found[:, : indices.shape[1]], indices) and torch.equal(found_count, count)
    assert (found[:, indices.shape[1] :] < 0).all()


def tiny_pieces():
    return [pytest.param(piece, id=piece.name) for piece in pieces_of(SHAPES["tiny"])]


@pytest.mark.parametrize("piece", tiny_pieces())
def test_checks_find_errors(piece):
    """Every output that a check looks at is enough to fail it."""
    make = {"c": pieces.compressor_piece, "k": pieces.lists_piece}
    made = make.get(piece.operation[0], pieces.rope_piece)(
        Job(piece, SHAPES["tiny"], 256, "torch", 1), CPU
    )
    result = made.call()
    found = made.check(result)
    assert not found.wrong() and found.worst_error < 4e-3
    if piece.operation == "key_lists":
        for part in (0, 1):
            wrong = [tuple(x.clone() for x in block) for block in result]
            wrong[-1][part][-1] += 1
            assert made.check(wrong).wrong()
        return
    outputs = result if isinstance(result, tuple) else (result,)
    for place in range(len(outputs)):
        wrong = [x.clone() for x in outputs]
        wrong[place] *= 1.05
        assert made.check(tuple(wrong) if isinstance(result, tuple) else wrong[0]).wrong()


def test_lack_of_memory_skips_eager_only(monkeypatch):
    def fails(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pieces, "rope_piece", fails)
    measurer = prepare(Case("tiny", 256), CPU, Settings("cpu"))
    for way, error in (("eager", ImplementationError), ("torch", torch.OutOfMemoryError)):
        with pytest.raises(error):
            list(measurer.measure(Work("rotate_forward, heads 2, dim 32", way)))
