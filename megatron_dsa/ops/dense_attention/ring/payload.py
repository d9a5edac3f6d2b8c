"""What is in a block that ranks exchange, and how keys and values come out of it.

Either the keys and values themselves, or MLA's latent, from which every rank makes the keys and
values of its heads: that is fewer numbers to send, for two products per block.
"""

from collections.abc import Callable

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm


class KeysAndValues:
    """A flat buffer with the keys ``[rows, H, Dqk]`` and behind them the values ``[rows, H, Dv]``.

    One buffer is one message; values keep their width in it.
    """

    #: The buffer is a copy.
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

    def expand(self, buffer: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of ``rows`` of a block."""
        k, v = self._views(buffer)
        return k[rows], v[rows]

    def add_gradients(self, buffer, rows: slice, target: Callable, dk, dv) -> None:
        """Put the gradients of ``rows`` of the block ``buffer`` where ``target()`` says."""
        gradients, put = target()
        for view, part in zip(self._views(gradients), (dk, dv), strict=True):
            put(view[rows], part)

    def split(self, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the own keys and values, in the dtype of the inputs."""
        dk, dv = (x.to(self.local.dtype) for x in self._views(gradients))
        return dk, dv


class Latent:
    """The latent ``[rows, R + P]``: ``R`` numbers to expand, then the heads' common rope key.

    Args:
        latent: normalised and rotated; of all ranks, one after the other, if they are gathered.
        w_uk: ``[H, Dqk - P, R]``; w_uv: ``[H, Dv, R]``, the weights that expand.

    Attributes:
        dw_uk, dw_uv: gradients of the weights after :meth:`add_gradients`, ``[H * D, R]`` in the
            accumulation dtype.
    """

    #: The buffer is the caller's.
    disposable = False

    def __init__(self, latent: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor):
        self.local = latent.contiguous()
        self._heads, self._unrotated, self._rank = w_uk.shape
        self._w_uk, self._w_uv = w_uk.flatten(0, 1), w_uv.flatten(0, 1)
        self.dw_uk: torch.Tensor | None = None
        self.dw_uv: torch.Tensor | None = None

    def expand(self, buffer: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys ``[n, H, Dqk]`` and values ``[n, H, Dv]`` of ``rows`` of a block."""
        block = buffer[rows]
        latent, rope = block[:, : self._rank], block[:, self._rank :]
        k = block.new_empty(block.shape[0], self._heads, self._unrotated + rope.shape[1])
        unrotated = torch.mm(latent, self._w_uk.t()).unflatten(1, (self._heads, -1))
        k[..., : self._unrotated] = unrotated
        k[..., self._unrotated :] = rope[:, None]
        return k, torch.mm(latent, self._w_uv.t()).unflatten(1, (self._heads, -1))

    def add_gradients(self, buffer, rows: slice, target: Callable, dk, dv) -> None:
        """Put the gradient of ``rows`` of the block ``buffer`` where ``target()`` says.

        The products come first and ``target()``, which waits for a message, after them.
        """
        dtype, acc = buffer.dtype, accumulation_dtype(buffer.dtype)
        latent = buffer[rows, : self._rank]
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
        put(gradients[rows, : self._rank], d_latent)
        put(gradients[rows, self._rank :], d_rope)
