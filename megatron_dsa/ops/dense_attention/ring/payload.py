"""Content of the blocks that ranks exchange: keys and values, or MLA's latents.

Every rank expands latents to the keys and values of its heads: fewer numbers to send, for two
products per block.
"""

from collections.abc import Callable

import torch

from megatron_dsa.ops.common.arithmetic import accumulation_dtype, mm


class KeysAndValues:
    """One buffer, so one message: keys ``[tokens, H, Dqk]``, then values ``[tokens, H, Dv]``."""

    disposable = True  # the buffer is a copy

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
        """Return the keys and values of some tokens of a block."""
        k, v = self._views(buffer)
        return k[tokens], v[tokens]

    def add_gradients(self, buffer, tokens: slice, target: Callable, dk, dv) -> None:
        """Add the gradients of some tokens of a block to ``target()``."""
        gradients, put = target()
        for view, part in zip(self._views(gradients), (dk, dv), strict=True):
            put(view[tokens], part)

    def split(self, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the local keys and values, in the dtype of the inputs."""
        dk, dv = (x.to(self.local.dtype) for x in self._views(gradients))
        return dk, dv


class Latent:
    """Latents ``[tokens, R + P]``: ``R`` numbers to expand, then the heads' common rope key.

    Attributes:
        dw_uk, dw_uv: gradients of the weights after :meth:`add_gradients`, ``[H * D, R]`` in the
            accumulation dtype.
    """

    disposable = False  # the buffer is the caller's

    def __init__(self, latent: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor):
        self.local = latent.contiguous()
        self._heads, self._unrotated, self._rank = w_uk.shape
        self._w_uk, self._w_uv = w_uk.flatten(0, 1), w_uv.flatten(0, 1)
        self.dw_uk: torch.Tensor | None = None
        self.dw_uv: torch.Tensor | None = None

    def expand(self, buffer: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys ``[n, H, Dqk]`` and values ``[n, H, Dv]`` of some tokens of a block."""
        block = buffer[tokens]
        latent, rope = block[:, : self._rank], block[:, self._rank :]
        k = block.new_empty(block.shape[0], self._heads, self._unrotated + rope.shape[1])
        unrotated = torch.mm(latent, self._w_uk.t()).unflatten(1, (self._heads, -1))
        k[..., : self._unrotated] = unrotated
        k[..., self._unrotated :] = rope[:, None]
        return k, torch.mm(latent, self._w_uv.t()).unflatten(1, (self._heads, -1))

    def add_gradients(self, buffer, tokens: slice, target: Callable, dk, dv) -> None:
        """Add the gradients of some tokens of a block to ``target()``, which waits."""
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
