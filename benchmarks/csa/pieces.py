"""Memory-bound pieces of V4's attention: inputs, calls, necessary traffic, checks.

All ways are checked against :mod:`benchmarks.csa.eager` in float64, on a part of the tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from benchmarks.csa import eager
from benchmarks.settings import Settings
from benchmarks.timing import Clock, measure
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.compressor.api import compress
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.ops.key_lists.api import KeyLists
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import bshd_layout
from megatron_dsa.ops.rope.api import norm_rope, rotate
from megatron_dsa.testing.comparison import MODEL_SHAPES, Comparison

DTYPE = torch.bfloat16
#: Tokens compared with float64: many programs, little cost.
CHECKED_ROWS = 4096
#: Fewer, because queries have ``heads * dim`` values.
CHECKED_QUERIES = 1024
EPS = 1e-6
#: Most seconds of timed calls.
SECONDS = 1.0


@dataclass(frozen=True)
class Piece:
    """One memory-bound operation of a layer.

    Attributes:
        operation: name, with ``_forward`` or ``_backward`` if there are two.
        ratio: compression ratio, of a compressor and of key lists.
        heads, dim: of the processed tensor.
        topk: compressed keys selected per list.
    """

    operation: str
    ratio: int | None = None
    heads: int | None = None
    dim: int | None = None
    topk: int | None = None

    @property
    def name(self) -> str:
        given = {"ratio": self.ratio, "heads": self.heads, "dim": self.dim, "topk": self.topk}
        texts = (f"{name} {value}" for name, value in given.items() if value is not None)
        return ", ".join([self.operation, *texts])

    @property
    def overlap(self) -> bool:
        """Groups of a CSA compressor also pool the previous group."""
        return self.ratio == 4


@dataclass(frozen=True)
class Shape:
    """One layer's dims."""

    heads: int
    dim: int
    index_dim: int
    rope: int
    topk: int
    window: int


SHAPES = {
    "v4-flash": Shape(64, 512, 128, 64, 512, 128),
    "v4-pro": Shape(128, 512, 128, 64, 1024, 128),
    # For a quick run on any machine.
    "tiny": Shape(2, 32, 16, 8, 8, 8),
}
#: Compression ratios of the layers: window only, CSA, HCA.
RATIOS = (0, 4, 128)


def pieces_of(shape: Shape) -> Iterator[Piece]:
    for ratio, dim in ((4, shape.dim), (4, shape.index_dim), (128, shape.dim)):
        for operation in ("compressor_forward", "compressor_backward"):
            yield Piece(operation, ratio, dim=dim)
    for operation in ("norm_rope_forward", "norm_rope_backward", "rotate_forward"):
        yield Piece(operation, heads=shape.heads, dim=shape.dim)
    for ratio in RATIOS:
        yield Piece("key_lists", ratio, topk=shape.topk if ratio == 4 else None)


@dataclass(frozen=True)
class Job:
    """A piece with its size and a way: ``triton``, ``torch`` or ``eager``."""

    piece: Piece
    shape: Shape
    tokens: int
    way: str
    workspace_mib: int = 256


@dataclass
class Call:
    """The timed call, the check of its result, and the width of its lists."""

    call: Callable
    check: Callable
    width: int | None = None


def necessary_bytes(piece: Piece, tokens: int, width: int | None = None) -> int:
    """Return the bytes that an operation must read or write: every input and output once.

    * compressor: values and scores, ``c = 2`` parts wide with overlap, and pooled keys; the
      backward adds both gradients. ``ape`` is small.
    * norm and rope: forward x and y; backward y (which determines the norm's gradient), dy and dx.
    * key lists: the lists only, without reading a selection.
    """
    size = DTYPE.itemsize
    if piece.operation == "key_lists":
        return 4 * tokens * width
    if piece.operation.startswith("compressor"):
        parts = 2 if piece.overlap else 1
        tensors = 4 if piece.operation == "compressor_backward" else 2
        pooled = tokens // piece.ratio * piece.dim * size
        return tensors * tokens * parts * piece.dim * size + pooled
    tensors = 3 if piece.operation == "norm_rope_backward" else 2
    return tensors * tokens * piece.heads * piece.dim * size


def _policy(job: Job) -> Policy:
    """Name the implementation: it runs, or raises the reason."""
    operation = job.piece.operation.removesuffix("_forward").removesuffix("_backward")
    return Policy(workspace_bytes=job.workspace_mib * 2**20, named=((operation, job.way),))


def _random(*shape: int, device, seed: int, dtype=DTYPE):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)


def _double(*tensors):
    """Copy to float64 leaves."""
    return tuple(x.detach().double().requires_grad_() for x in tensors)


def compare(**pairs) -> Comparison:
    """Compare name -> ``(found, expected)``."""
    found = Comparison(MODEL_SHAPES[DTYPE])
    for name, (x, right) in pairs.items():
        found.compare(name, x, right)
    return found


def compressor_piece(job: Job, device) -> Call:
    rows, ratio, piece = job.tokens, job.piece.ratio, job.piece
    width = piece.dim * (2 if piece.overlap else 1)
    values = _random(rows, width, device=device, seed=0).requires_grad_()
    scores = _random(rows, width, device=device, seed=1).requires_grad_()
    ape = _random(ratio, width, device=device, seed=2, dtype=torch.float32).requires_grad_()
    if job.way == "eager":

        def forward():
            return eager.compress(values, scores, ape, ratio, piece.overlap)

    else:
        keys, policy = compressed_keys(bshd_layout(rows, 1, device), ratio), _policy(job)

        def forward():
            return compress(values, scores, ape, keys, overlap=piece.overlap, policy=policy)

    # The last group's first tokens also get a gradient from the next group.
    checked = min(rows, CHECKED_ROWS // ratio * ratio)
    taken = min(rows, checked + ratio)
    wide = _double(values[:taken], scores[:taken], ape)

    def expected():
        return eager.compress(*wide, ratio, piece.overlap)

    if piece.operation == "compressor_forward":
        return Call(forward, lambda out: compare(out=(out[: taken // ratio], expected())))
    out = forward()
    dout = _random(*out.shape, device=device, seed=3)

    def check(gradients):
        right = torch.autograd.grad(expected(), wide, dout[: taken // ratio].double())
        names = ("dvalues", "dscores", "dape")
        pairs = dict(zip(names, zip(gradients, right, strict=True), strict=True))
        dape = pairs.pop("dape")
        pairs = {name: (x[:checked], y[:checked]) for name, (x, y) in pairs.items()}
        # Otherwise other tokens contribute to the gradient of ape.
        return compare(**pairs, dape=dape) if checked == rows else compare(**pairs)

    leaves = (values, scores, ape)
    return Call(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), check)


def rope_piece(job: Job, device) -> Call:
    rows, half, piece = job.tokens, job.shape.rope // 2, job.piece
    x = _random(rows, piece.heads, piece.dim, device=device, seed=0)
    # In place, the input would not survive the first call.
    (wide,) = _double(x[:CHECKED_QUERIES])
    pair = torch.arange(half, device=device, dtype=torch.float64)
    angles = torch.arange(rows, device=device)[:, None] * 10000.0 ** (-pair / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    x.requires_grad_()
    policy = None if job.way == "eager" else _policy(job)

    def forward():
        if piece.operation == "rotate_forward":
            if policy is None:
                return eager.rotate(x, cos, sin, True)
            return rotate(x, cos, sin, inverse=True, policy=policy)
        if policy is None:
            return eager.norm_rope(x, cos, sin, EPS)
        return norm_rope(x, cos, sin, EPS, inplace=True, policy=policy)

    tables = cos[:CHECKED_QUERIES].double(), sin[:CHECKED_QUERIES].double()

    def expected():
        if piece.operation == "rotate_forward":
            return eager.rotate(wide, *tables, True)
        return eager.norm_rope(wide, *tables, EPS)

    if piece.operation != "norm_rope_backward":
        return Call(forward, lambda out: compare(out=(out[:CHECKED_QUERIES], expected())))
    out = forward()
    dout = _random(*out.shape, device=device, seed=1)

    def check(gradients):
        (right,) = torch.autograd.grad(expected(), wide, dout[:CHECKED_QUERIES].double())
        return compare(dx=(gradients[0][:CHECKED_QUERIES], right))

    return Call(lambda: torch.autograd.grad(out, x, dout, retain_graph=True), check)


def random_selection(rows: int, topk: int, ratio: int, device):
    """Draw visible compressed keys, ``[tokens, topk]`` and their number: all, or random ones.

    Duplicates are possible and harmless.
    """
    seen = (torch.arange(rows, device=device) + 1) // ratio
    generator = torch.Generator(device).manual_seed(0)
    drawn = torch.rand(rows, topk, generator=generator, device=device) * seen[:, None]
    place = torch.arange(topk, device=device)
    # Rounding up must not reach an invisible key.
    slots = torch.minimum(drawn.long(), (seen - 1).clamp_min(0)[:, None])
    slots = torch.where(seen[:, None] > topk, slots, place)
    length = seen.clamp_max(topk)
    return torch.where(place < length[:, None], slots, -1).int(), length.int()


def lists_piece(job: Job, device) -> Call:
    rows, ratio, window, topk = job.tokens, job.piece.ratio, job.shape.window, job.piece.topk
    layout = bshd_layout(rows, 1, device)
    keys = compressed_keys(layout, ratio) if ratio else None
    selected = length = None
    if topk is not None:
        selected, length = random_selection(rows, topk, ratio, device)
    lists = KeyLists(layout, window, keys, selected, length)
    offset = keys.count if keys is not None else 0
    slots = offset if selected is None else 0

    def plain(position, selected):
        return [eager.key_lists(position, window, offset, selected, ratio, slots)]

    if job.way == "eager":

        def call():
            return plain(layout.position, selected)

    else:
        policy = _policy(job)

        def call():
            return [block[1:] for block in lists.blocks(policy)]

    sample = torch.arange(0, rows, -(-rows // CHECKED_ROWS), device=device)

    def check(parts):
        blocks, lengths = zip(*parts, strict=True)
        # Blocks of tokens that see few keys may be narrower.
        width = max(block.shape[1] for block in blocks)
        found = torch.cat([pad(b, (0, width - b.shape[1]), value=-1) for b in blocks])[sample]
        part = None if selected is None else selected[sample]
        ((right, count),) = plain(layout.position[sample], part)
        same = torch.equal(found, right[:, :width]) and bool((right[:, width:] < 0).all())
        same = same and torch.equal(torch.cat(lengths)[sample], count)
        result = compare()
        result.require(same, "lists differ from those of the eager expression")
        return result

    return Call(call, check, lists.full_width)


def measure_piece(job: Job, device: torch.device, clock: Clock, settings: Settings) -> dict:
    """Measure one piece; return its result.

    Raises:
        ImplementationError: the way cannot run here, or needs too much memory.
    """
    kinds = {"compressor": compressor_piece, "key": lists_piece}
    make = kinds.get(job.piece.operation.split("_")[0], rope_piece)
    try:
        made = make(job, device)
        limits = settings.repeats, min(settings.budget, SECONDS)
        row = measure(made.call, made.check, clock, *limits)
    except torch.OutOfMemoryError:
        if job.way != "eager":
            raise
        raise ImplementationError("the temporaries do not fit in the GPU's memory") from None
    if row["status"] == "ok":
        row["tb_per_s"] = necessary_bytes(job.piece, job.tokens, made.width) / row["ms"] / 1e9
    return row
