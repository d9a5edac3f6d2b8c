"""Argument checks that do not synchronise with the GPU."""

import math
from collections.abc import Callable, Mapping

import torch

from megatron_dsa.errors import ConfigError, require

#: Dtypes that attention accepts; references use fp64.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
#: Maximum characters in the message of a device assert; torch rejects longer ones.
LONGEST_MESSAGE = 254


def require_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor | None = None,
    fix: str = "check the batch that it was made from",
) -> None:
    """Raise a :class:`ConfigError` unless ``x`` fits ``shape``, ``dtypes`` and ``like.device``.

    Args:
        shape: a number per dim, or a name for a dim of any size.
        fix: advice in the message on a wrong shape.
    """
    if (
        isinstance(x, torch.Tensor)
        and x.dtype in dtypes
        and (like is None or x.device == like.device)
        and _has_shape(x, shape)
    ):
        return  # formatting the message costs host time
    wanted = "[" + ", ".join(str(size) for size in shape) + "]"
    require(
        isinstance(x, torch.Tensor),
        f"{name} must be a tensor {wanted}, got {type(x).__name__}: convert it",
    )
    require(_has_shape(x, shape), f"{name} must be {wanted}, got shape {tuple(x.shape)}: {fix}")
    wanted = " or ".join(_short(dtype) for dtype in dtypes)
    require(x.dtype in dtypes, f"{name} must have dtype {wanted}, got {_short(x.dtype)}: cast it")
    require(
        like is None or x.device == like.device,
        f"{name} must be on the device of the other arguments, "
        f"{None if like is None else like.device}, got {x.device}: move it there",
    )


def _has_shape(x: torch.Tensor, shape: tuple[int | str, ...]) -> bool:
    given = x.shape
    if len(given) != len(shape):
        return False
    for size, found in zip(shape, given, strict=True):
        if size != found and not isinstance(size, str):
            return False
    return True


def require_scale(softmax_scale: float) -> None:
    require(
        0 < softmax_scale < math.inf,
        f"softmax_scale must be positive and finite, got {softmax_scale}: pass head_dim**-0.5",
    )


def require_lists(indices: torch.Tensor, q: torch.Tensor, topk_length: torch.Tensor | None) -> None:
    shape = (q.shape[0], "K")
    require_tensor("indices", indices, shape, (torch.int32,), q, "give one list per query token")
    if topk_length is not None:
        fix = "give one length per query token"
        require_tensor("topk_length", topk_length, q.shape[:1], (torch.int32,), q, fix)


def require_sink(attn_sink: torch.Tensor | None, q: torch.Tensor) -> None:
    if attn_sink is not None:
        require_tensor("attn_sink", attn_sink, q.shape[1:2], FLOATS, q, "give one logit per head")


def require_layout(
    layout, queries: Mapping[str, torch.Tensor], keys: Mapping[str, torch.Tensor]
) -> None:
    roles = (("query", layout.num_queries, queries), ("key", layout.num_keys, keys))
    for role, count, tensors in roles:
        for name, x in tensors.items():
            require(
                x.shape[0] == count,
                f"{name} must have the {count} {role} tokens that layout describes, got "
                f"{x.shape[0]}: make the layout for the batch of these tensors",
            )
            require(
                x.device == layout.start.device,
                f"layout must be on the device of {name}, {x.device}, got {layout.start.device}: "
                "make it there",
            )


def require_values(rules: Mapping[str, torch.Tensor], summary: str) -> None:
    held = list(rules.values())
    holds = held[0] if len(held) == 1 else torch.stack(held).all()
    require_on_device(
        holds, summary, lambda: next(message for message, holds in rules.items() if not holds)
    )


def require_on_device(holds: torch.Tensor, summary: str, message: Callable[[], str]) -> None:
    """Raise unless the bool scalar ``holds`` is true; skip meta tensors.

    A GPU raises at its next synchronisation, with 254 characters of ``summary``.
    """
    if holds.device.type == "cpu":
        if not holds:
            raise ConfigError(message())
    elif holds.device.type != "meta":
        torch._assert_async(holds, summary[:LONGEST_MESSAGE])


def require_cu_seqlens(
    cu_seqlens: torch.Tensor,
    padded: torch.Tensor | None,
    tokens: int,
    max_seqlen: int | None,
) -> None:
    fix = "pass cumulative lengths [0, n0, n0 + n1, ...] of at least one sequence"
    require_tensor("cu_seqlens", cu_seqlens, ("sequences + 1",), INTEGERS, fix=fix)
    require(cu_seqlens.numel() > 1, f"cu_seqlens must not be empty: {fix}")
    offsets = cu_seqlens
    if padded is not None:
        offsets = padded
        shape = tuple(cu_seqlens.shape)
        require_tensor("cu_seqlens_padded", padded, shape, INTEGERS, cu_seqlens, fix)
    lengths = cu_seqlens.diff()
    rules = {
        f"cu_seqlens must start at 0: {fix}": (cu_seqlens[0] == 0) & (offsets[0] == 0),
        f"cu_seqlens must never decrease: {fix}": (lengths >= 0).all(),
        f"cu_seqlens must end at or before the {tokens} tokens of the batch: pass the lengths of "
        "its own sequences": offsets[-1] <= tokens,
    }
    if padded is not None:
        message = "cu_seqlens_padded must give every sequence at least its length in cu_seqlens"
        rules[f"{message}: pass both of the same batch"] = (offsets.diff() >= lengths).all()
    if max_seqlen is not None:
        message = "max_seqlen must be at least the longest sequence of cu_seqlens"
        rules[f"{message}, got {max_seqlen}: pass its length, or None"] = (
            lengths.amax() <= max_seqlen
        )
    require_values(
        rules,
        "cu_seqlens (packed_seq_params) must start at 0, never decrease and end within the "
        f"{tokens} tokens; cu_seqlens_padded must leave room for every sequence; max_seqlen "
        f"({max_seqlen}) must be at least the longest",
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
