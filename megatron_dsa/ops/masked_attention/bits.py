"""Key bits: which keys a query attends to, one bit per key, for all heads.

int32 ``[Sq, G, 4]`` with ``G = ceil(Skv / 128)``: keys come in groups of 128, and word ``l`` of
group ``g`` has the keys ``128 g + 8 n + 2 l + e`` (``n`` = 0..15, ``e`` = 0..1) at bit
``2 n + e``. A thread of a matrix unit holds these columns of an accumulator, so it reads one word
per query. Bits of keys at or past ``Skv`` are 0.

:mod:`.triton.tiles` writes the bits of a key for all queries, which have the same order.
"""

import torch

#: Keys (or queries) of a group, which has :data:`WORDS` int32.
GROUP, WORDS = 128, 4


def groups(count: int) -> int:
    """Return how many groups ``count`` keys (or queries) have; the last one may be partial."""
    return -(-count // GROUP)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Return int32 ``[Sq, G, 4]``, the bits of a bool ``mask [Sq, Skv]``."""
    queries, keys = mask.shape
    count = groups(keys)
    padded = torch.nn.functional.pad(mask, (0, count * GROUP - keys))
    # [Sq, G, n, l, e] -> [Sq, G, l, (n, e)]
    flags = padded.view(queries, count, 16, WORDS, 2).transpose(2, 3).flatten(3)
    # Bits are disjoint, so a sum that wraps to negative numbers sets bit 31 as it should.
    return (flags.int() << _positions(mask)).sum(-1, dtype=torch.int32)


def unpack(bits: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return the bool mask ``[Sq, num_keys]`` of ``bits [Sq, G, 4]``."""
    flags = (bits[..., None] >> _positions(bits)) & 1
    flags = flags.bool().unflatten(3, (16, 2)).transpose(2, 3)
    return flags.flatten(1)[:, :num_keys]


def _positions(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(32, dtype=torch.int32, device=like.device)
