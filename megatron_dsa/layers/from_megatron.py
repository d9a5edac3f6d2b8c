"""Token layout of a Megatron microbatch, and check of its attention mask."""

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.common.capture import capturing, tensor_cache
from megatron_dsa.ops.common.checks import require_on_device, require_values
from megatron_dsa.ops.layout.layout import Layout, bshd_layout, packed_layout
from megatron_dsa.ops.layout.sharding import (
    KeyOwnership,
    Sharding,
    global_positions_of,
    sharded_layout,
)

_MASK_RULE = (
    "attention_mask must be None, or bool [..., s, s] and causal (True above the diagonal only): "
    "attention is causal within each sequence"
)
_MASK_FIX = "pass None, and describe documents and padding by packed_seq_params (qkv_format='thd')"
#: Number of mask elements per comparison, which bounds temporary memory.
_MASK_BLOCK = 1 << 24


def layout_from_megatron(
    tokens: int,
    batch: int,
    device: torch.device,
    packed_seq_params=None,
    keys: Sharding | None = None,
    queries: Sharding | None = None,
) -> Layout:
    """Return the cached token layout of a Megatron microbatch.

    Args:
        tokens: dim 0 of the local hidden states ``[s, b, hidden]``.
        batch: micro-batch size; 1 for packed batches.
        packed_seq_params: Megatron's, with ``qkv_format == "thd"`` and lengths over all ranks.
        keys: sharding of hidden states and keys; by default none.
        queries: sharding of query tokens, by default like the keys.

    Raises:
        ConfigError: unsupported packed parameters.
    """
    keys = Sharding() if keys is None else keys
    queries = keys if queries is None else queries
    total = tokens * keys.ranks
    if packed_seq_params is None:
        return _unpacked(total, batch, device, keys, queries)
    # All layers of a microbatch share one layout.
    cached = packed_seq_params.__dict__.setdefault("_megatron_dsa_layouts", {})
    # CUDA graphs share no cached layout: each replay recomputes its layout.
    key = (total, keys, queries, capturing())
    if key not in cached:
        _check_packed(packed_seq_params, total, batch, keys)
        cached[key] = _packed(total, packed_seq_params, keys, queries)
    return cached[key]


@tensor_cache(16)
def _unpacked(total: int, batch: int, device, keys: Sharding, queries: Sharding) -> Layout:
    layout = bshd_layout(total, batch, device)
    if keys.ranks == 1:
        return layout
    table = global_positions_of(keys, total, device)
    return sharded_layout(layout, queries, KeyOwnership(keys, table, batch))


def forget_layouts() -> None:
    _unpacked.cache_clear()
    bshd_layout.cache_clear()


def _packed(total: int, packed_seq_params, keys: Sharding, queries: Sharding) -> Layout:
    max_seqlen = packed_seq_params.max_seqlen_q
    padded = packed_seq_params.cu_seqlens_q_padded
    layout = packed_layout(
        packed_seq_params.cu_seqlens_q,
        total,
        # Reading a length from the device would synchronise.
        max_seqlen if isinstance(max_seqlen, int) else None,
        padded,
    )
    if keys.ranks == 1:
        return layout
    offsets = packed_seq_params.cu_seqlens_q if padded is None else padded
    if keys.cp > 1 and keys.cp_layout == "zigzag":
        rule = (
            "packed_seq_params: with the zigzag layout the (padded) length of every sequence must "
            f"be a multiple of 2 * context-parallel size = {2 * keys.cp}: pad the sequences, or "
            "use --dsa-cp-layout zigzag_rows"
        )
        require_values({rule: (offsets % (2 * keys.cp) == 0).all()}, rule)
    table = keys.global_positions(total, offsets, layout.start.device)
    return sharded_layout(layout, queries, KeyOwnership(keys, table, 1))


def _check_packed(packed_seq_params, total: int, batch: int, keys: Sharding) -> None:
    require(
        packed_seq_params.qkv_format == "thd",
        f"packed_seq_params.qkv_format must be 'thd', got {packed_seq_params.qkv_format!r}; "
        "pass packed_seq_params=None for unpacked batches.",
    )
    cu_seqlens = packed_seq_params.cu_seqlens_q
    if cu_seqlens is None or cu_seqlens.numel() < 2:
        raise ConfigError(
            "packed_seq_params.cu_seqlens_q must hold the cumulative sequence lengths as an int32 "
            f"tensor [sequences + 1] with at least one sequence, got {cu_seqlens}."
        )
    require(
        batch == 1,
        f"packed batches must have micro-batch size 1, got {batch}: pack the sequences into one "
        "row of tokens.",
    )
    _check_other_fields(packed_seq_params, total, keys)


def _check_other_fields(params, total: int, keys: Sharding) -> None:
    for field in ("local_cp_size", "cp_group"):
        value = getattr(params, field, None)
        given = value if value is None or isinstance(value, int) else value.size()
        require(
            given in (None, keys.cp),
            f"packed_seq_params.{field} must be of the context-parallel size ({keys.cp}), got "
            f"{given}: drop --hybrid-context-parallel, which is not supported",
        )
    samples = getattr(params, "tokens_per_sample", None)
    require(
        samples is None or samples == total or (keys.ranks == 1 and 0 < samples < total),
        f"packed_seq_params.tokens_per_sample must be None, or the {total} tokens of the batch, "
        f"with tensor or context parallelism, got {samples}: Megatron cuts the tokens of each rank "
        "by it. Use one sample per microbatch"
        if keys.ranks > 1
        else f"packed_seq_params.tokens_per_sample must be None or from 1 to {total}, the tokens "
        f"of the batch, got {samples}: pass the length of a sample",
    )
    require(
        samples is None or total % samples == 0,
        f"packed_seq_params.tokens_per_sample must divide the {total} tokens of the batch, got "
        f"{samples}: pass the length of a sample",
    )
    padded = getattr(params, "cu_seqlens_q_padded", None)
    for ours, theirs in (
        ("cu_seqlens_q", "cu_seqlens_kv"),
        ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    ):
        queries, keys_of = getattr(params, ours, None), getattr(params, theirs, None)
        if keys_of is None or keys_of is queries:
            continue
        rule = (
            f"packed_seq_params.{theirs} must be None or equal {ours}: queries attend to their "
            "own sequences; pass the same lengths for both"
        )
        require(queries is not None and keys_of.shape == queries.shape, rule)
        require_values({rule: (keys_of == queries).all()}, rule)
    between = getattr(params, "pad_between_seqs", None)
    require(
        not between or padded is not None,
        "packed_seq_params.cu_seqlens_q_padded must be given with pad_between_seqs=True, got None: "
        "pass the cumulative padded lengths",
    )
    if between is False and padded is not None and padded is not params.cu_seqlens_q:
        rule = (
            "packed_seq_params.pad_between_seqs must not be False where cu_seqlens_q_padded "
            "differs from cu_seqlens_q: pass True or None"
        )
        require_values({rule: (padded == params.cu_seqlens_q).all()}, rule)


def require_causal_mask(
    mask: torch.Tensor | None, tokens: int, sharding: Sharding, packed: bool
) -> None:
    """Reject attention masks that are not causal, on a GPU by a device assert.

    ``mask [..., q, k]`` is True where a key is hidden. ``q`` covers all tokens or one
    context-parallel rank's, ``k`` a sequence (a sample if ``packed``), ``tokens`` a whole sequence.
    """
    # The mask was checked before CUDA graph capture.
    if mask is None or capturing():
        return
    version = None if mask.is_inference() else mask._version  # inference tensors count no versions
    if version is not None and getattr(mask, "_megatron_dsa_causal", None) == version:
        return
    shape = tuple(mask.shape)
    queries, keys = shape[-2:] if len(shape) > 1 else (0, 0)
    right = keys > 0 and (tokens % keys == 0 if packed else keys == tokens)
    cut = sharding.cp > 1 and queries * sharding.cp == keys
    require(
        mask.dtype == torch.bool and right and (queries == keys or cut),
        f"{_MASK_RULE}; got {str(mask.dtype).removeprefix('torch.')} {list(shape)} for {tokens} "
        f"tokens: {_MASK_FIX}",
    )
    if mask.device.type != "meta" and not (cut and packed):
        positions = torch.arange(queries, device=mask.device)
        if cut:
            table = global_positions_of(sharding.whole(), keys, mask.device)
            positions = table[sharding.cp_rank]
        holds = _is_causal(mask, positions)
        require_on_device(
            holds, f"{_MASK_RULE}: {_MASK_FIX}", lambda: f"{_MASK_RULE}, got another: {_MASK_FIX}"
        )
    mask._megatron_dsa_causal = version  # type: ignore[attr-defined]


def _is_causal(mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    keys = torch.arange(mask.shape[-1], device=mask.device)
    count = max(_MASK_BLOCK // max(mask[..., :1, :].numel(), 1), 1)
    held = [
        (part == (keys > at[:, None])).all()
        for part, at in zip(mask.split(count, -2), positions.split(count), strict=True)
    ]
    return torch.stack(held).all()
