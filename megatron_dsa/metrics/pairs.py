"""How many pairs of a query and a key sequences have: what attention and indexers count by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Keys:
    """Which keys a query has: the query at position ``t`` (from 0) ``(t + 1) // ratio`` of them.

    Attributes:
        ratio: positions per key; 1 if they are not compressed.
        limit: no query has more; 0 for no limit.
    """

    ratio: int = 1
    limit: int = 0

    def pairs(self, length):
        """Return how many pairs of a query and a key sequences have.

        Args:
            length: of a sequence, an ``int`` or an integer tensor of any shape.
        """
        free = length  # queries whose number of keys the limit does not touch
        if self.limit:
            most = self.ratio * self.limit - 1
            free = (length + most - abs(length - most)) // 2  # the smaller, also of tensors
        last = free // self.ratio
        # Every number of keys below the last is that of `ratio` queries.
        pairs = self.ratio * (last * (last - 1) // 2) + last * (free - self.ratio * last + 1)
        return pairs + (length - free) * self.limit


#: What happens once per token.
TOKEN = Keys(limit=1)
