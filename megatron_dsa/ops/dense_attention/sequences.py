"""Which query tokens of a block see which of its key rows, in the terms that attention kernels
take.

Unpacked batches are dense. For packed ones the tokens are cut into segments, as many of queries as
of
keys: the queries of segment ``i`` see the keys of segment ``i``. Rows that see nothing, and keys
that no query sees, stand in segments of their own whose other side is empty. So every token is in a
segment and no row has to be moved for the kernel's ``cu_seqlens``.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Dense:
    """Rows ``position * batch + element``; queries see all keys of their batch element."""

    batch: int


@dataclass(frozen=True, eq=False)
class Packed:
    """Segments of packed tokens.

    Attributes:
        cu_q, cu_k: int32 ``[segments + 1]`` on the device; they start at 0 and end at the number
            of query and key rows.
        longest: host-side upper bound of the rows of a segment.
        reach: host-side upper bound of how far apart the rows of a query and of its keys are;
            ``None``: ``longest``.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest: int
    reach: int | None = None
    derived: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @torch.inference_mode(False)  # what is formed in evaluation is used in training, too
    def ranges(self, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int64 ``[queries]`` thrice: first key, end of the keys, place in the segment."""
        if "ranges" not in self.derived:
            rows = torch.arange(queries, device=self.cu_q.device)
            segment = torch.bucketize(rows, self.cu_q[1:], right=True)
            self.derived["ranges"] = (
                self.cu_k[segment].long(),
                self.cu_k[segment + 1].long(),
                rows - self.cu_q[segment],
            )
        return self.derived["ranges"]

    @torch.inference_mode(False)
    def blind(self, queries: int) -> torch.Tensor:
        """Return bool ``[queries, 1]``: which of them see no key."""
        if "blind" not in self.derived:
            start, end, _ = self.ranges(queries)
            self.derived["blind"] = (start == end)[:, None]
        return self.derived["blind"]


def covering(
    ends: list[tuple[torch.Tensor, torch.Tensor]], rows: int, longest: int, reach: int | None = None
) -> Packed:
    """Return the segments that end where sequences say; rows behind them see nothing.

    Args:
        ends: int ``[sequences]`` twice per segment: where it ends among the query tokens and among
            the key rows, in ascending order. The last ones end at the sequence's last token.
        rows: of queries, and of keys.
        longest: host-side upper bound of the rows of such a segment.
        reach: see :class:`Packed`.
    """
    longest = max(1, min(longest, rows))
    last = ends[-1][0][-1]
    pieces = torch.arange(1, -(-rows // longest) + 1, device=last.device) * longest
    pieces = (last + pieces).clamp_max(rows)
    behind = (
        (pieces, last.expand_as(pieces)),
        (torch.full_like(pieces, rows), pieces),
    )
    cu = []
    for side in (0, 1):
        inside = torch.stack([pair[side] for pair in ends], dim=1).flatten()
        cu.append(torch.cat([last.new_zeros(1), inside, *(pair[side] for pair in behind)]).int())
    return Packed(cu[0], cu[1], longest, reach)
