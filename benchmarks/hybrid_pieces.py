"""The element-wise pieces of hybrid attention: inputs, plain torch expressions, traffic, checks.

Every piece is measured as this package's Triton kernel (``triton``), as its memory-bounded torch
implementation (``torch``), both through dispatch, and as the torch expression that a user would
write, with autograd (``eager``). The expressions, in float64 on a part of the rows, are also what
all three are checked against; the unit tests compare them with the package's references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from benchmarks.hybrid import SHAPES, Case
from benchmarks.timing import Clock, measure
from benchmarks.verify import WrongResult, largest_error
from megatron_dsa.dispatch import Policy
from megatron_dsa.errors import ImplementationError
from megatron_dsa.numerics.arithmetic import accumulation_dtype
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.rope.api import norm_rope, rotate
from megatron_dsa.sequence.compressed import compressed_keys
from megatron_dsa.sequence.layout import bshd_layout

DTYPE = torch.bfloat16
#: Rows that are compared with float64: enough for many programs, few enough to cost nothing.
CHECKED_ROWS = 4096
#: Queries have ``heads * dim`` values per row; fewer rows are checked.
CHECKED_QUERIES = 1024
EPS = 1e-6
#: Seconds of timed calls, at most.
SECONDS = 1.0


def necessary_bytes(case: Case, width: int | None = None) -> int:
    """Bytes that an operation cannot avoid to read or write: every input and output once.

    * compressor: values and scores, ``c = 2`` parts wide with overlap, and the pooled keys; in the
      backward also both gradients. ``ape`` and its gradient are small.
    * norm and rope: forward x and y; backward y (of which the norm's gradient is a function), dy
      and dx.
    * key lists: the lists themselves; a selection is not counted, although it has to be read.
    """
    size = DTYPE.itemsize
    if case.operation == "key_lists":
        return 4 * case.rows * width
    if case.operation.startswith("compressor"):
        parts = 2 if case.overlap else 1
        tensors = 4 if case.operation == "compressor_backward" else 2
        pooled = case.rows // case.ratio * case.dim * size
        return tensors * case.rows * parts * case.dim * size + pooled
    tensors = 3 if case.operation == "norm_rope_backward" else 2
    return tensors * case.rows * case.heads * case.dim * size


def eager_compress(values, scores, ape, ratio: int, overlap: bool):
    """Pool groups of ``ratio`` rows; every row is in a group."""
    values = values.unflatten(0, (-1, ratio))
    scores = scores.unflatten(0, (-1, ratio)) + ape
    if overlap:
        values, scores = _with_previous(values, 0.0), _with_previous(scores, float("-inf"))
    return (scores.softmax(1) * values).sum(1).to(values.dtype)


def _with_previous(x, missing: float):
    """Return ``[groups, 2 * ratio, d]``: first channels of the group before, last of the own."""
    dim = x.shape[2] // 2
    previous = pad(x[:-1, :, :dim], (0, 0, 0, 0, 1, 0), value=missing)
    return torch.cat([previous, x[:, :, dim:]], 1)


def eager_rotate(x, cos, sin, inverse: bool = False):
    """Rotate pairs of the last dims of every head."""
    rope = 2 * cos.shape[1]
    head, tail = x.split([x.shape[-1] - rope, rope], -1)
    a, b = tail.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], (-sin if inverse else sin)[:, None]
    tail = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([head, tail.to(x.dtype)], -1)


def eager_norm_rope(x, cos, sin, eps: float):
    """Divide every head by its root mean square, then rotate."""
    wide = x.to(accumulation_dtype(x.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return eager_rotate(wide, cos, sin).to(x.dtype)


def eager_key_lists(position, window: int, offset: int, selected=None, ratio: int = 0, slots=0):
    """Compressed keys, selected or all visible ones, and the window of rows at ``position``.

    Keys of positions start at row ``offset`` of the key buffer.

    Returns:
        ``lists`` int32 ``[rows, width]`` (valid entries first) and ``length`` int32 ``[rows]``.
    """
    position = position[:, None]
    keys = position + torch.arange(1 - window, 1, device=position.device)
    keys = torch.where(keys < 0, -1, keys + offset)
    if selected is not None:
        compressed = selected
    else:
        slot = torch.arange(slots, device=position.device)
        visible = slot < ((position + 1) // ratio if ratio else 0 * position)
        compressed = torch.where(visible, slot, -1)
    lists = torch.cat([compressed, keys], 1)
    order = torch.argsort((lists < 0).to(torch.int8), dim=1, stable=True)
    return lists.gather(1, order).int(), (lists >= 0).sum(1, dtype=torch.int32)


@dataclass
class Piece:
    """What is timed, how its result is judged, and the width of its lists."""

    call: Callable
    error: Callable
    width: int | None = None


def _policy(case: Case, settings: dict) -> Policy:
    """Name the implementation: it runs, or says why it cannot."""
    operation = case.operation.removesuffix("_forward").removesuffix("_backward")
    return Policy(
        workspace_bytes=settings["workspace_mib"] * 2**20,
        named=((operation, case.implementation),),
    )


def _random(*shape: int, device, seed: int, dtype=DTYPE):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)


def _double(*tensors):
    """Copies in float64 that collect gradients."""
    return tuple(x.detach().double().requires_grad_() for x in tensors)


def _forward_error(out, expected) -> float:
    """Error of the first rows."""
    return largest_error((out.detach()[: expected.shape[0]], expected.detach()))


def compressor_piece(case: Case, device, settings: dict) -> Piece:
    """Pooling, or its gradients."""
    rows, ratio = case.rows, case.ratio
    width = case.dim * (2 if case.overlap else 1)
    values = _random(rows, width, device=device, seed=0).requires_grad_()
    scores = _random(rows, width, device=device, seed=1).requires_grad_()
    ape = _random(ratio, width, device=device, seed=2, dtype=torch.float32).requires_grad_()
    if case.implementation == "eager":

        def forward():
            return eager_compress(values, scores, ape, ratio, case.overlap)

    else:
        keys, policy = compressed_keys(bshd_layout(rows, 1, device), ratio), _policy(case, settings)

        def forward():
            return compress(values, scores, ape, keys, overlap=case.overlap, policy=policy)

    # The last group's first rows also get a gradient from the group behind it.
    checked = min(rows, CHECKED_ROWS // ratio * ratio)
    taken = min(rows, checked + ratio)
    wide = _double(values[:taken], scores[:taken], ape)

    def expected():
        return eager_compress(*wide, ratio, case.overlap)

    if case.operation == "compressor_forward":
        return Piece(forward, lambda out: _forward_error(out, expected()))
    out = forward()
    dout = _random(*out.shape, device=device, seed=3)

    def error(gradients):
        right = torch.autograd.grad(expected(), wide, dout[: taken // ratio].double())
        pairs = [(gradients[i][:checked], right[i][:checked]) for i in range(2)]
        if checked == rows:  # otherwise other rows take part
            pairs.append((gradients[2], right[2]))
        return largest_error(*pairs)

    leaves = (values, scores, ape)
    return Piece(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), error)


def rope_piece(case: Case, device, settings: dict) -> Piece:
    """Norm and rope of queries, or its gradient, or the inverse rope of attention outputs."""
    rows, half = case.rows, SHAPES[case.preset].rope // 2
    x = _random(rows, case.heads, case.dim, device=device, seed=0)
    # A copy: in place the input does not survive the first call.
    (wide,) = _double(x[:CHECKED_QUERIES])
    pair = torch.arange(half, device=device, dtype=torch.float64)
    angles = torch.arange(rows, device=device)[:, None] * 10000.0 ** (-pair / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    x.requires_grad_()
    policy = None if case.implementation == "eager" else _policy(case, settings)

    def forward():
        if case.operation == "rotate_forward":
            if policy is None:
                return eager_rotate(x, cos, sin, True)
            return rotate(x, cos, sin, inverse=True, policy=policy)
        if policy is None:
            return eager_norm_rope(x, cos, sin, EPS)
        return norm_rope(x, cos, sin, EPS, inplace=True, policy=policy)

    tables = cos[:CHECKED_QUERIES].double(), sin[:CHECKED_QUERIES].double()

    def expected():
        if case.operation == "rotate_forward":
            return eager_rotate(wide, *tables, True)
        return eager_norm_rope(wide, *tables, EPS)

    if case.operation != "norm_rope_backward":
        return Piece(forward, lambda out: _forward_error(out, expected()))
    out = forward()
    dout = _random(*out.shape, device=device, seed=1)

    def error(gradients):
        right = torch.autograd.grad(expected(), wide, dout[:CHECKED_QUERIES].double())
        return largest_error((gradients[0][:CHECKED_QUERIES], right[0]))

    return Piece(lambda: torch.autograd.grad(out, x, dout, retain_graph=True), error)


def random_selection(rows: int, topk: int, ratio: int, device):
    """Compressed slots that rows see, ``[rows, topk]`` and their number.

    All of them where they are no more than ``topk``, else random ones, possibly one twice: to a
    list that makes no difference.
    """
    seen = (torch.arange(rows, device=device) + 1) // ratio
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.rand(rows, topk, generator=generator, device=device) * seen[:, None]
    place = torch.arange(topk, device=device)
    # Rounding up must not lead to a slot that is not seen.
    slots = torch.minimum(drawn.long(), (seen - 1).clamp_min(0)[:, None])
    slots = torch.where(seen[:, None] > topk, slots, place)
    length = seen.clamp_max(topk)
    return torch.where(place < length[:, None], slots, -1).int(), length.int()


def lists_piece(case: Case, device, settings: dict) -> Piece:
    """Lists of window and compressed keys of all rows, block by block as in a layer."""
    rows, ratio, window = case.rows, case.ratio, SHAPES[case.preset].window
    layout = bshd_layout(rows, 1, device)
    keys = compressed_keys(layout, ratio) if ratio else None
    selected = length = None
    if case.topk is not None:
        selected, length = random_selection(rows, case.topk, ratio, device)
    lists = KeyLists(layout, window, keys, selected, length)
    offset = keys.count if keys is not None else 0
    slots = offset if selected is None else 0

    def plain(position, selected):
        return [eager_key_lists(position, window, offset, selected, ratio, slots)]

    if case.implementation == "eager":

        def call():
            return plain(layout.position, selected)

    else:
        policy = _policy(case, settings)

        def call():
            return [block[1:] for block in lists.blocks(policy)]

    sample = torch.arange(0, rows, -(-rows // CHECKED_ROWS), device=device)

    def error(parts):
        blocks, lengths = zip(*parts, strict=True)
        # Blocks of rows that see few keys may be narrower.
        width = max(block.shape[1] for block in blocks)
        found = torch.cat([pad(b, (0, width - b.shape[1]), value=-1) for b in blocks])[sample]
        part = None if selected is None else selected[sample]
        ((right, count),) = plain(layout.position[sample], part)
        same = torch.equal(found, right[:, :width]) and bool((right[:, width:] < 0).all())
        if not same or not torch.equal(torch.cat(lengths)[sample], count):
            raise WrongResult("lists differ from those of the eager expression")
        return 0.0

    return Piece(call, error, lists.full_width)


def measure_piece(case: Case, device: torch.device, clock: Clock, settings: dict) -> dict:
    """Measure one piece; :func:`benchmarks.measure.outcome` makes a row of what goes wrong."""
    kinds = {"compressor": compressor_piece, "key": lists_piece}
    make = kinds.get(case.operation.split("_")[0], rope_piece)
    try:
        piece = make(case, device, settings)
        row = measure(
            piece.call, piece.error, clock, settings["repeats"], min(settings["budget"], SECONDS)
        )
    except torch.OutOfMemoryError:
        if case.implementation != "eager":
            raise
        raise ImplementationError("the temporaries do not fit in the GPU's memory") from None
    row["width"] = piece.width
    if row["status"] == "ok":
        row["bytes"] = necessary_bytes(case, piece.width)
        row["tb_per_s"] = row["bytes"] / row["median_ms"] / 1e9
    return row
