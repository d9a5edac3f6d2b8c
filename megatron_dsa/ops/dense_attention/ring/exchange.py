"""Key exchange between ranks (ring, or blocks that are gathered already) and its backward.

On the ring, the next block and the last gradient travel while the current ones are computed. The
gather of gathered blocks returns their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed


class RingExchange:
    """Point-to-point messages between neighbours of a process group (NCCL or gloo).

    Between :meth:`start` and :meth:`wait` neither tensor may be written, nor ``receive`` read.
    """

    def __init__(self, group, cp: int, rank: int):
        self._group = group
        self._next = distributed.get_global_rank(group, (rank + 1) % cp)
        self._previous = distributed.get_global_rank(group, (rank - 1) % cp)
        self._pending: tuple[list[Any], torch.Tensor, torch.Tensor] | None = None

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        """Begin sending to the next rank and receiving from the one before."""
        # One batch: a rank that sends first and receives later would wait for itself.
        requests = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, send, self._next, self._group),
                distributed.P2POp(distributed.irecv, receive, self._previous, self._group),
            ]
        )
        # NCCL works on a stream of its own: the tensors must live until it is done with them.
        self._pending = (requests, send, receive)

    def wait(self) -> None:
        """End the step; with NCCL the current stream waits, the host does not."""
        assert self._pending is not None
        for request in self._pending[0]:
            request.wait()
        self._pending = None


class Ring:
    """Blocks go round a ring; ``exchange`` makes a :class:`RingExchange` per kind of message."""

    def __init__(self, exchange: Callable[[], RingExchange], cp: int, rank: int):
        self._exchange, self._cp, self._rank = exchange, cp, rank

    def blocks(self, local: torch.Tensor, disposable: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every rank's block with its rank, the local one first.

        A block is valid until the next one. Later ones overwrite ``local`` if it is ``disposable``.
        """
        exchange = self._exchange() if self._cp > 1 else None
        # One buffer is read and sent, another receives.
        current = local
        spares: list[torch.Tensor] = []
        for step in range(self._cp):
            more = step + 1 < self._cp
            if more:
                assert exchange is not None
                received = spares.pop() if spares else torch.empty_like(local)
                exchange.start(current, received)
            yield (self._rank - step) % self._cp, current
            if more:
                assert exchange is not None
                exchange.wait()
                if disposable or step:
                    spares.append(current)
                current = received

    def gradients(self, shape, dtype: torch.dtype, device) -> RingGradients:
        """Return a collector of the gradients, in the order of :meth:`blocks`."""
        exchange = self._exchange() if self._cp > 1 else None
        return RingGradients(exchange, torch.empty(shape, dtype=dtype, device=device))


class RingGradients:
    """Gradients that travel with their blocks; every rank adds its part, or nothing."""

    def __init__(self, exchange: RingExchange | None, buffer: torch.Tensor):
        self._exchange, self._fresh, self._coming = exchange, True, False
        self._current = buffer
        self._spare: torch.Tensor | None = None

    def start(self) -> None:
        """Send the last block's gradient on; to be called before the next block's is computed."""
        if self._fresh:
            return
        self._arrive()
        if self._spare is None:
            self._spare = torch.empty_like(self._current)
        assert self._exchange is not None
        self._exchange.start(self._current, self._spare)
        self._coming = True

    def target(self, source: int) -> tuple[torch.Tensor, Callable]:
        """Return the current block's gradient, and ``Tensor.copy_`` or ``Tensor.add_``.

        The first part, which is copied, must be of all tokens.
        """
        if self._fresh:
            self._fresh = False
            return self._current, torch.Tensor.copy_
        self._arrive()
        return self._current, torch.Tensor.add_

    def home(self) -> torch.Tensor:
        """Return the gradient of the local block; to be called after all blocks."""
        if self._exchange is not None:
            self.start()
            self._arrive()
        return self._current

    def _arrive(self) -> None:
        """Wait for the current block's gradient, once, where nothing was added."""
        if self._coming:
            assert self._exchange is not None and self._spare is not None
            self._exchange.wait()
            self._current, self._spare = self._spare, self._current
            self._coming = False


class Gathered:
    """Blocks that are gathered already, one rank's after the other; nothing is sent."""

    def __init__(self, cp: int, rank: int):
        self._cp, self._rank = cp, rank

    def blocks(self, local: torch.Tensor, disposable: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every rank's block with its rank, the local one first; ``local`` holds all."""
        blocks = local.chunk(self._cp)
        for step in range(self._cp):
            source = (self._rank - step) % self._cp
            yield source, blocks[source]

    def gradients(self, shape, dtype: torch.dtype, device) -> GatheredGradients:
        """Return a collector of the gradients; ``shape`` is of all blocks together."""
        return GatheredGradients(torch.zeros(shape, dtype=dtype, device=device), self._cp)


class GatheredGradients:
    """This rank's part of the gradients of all blocks."""

    def __init__(self, gradients: torch.Tensor, cp: int):
        self._gradients, self._blocks = gradients, gradients.chunk(cp)

    def start(self) -> None:
        """Nothing is sent."""

    def target(self, source: int) -> tuple[torch.Tensor, Callable]:
        """See :meth:`RingGradients.target`."""
        return self._blocks[source], torch.Tensor.add_

    def home(self) -> torch.Tensor:
        """Return the gradients of all blocks."""
        return self._gradients
