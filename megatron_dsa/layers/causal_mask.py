"""Check of Megatron's ``attention_mask``, which this attention does not read."""

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.capture import capturing
from megatron_dsa.ops.common.checks import require_on_device
from megatron_dsa.ops.layout.sharding import Sharding, global_positions_of

_RULE = (
    "attention_mask must be None, or bool [..., s, s] and causal (True above the diagonal only): "
    "attention is causal within each sequence"
)
_FIX = "pass None, and describe documents and padding by packed_seq_params (qkv_format='thd')"
#: Elements that are compared at a time: no second mask of s * s.
_BLOCK = 1 << 24


def require_causal_mask(
    mask: torch.Tensor | None, tokens: int, sharding: Sharding, packed: bool
) -> None:
    """Raise unless a mask hides what causal attention does not see, and nothing else.

    Args:
        mask: bool ``[..., q, k]``, True where a key is hidden, or ``None``; ``q`` counts all
            tokens, or the tokens of the context-parallel rank.
        tokens: of a sequence, over all ranks.
        sharding: of the hidden states.
        packed: documents are packed, and ``k`` is the length of a sample, which divides
            ``tokens``.

    Raises:
        ConfigError: for shapes and dtypes; on the CPU for values, on a GPU these end in a device
            assertion. A mask is read once.
    """
    # A CUDA graph replays on whatever mask comes next; before its capture the same layer ran.
    if mask is None or capturing():
        return
    version = None if mask.is_inference() else mask._version  # the former have none
    if version is not None and getattr(mask, "_megatron_dsa_causal", None) == version:
        return
    shape = tuple(mask.shape)
    queries, keys = shape[-2:] if len(shape) > 1 else (0, 0)
    right = keys > 0 and (tokens % keys == 0 if packed else keys == tokens)
    cut = sharding.cp > 1 and queries * sharding.cp == keys
    require(
        mask.dtype == torch.bool and right and (queries == keys or cut),
        f"{_RULE}; got {str(mask.dtype).removeprefix('torch.')} {list(shape)} for {tokens} tokens: "
        f"{_FIX}",
    )
    if mask.device.type != "meta" and not (cut and packed):
        positions = torch.arange(queries, device=mask.device)
        if cut:
            table = global_positions_of(sharding.whole(), keys, mask.device)
            positions = table[sharding.cp_rank]
        holds = _is_causal(mask, positions)
        require_on_device(holds, f"{_RULE}: {_FIX}", lambda: f"{_RULE}, got another: {_FIX}")
    mask._megatron_dsa_causal = version  # type: ignore[attr-defined]


def _is_causal(mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a bool scalar for ``mask [..., q, k]`` of queries at ``positions [q]``."""
    keys = torch.arange(mask.shape[-1], device=mask.device)
    rows = max(_BLOCK // max(mask[..., :1, :].numel(), 1), 1)
    held = [
        (part == (keys > at[:, None])).all()
        for part, at in zip(mask.split(rows, -2), positions.split(rows), strict=True)
    ]
    return torch.stack(held).all()
