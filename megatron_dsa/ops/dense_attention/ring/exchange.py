"""Key exchange between ranks (ring or gathered blocks) and its backward.

Computation overlaps with transfers of the next block and the previous gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm


class RingExchange:
    """Point-to-point messages between neighbours of a process group (NCCL or gloo).

    Between :meth:`start` and :meth:`wait` no tensor may be written, nor ``receive`` read.
    """

    def __init__(self, group, cp: int, rank: int):
        self._group = group
        self._next = distributed.get_global_rank(group, (rank + 1) % cp)
        self._previous = distributed.get_global_rank(group, (rank - 1) % cp)
        self._pending: tuple[list[Any], torch.Tensor, torch.Tensor] | None = None

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        # Batch both messages: sending before receiving would deadlock.
        requests = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, send, self._next, self._group),
                distributed.P2POp(distributed.irecv, receive, self._previous, self._group),
            ]
        )
        # Keep references: NCCL's stream still uses the tensors.
        self._pending = (requests, send, receive)

    def wait(self) -> None:
        assert self._pending is not None
        for request in self._pending[0]:
            request.wait()
        self._pending = None


class Ring:
    def __init__(self, exchange: Callable[[], RingExchange], cp: int, rank: int):
        self._exchange, self._cp, self._rank = exchange, cp, rank

    def blocks(self, local: torch.Tensor, disposable: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every rank and its block, the local block first.

        A block is valid until the next one; a ``disposable`` local block is overwritten.
        """
        exchange = self._exchange() if self._cp > 1 else None
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
        exchange = self._exchange() if self._cp > 1 else None
        return RingGradients(exchange, torch.empty(shape, dtype=dtype, device=device))


class RingGradients:
    def __init__(self, exchange: RingExchange | None, buffer: torch.Tensor):
        self._exchange, self._fresh, self._coming = exchange, True, False
        self._current = buffer
        self._spare: torch.Tensor | None = None

    def start(self) -> None:
        if self._fresh:
            return
        self._arrive()
        if self._spare is None:
            self._spare = torch.empty_like(self._current)
        assert self._exchange is not None
        self._exchange.start(self._current, self._spare)
        self._coming = True

    def target(self, source: int) -> tuple[torch.Tensor, Callable]:
        """Return the current block's gradient and the function that writes a part to it.

        The first part is copied, so it must have all tokens.
        """
        if self._fresh:
            self._fresh = False
            return self._current, torch.Tensor.copy_
        self._arrive()
        return self._current, torch.Tensor.add_

    def home(self) -> torch.Tensor:
        if self._exchange is not None:
            self.start()
            self._arrive()
        return self._current

    def _arrive(self) -> None:
        if self._coming:
            assert self._exchange is not None and self._spare is not None
            self._exchange.wait()
            self._current, self._spare = self._spare, self._current
            self._coming = False


class Gathered:
    def __init__(self, cp: int, rank: int):
        self._cp, self._rank = cp, rank

    def blocks(self, local: torch.Tensor, disposable: bool) -> Iterator[tuple[int, torch.Tensor]]:
        blocks = local.chunk(self._cp)
        for step in range(self._cp):
            source = (self._rank - step) % self._cp
            yield source, blocks[source]

    def gradients(self, shape, dtype: torch.dtype, device) -> GatheredGradients:
        return GatheredGradients(torch.zeros(shape, dtype=dtype, device=device), self._cp)


class GatheredGradients:
    def __init__(self, gradients: torch.Tensor, cp: int):
        self._gradients, self._blocks = gradients, gradients.chunk(cp)

    def start(self) -> None:
        """Do nothing: gathered blocks need no exchange."""

    def target(self, source: int) -> tuple[torch.Tensor, Callable]:
        return self._blocks[source], torch.Tensor.add_

    def home(self) -> torch.Tensor:
        return self._gradients


class KeysAndValues:
    """Keys ``[tokens, H, Dqk]`` and values ``[tokens, H, Dv]`` in one buffer and message."""

    disposable = True

    def __init__(self, k: torch.Tensor, v: torch.Tensor):
        self._shapes, self._keys = (k.shape, v.shape), k.numel()
        self.local = k.new_empty(k.numel() + v.numel())
        for view, x in zip(self._views(self.local), (k, v), strict=True):
            view.copy_(x)

    def _views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = buffer[: self._keys], buffer[self._keys :]
        k, v = (x.view(shape) for x, shape in zip(parts, self._shapes, strict=True))
        return k, v

    def expand(self, buffer: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._views(buffer)
        return k[tokens], v[tokens]

    def add_gradients(self, buffer, tokens: slice, target: Callable, dk, dv) -> None:
        gradients, put = target()
        for view, part in zip(self._views(gradients), (dk, dv), strict=True):
            put(view[tokens], part)

    def split(self, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dk, dv = (x.to(self.local.dtype) for x in self._views(gradients))
        return dk, dv


class Latent:
    """Latents ``[tokens, R + P]``, the last ``P`` dims being the rope key that all heads share.

    ``dw_uk, dw_uv``: gradients ``[H * D, R]``, set by :meth:`add_gradients`.
    """

    disposable = False

    def __init__(self, latent: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor):
        self.local = latent.contiguous()
        self._heads, self._unrotated, self._rank = w_uk.shape
        self._w_uk, self._w_uv = w_uk.flatten(0, 1), w_uv.flatten(0, 1)
        self.dw_uk: torch.Tensor | None = None
        self.dw_uv: torch.Tensor | None = None

    def expand(self, buffer: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        block = buffer[tokens]
        latent, rope = block[:, : self._rank], block[:, self._rank :]
        k = block.new_empty(block.shape[0], self._heads, self._unrotated + rope.shape[1])
        unrotated = torch.mm(latent, self._w_uk.t()).unflatten(1, (self._heads, -1))
        k[..., : self._unrotated] = unrotated
        k[..., self._unrotated :] = rope[:, None]
        return k, torch.mm(latent, self._w_uv.t()).unflatten(1, (self._heads, -1))

    def add_gradients(self, buffer, tokens: slice, target: Callable, dk, dv) -> None:
        dtype, acc = buffer.dtype, accumulation_dtype(buffer.dtype)
        latent = buffer[tokens, : self._rank]
        dk_latent = dk[..., : self._unrotated].flatten(1).to(dtype)
        dv_latent = dv.flatten(1).to(dtype)
        d_latent = mm(dk_latent, self._w_uk).add_(mm(dv_latent, self._w_uv))
        d_rope = dk[..., self._unrotated :].sum(1, dtype=acc)
        parts = mm(dk_latent.t(), latent), mm(dv_latent.t(), latent)
        if self.dw_uk is None or self.dw_uv is None:
            self.dw_uk, self.dw_uv = parts
        else:
            self.dw_uk += parts[0]
            self.dw_uv += parts[1]
        gradients, put = target()
        put(gradients[tokens, : self._rank], d_latent)
        put(gradients[tokens, self._rank :], d_rope)
