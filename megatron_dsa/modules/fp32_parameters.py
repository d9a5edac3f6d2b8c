"""Parameters that stay in fp32 when a model is cast to 16 bits."""

from __future__ import annotations

import torch


class Fp32Parameters:
    """Mixin for modules whose ``fp32_parameters`` keep their precision.

    Megatron casts whole models (``Float16Module``). Its data parallelism, optimizers and
    checkpoints handle a mix of dtypes; only the cast has to leave these parameters alone.
    """

    fp32_parameters: tuple[str, ...] = ()

    def _apply(self, fn, recurse: bool = True):
        kept = [self._parameters[name] for name in self.fp32_parameters]

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            mine = any(tensor is p or tensor is p.grad for p in kept if p is not None)
            if mine and out.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=out.device)
            return out

        return super()._apply(cast, recurse)
