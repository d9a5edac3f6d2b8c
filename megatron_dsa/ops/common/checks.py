"""Checks of arguments: shapes, dtypes and devices on the host, values without waiting for a device.

Sizes cost no time and are checked in every public operation. Values are checked once, where a
layout is made of them: an operation that is given a layout can rely on it.
"""

import math
from collections.abc import Callable, Mapping

import torch

from megatron_dsa.errors import ConfigError, require

#: What attention is computed in; fp64 serves as a reference.
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
#: What the device takes of a message; a longer one raises.
LONGEST_MESSAGE = 254


def require_tensor(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor | None = None,
    fix: str = "check the batch that it was made from",
) -> None:
    """Raise unless ``x`` is a tensor of this shape, one of these dtypes, on the device of ``like``.

    Args:
        name: of the argument, for the message.
        shape: a size, or the name of a dim that may have any size.
        fix: what to do about a wrong shape.

    Raises:
        ConfigError: names the argument, the rule and the fix.
    """
    if (
        isinstance(x, torch.Tensor)
        and x.dtype in dtypes
        and (like is None or x.device == like.device)
        and _has_shape(x, shape)
    ):
        return  # before any message is put together
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
    return len(given) == len(shape) and all(
        size == own or isinstance(size, str) for size, own in zip(shape, given, strict=True)
    )


def require_scale(softmax_scale: float) -> None:
    """Raise a :class:`ConfigError` unless the factor on ``q . k`` is positive and finite."""
    require(
        0 < softmax_scale < math.inf,
        f"softmax_scale must be positive and finite, got {softmax_scale}: pass head_dim**-0.5",
    )


def require_lists(indices: torch.Tensor, q: torch.Tensor, topk_length: torch.Tensor | None) -> None:
    """Raise a :class:`ConfigError` unless there is an int32 list of keys per query token."""
    shape = (q.shape[0], "K")
    require_tensor("indices", indices, shape, (torch.int32,), q, "give one list per query token")
    if topk_length is not None:
        fix = "give one length per query token"
        require_tensor("topk_length", topk_length, q.shape[:1], (torch.int32,), q, fix)


def require_layout(
    layout, queries: Mapping[str, torch.Tensor], keys: Mapping[str, torch.Tensor]
) -> None:
    """Raise unless a layout describes as many query and key tokens as these tensors have.

    Args:
        layout: the :class:`~megatron_dsa.ops.layout.layout.Layout` of a call.
        queries: tensors with one entry per query token, by the name of their argument.
        keys: the same per key token.

    Raises:
        ConfigError: a size or a device differs.
    """
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
    """Raise if a rule does not hold: on the CPU at once, on a GPU at its next synchronisation.

    Args:
        rules: message -> bool scalar on the device. Nothing is checked on the meta device.
        summary: message of a GPU, which does not tell the rules apart; 254 characters of it.

    Raises:
        ConfigError: on the CPU, with the message of the first rule that does not hold.
    """
    held = list(rules.values())
    holds = held[0] if len(held) == 1 else torch.stack(held).all()
    require_on_device(
        holds, summary, lambda: next(message for message, holds in rules.items() if not holds)
    )


def require_on_device(holds: torch.Tensor, summary: str, message: Callable[[], str]) -> None:
    """Raise unless ``holds``: on the CPU at once, on a GPU at its next synchronisation.

    Args:
        holds: bool scalar on the device. Nothing is checked on the meta device.
        summary: message of a GPU; 254 characters of it.
        message: returns the message of the CPU; called only if that raises.

    Raises:
        ConfigError: on the CPU.
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
    """Raise unless cumulative lengths describe sequences within a packed batch.

    Args:
        cu_seqlens: int ``[n + 1]``, cumulative real lengths.
        padded: the same with the padding behind each sequence, ``None`` if there is none.
        tokens: of the packed batch; those behind the last sequence are padding.
        max_seqlen: bound of the real lengths, ``None`` for none.

    Raises:
        ConfigError: for shapes and dtypes; on the CPU for values, too (see :func:`require_values`).
    """
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
