"""Visible keys of a block as arguments of attention kernels.

Packed batches are cut into segments: queries of segment ``i`` attend to keys of segment ``i``.
Queries without keys, and keys without queries, form separate segments, which avoids copies.
"""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Dense:
    """Tokens ``position * batch + element``; queries see all keys of their batch element."""

    batch: int


@dataclass(frozen=True, eq=False)
class Packed:
    """Segments of packed tokens.

    Attributes:
        cu_q, cu_k: int32 ``[segments + 1]`` on the device, offsets into query tokens and keys.
        longest: host-side upper bound of a segment's tokens.
        reach: host-side upper bound of the distance from a query to its keys; default ``longest``.
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest: int
    reach: int | None = None
    derived: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    @torch.inference_mode(False)
    def ranges(self, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return per query the first key, the end of keys and the position in the segment."""
        if "ranges" not in self.derived:
            tokens = torch.arange(queries, device=self.cu_q.device)
            segment = torch.bucketize(tokens, self.cu_q[1:], right=True)
            self.derived["ranges"] = (
                self.cu_k[segment].long(),
                self.cu_k[segment + 1].long(),
                tokens - self.cu_q[segment],
            )
        return self.derived["ranges"]

    @torch.inference_mode(False)
    def blind(self, queries: int) -> torch.Tensor:
        if "blind" not in self.derived:
            start, end, _ = self.ranges(queries)
            self.derived["blind"] = (start == end)[:, None]
        return self.derived["blind"]


def covering(
    ends: list[tuple[torch.Tensor, torch.Tensor]],
    tokens: int,
    longest: int,
    reach: int | None = None,
) -> Packed:
    """Return segments that end at ``ends``, and segments without keys for other tokens.

    ``ends`` has a pair of int ``[sequences]`` per segment, in order: the segment's end among query
    tokens and among keys. The last pair ends the sequence.
    """
    longest = max(1, min(longest, tokens))
    last = ends[-1][0][-1]
    pieces = torch.arange(1, -(-tokens // longest) + 1, device=last.device) * longest
    pieces = (last + pieces).clamp_max(tokens)
    behind = (
        (pieces, last.expand_as(pieces)),
        (torch.full_like(pieces, tokens), pieces),
    )
    cu = []
    for side in (0, 1):
        inside = torch.stack([pair[side] for pair in ends], dim=1).flatten()
        cu.append(torch.cat([last.new_zeros(1), inside, *(pair[side] for pair in behind)]).int())
    return Packed(cu[0], cu[1], longest, reach)
