"""Batches of ring attention, their division over ranks, and single-process attention."""

import dataclasses

import torch

from megatron_dsa.ops.dense_attention.ring import (
    ContiguousShard,
    PackedRuns,
    PackedZigzagShard,
    ZigzagShard,
)

#: Heads; dims of keys, values, rope, latent.
SMALL = (3, 12, 8, 4, 10)
WEIGHTS = ("w_uk", "w_uv")
#: Sequences of at most a chunk, empty ones with and without padding, tokens after the last.
#: Multiples of 8, the most chunks tested.
REAL, PADDED, TAIL = (13, 0, 3, 0, 40, 22), (16, 0, 32, 8, 40, 24), 8
WHOLE = (16, 0, 8, 40, 24)
#: For layouts that cut anywhere: uneven, empty, shorter than a chunk, on all ranks, padding inside
#: and after.
ANY_REAL, ANY_PADDED, ANY_TAIL = (5, 0, 61, 0, 1, 9), (7, 3, 64, 0, 1, 13), 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch; ``real`` and ``padded`` are lengths of packed sequences, followed by ``tail``
    tokens.

    ``cut``: division over ranks; ``zigzag`` cuts every sequence, the others cut all tokens.
    """

    mode: str = "ring"
    cut: str = "zigzag"
    dtype: torch.dtype = torch.float64
    batch: int = 1
    length: int = 48
    real: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    tail: int = 0
    workspace: int | None = None
    dims: tuple[int, ...] = SMALL

    @property
    def scale(self):
        return self.dims[1] ** -0.5

    @property
    def total(self):
        if self.real is None:
            return self.batch * self.length
        return sum(self.padded or self.real) + self.tail

    def sequences(self):
        """Return per sequence ``(all its tokens, number of real ones)``."""
        if self.real is None:
            rows = torch.arange(self.total)
            return [(rows[b :: self.batch], self.length) for b in range(self.batch)]
        padded, first, result = self.padded or self.real, 0, []
        for real, width in zip(self.real, padded, strict=True):
            result.append((torch.arange(first, first + width), real))
            first += width
        return result

    def local_rows(self, cp, rank):
        """Return the global indices of a rank's tokens, in its order."""
        if self.cut != "zigzag":
            places = [p for first, n in self.runs(cp)[rank] for p in range(first, first + n)]
            return (torch.tensor(places)[:, None] * self.batch + torch.arange(self.batch)).flatten()
        chunks = []
        for rows, _ in self.sequences():
            parts = rows.chunk(2 * cp) if len(rows) else [rows] * 2 * cp
            chunks.append(torch.cat([parts[rank], parts[2 * cp - 1 - rank]]))
        if self.real is None:
            return torch.stack(chunks, dim=1).flatten()
        end = self.total - self.tail
        share = self.tail // cp
        return torch.cat([*chunks, torch.arange(end + rank * share, end + (rank + 1) * share)])

    def runs(self, cp):
        """Return starts and lengths of every rank's tokens, if all tokens are cut."""
        places = self.total // self.batch
        if self.cut == "contiguous":
            return tuple(((rank * places // cp, places // cp),) for rank in range(cp))
        size = places // (2 * cp)
        return tuple(
            ((rank * size, size), ((2 * cp - 1 - rank) * size, size)) for rank in range(cp)
        )

    def describe(self, cp, rank, device="cpu"):
        """Return the argument ``rows`` of the tested functions."""
        if self.real is None:
            kind = ContiguousShard if self.cut == "contiguous" else ZigzagShard
            return kind(cp, rank, self.batch, self.length // cp)

        def cumulated(lengths):
            total = torch.tensor((0, *lengths)).cumsum(0)
            return total.to(device=device, dtype=torch.int32)

        kind, more = PackedZigzagShard, {}
        if self.cut != "zigzag":
            kind, more = PackedRuns, {"runs": self.runs(cp)}
        padded = None if self.padded is None else cumulated(self.padded)
        longest = max(self.padded or self.real)
        return kind(cp, rank, self.total // cp, cumulated(self.real), longest, padded, **more)

    def inputs(self):
        """Draw global inputs, rounded to the case's dtype, in float64."""
        heads, qk, v, rope, rank = self.dims
        shapes = {"q": (self.total, heads, qk), "dout": (self.total, heads, v)}
        if self.mode == "ring":
            shapes |= {"k": (self.total, heads, qk), "v": (self.total, heads, v)}
        else:
            shapes |= {"latent": (self.total, rank + rope)}
            shapes |= {"w_uk": (heads, qk - rope, rank), "w_uv": (heads, v, rank)}
        generator = torch.Generator().manual_seed(5)
        return {
            name: self._random(name, shape, generator).to(self.dtype)
            for name, shape in shapes.items()
        }

    def _random(self, name, shape, generator):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        # Expanded keys and values of size 1.
        return values * self.dims[-1] ** -0.5 if name in WEIGHTS else values


PACKED = {"real": REAL, "padded": PADDED, "tail": TAIL}
ANY = {"real": ANY_REAL, "padded": ANY_PADDED, "tail": ANY_TAIL}
#: Divisions that ignore sequences.
CUTS = {
    "contiguous": {"cut": "contiguous"},
    "contiguous, two sequences": {"cut": "contiguous", "batch": 2},
    "contiguous, packed": {"cut": "contiguous", "real": ANY_REAL, "tail": 20},
    "contiguous, short ones": {"cut": "contiguous", "real": (11, 5) * 6},
    "contiguous, with padding": {"cut": "contiguous", **ANY},
    "rows, packed": {"cut": "zigzag_rows", "real": ANY_REAL, "tail": 20},
    "rows, with padding": {"cut": "zigzag_rows", **ANY},
}


def expected(case):
    """Compute attention over whole sequences in one process, in float64."""
    leaves = {name: x.double().requires_grad_() for name, x in case.inputs().items()}
    dout = leaves.pop("dout").detach()
    q, heads, rank = leaves["q"], case.dims[0], case.dims[-1]
    if case.mode == "ring":
        k, v = leaves["k"], leaves["v"]
    else:
        latent = leaves["latent"]
        rope = latent[:, None, rank:].expand(-1, heads, -1)
        k = torch.cat([torch.einsum("sr,hdr->shd", latent[:, :rank], leaves["w_uk"]), rope], -1)
        v = torch.einsum("sr,hdr->shd", latent[:, :rank], leaves["w_uv"])
    out = torch.zeros(dout.shape, dtype=torch.float64)
    lse = torch.full(dout.shape[:2], float("-inf"), dtype=torch.float64)
    for rows, real in case.sequences():
        rows = rows[:real]
        logits = torch.einsum("ihd,jhd->hij", q[rows], k[rows]) * case.scale
        future = torch.ones(real, real, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
        attended = torch.einsum("hij,jhd->ihd", logits.softmax(-1), v[rows])
        out = out.index_copy(0, rows, attended)
        lse[rows] = logits.detach().logsumexp(-1).t()
    out.backward(dout)
    return {"out": out, "lse": lse, **{f"d{name}": x.grad for name, x in leaves.items()}}


def together(case, several, what):
    """Merge ranks' tokens into global order; sum weight gradients like Megatron."""
    world = len(several)
    parts = [rank[what] for rank in several]
    if what[1:] in WEIGHTS:
        return sum(part.double() for part in parts)
    whole = parts[0].new_full((case.total, *parts[0].shape[1:]), float("nan"))
    for rank, part in enumerate(parts):
        whole[case.local_rows(world, rank)] = part
    return whole
