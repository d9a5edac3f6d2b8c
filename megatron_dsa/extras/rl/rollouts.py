"""Rollout engines' records of selections and routed experts (SGLang, vLLM).

Formats: ``docs/guide/replay.md``. Engines do not record a sequence's last sampled token; no loss
depends on its keys or experts, so functions here fill them in.
"""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from megatron_dsa.config.hybrid import attention_layers, attention_number
from megatron_dsa.config.model import selects_keys, uses_csa
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.errors import ConfigError, require

Field = Literal["indexer_topk", "routed_experts"]
Engine = Literal["sglang", "vllm"]
_FLAGS = {
    "indexer_topk": "--enable-return-indexer-topk",
    "routed_experts": "--enable-return-routed-experts",
}
_DTYPES = ("int32", "uint16", "uint8")


@dataclass(frozen=True)
class EngineRecord:
    """An engine's record of one sequence.

    Attributes:
        values: int32 ``[tokens, layers, K]``: positions of keys within the sequence (V4: groups),
            ``-1`` for none, or expert ids.
        start: position of the first recorded token.
    """

    values: torch.Tensor
    start: int = 0


def read_sglang(
    response: Mapping[str, Any], field: Field, layers: int, width: int, start: int = 0
) -> EngineRecord:
    """Read a record from the JSON of SGLang's ``/generate``.

    ``meta_info`` holds base64 of int32 (experts: of the named dtype), token by token.

    Args:
        response: of one sequence.
        field: recorded quantity.
        layers: number in the record, see :func:`record_layers`; experts: all layers of the model.
        width: keys per query (``index_topk`` of ``config.json``), or experts per token.
        start: ``routed_experts_start_len`` of the request.

    Raises:
        ConfigError: the record is missing or has another size.
    """
    meta = response.get("meta_info") or {}
    name = meta.get(f"{field}_dtype") or "int32"
    require(
        name in _DTYPES,
        f"meta_info.{field}_dtype must be one of {', '.join(_DTYPES)}, got {name!r}",
    )
    data, itemsize = _decoded(meta, field, "meta_info"), np.dtype(name).itemsize
    require(
        len(data) % (layers * width * itemsize) == 0,
        f"meta_info.{field} must hold {layers} layers of {width} entries ({name}) for every token, "
        f"got {len(data)} bytes: give the layers and the width of the model that ran",
    )
    values = np.frombuffer(data, dtype=name).reshape(-1, layers, width)
    return EngineRecord(_int32(values, f"meta_info.{field}"), start)


def read_vllm(choice: Mapping[str, Any], field: Field, start: int = 0) -> EngineRecord:
    """Read a record from one of the ``choices`` of vLLM's JSON.

    The entry holds base64 of a ``.npy`` file ``[tokens, layers, K]``.

    Args:
        choice: of one sequence.
        field: recorded quantity.
        start: ``routed_experts_prompt_start`` or ``indexer_topk_prompt_start`` of the request.

    Raises:
        ConfigError: the record is missing or not such an array.
    """
    try:
        data = np.load(io.BytesIO(_decoded(choice, field, "choice")), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(
            f"choice.{field} must be base64 of a .npy file, got something else ({error}): give the "
            "choice as the server returned it"
        ) from None
    require(
        data.ndim == 3 and np.issubdtype(data.dtype, np.integer),
        f"choice.{field} must be integers [tokens, layers, K], got {data.dtype} {data.shape}",
    )
    return EngineRecord(_int32(data, f"choice.{field}"), start)


def _decoded(holder: Mapping[str, Any], field: Field, name: str) -> bytes:
    text: Any = holder.get(field)
    require(
        isinstance(text, str),
        f"{name}.{field} is missing: start the server with {_FLAGS[field]}, and ask for it in the "
        f"request (SGLang: return_{field})",
    )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ConfigError(
            f"{name}.{field} must be base64, got something else ({error}): give the text as the "
            "server returned it"
        ) from None


def _int32(data: np.ndarray, name: str) -> torch.Tensor:
    bounds = np.iinfo(np.int32)
    least, most = (int(data.min()), int(data.max())) if data.size else (0, 0)
    require(
        least >= bounds.min and most <= bounds.max,
        f"{name} must hold numbers of 32 bits, got {least if least < bounds.min else most}: give "
        "the record as the server returned it",
    )
    return torch.from_numpy(data.astype(np.int32))


def selecting_layers(config: Any) -> list[int]:
    """Return the numbers, from 1, of the decoder layers that select keys."""
    numbers = attention_layers(config)
    if uses_csa(config):
        return [number for number in numbers if config.ratio(number) == CSA_RATIO]
    return [number for number in numbers if selects_keys(config, number)]


def record_layers(config: Any, engine: Engine) -> tuple[int, dict[int, int]]:
    """Return the number of layers in a selection record, and selecting layer -> column.

    SGLang records every layer of V3.2 and GLM-5, including those that reuse a selection, and for V4
    the layers of ratio 4. vLLM records the layers with an indexer.
    """
    require(engine in ("sglang", "vllm"), f"engine must be sglang or vllm, got {engine!r}")
    layers = selecting_layers(config)
    if engine == "sglang" and not uses_csa(config):
        columns = {number: attention_number(config, number) - 1 for number in layers}
        return len(attention_layers(config)), columns
    return len(layers), {number: column for column, number in enumerate(layers)}


def selections_of(
    records: Sequence[EngineRecord],
    lengths: Sequence[int],
    columns: Mapping[int, int],
    *,
    padded_lengths: Sequence[int] | None = None,
    alternating: bool = False,
    ratio: int = 1,
) -> dict[int, torch.Tensor]:
    """Convert records to a microbatch for :class:`~megatron_dsa.extras.rl.replay.IndexReplay`.

    Args:
        records: selections, one record per sequence, from the first token on.
        lengths: tokens of each sequence, including the last sampled one.
        columns: layer number -> column, see :func:`record_layers`.
        padded_lengths: lengths including the padding after each packed sequence.
        alternating: an unpacked microbatch ``[s, b]``, sequences alternating token by token.
        ratio: positions per key, 4 for V4.

    Returns:
        layer number -> int32 ``[tokens, K]``. A sequence's last token gets its latest visible keys;
            padding has none.

    Raises:
        ConfigError: token or layer counts of a record do not match.
    """

    def last(record: torch.Tensor, length: int) -> torch.Tensor:
        seen, width = length // ratio, record.shape[2]
        keys = torch.full((width,), -1, dtype=torch.int32)
        latest = torch.arange(max(seen - width, 0), seen, dtype=torch.int32)
        keys[: len(latest)] = latest
        return keys.expand(1, record.shape[1], width)

    whole = list(_whole(records, lengths, padded_lengths, last))
    return _by_layer(whole, columns, alternating)


def experts_of(
    records: Sequence[EngineRecord],
    lengths: Sequence[int],
    columns: Mapping[int, int],
    *,
    padded_lengths: Sequence[int] | None = None,
    alternating: bool = False,
) -> dict[int, torch.Tensor]:
    """Convert records to a microbatch's experts: layer number -> int64 ``[tokens, experts]``.

    ``RouterReplay.set_replay_data`` takes a list of these (``--moe-enable-routing-replay``).
    Arguments and errors: :func:`selections_of`. A sequence's last token and padding get the first
    experts.
    """

    def first(record: torch.Tensor, _length: int) -> torch.Tensor:
        experts = torch.arange(record.shape[2], dtype=torch.int32)
        return experts.expand(1, record.shape[1], -1)

    whole = [
        torch.where(x < 0, torch.arange(x.shape[2], dtype=torch.int32), x)
        for x in _whole(records, lengths, padded_lengths, first)
    ]
    return {layer: x.long() for layer, x in _by_layer(whole, columns, alternating).items()}


def _whole(records, lengths, padded_lengths, last) -> Iterator[torch.Tensor]:
    """Yield each sequence's record ``[padded length, layers, K]``, -1 padded."""
    padded = list(lengths if padded_lengths is None else padded_lengths)
    require(
        len(records) == len(lengths) == len(padded),
        "records, lengths and padded_lengths must have one entry per sequence, got "
        f"{len(records)}, {len(lengths)} and {len(padded)}",
    )
    for i, (record, length, total) in enumerate(zip(records, lengths, padded, strict=True)):
        values, known = record.values, len(record.values)
        require(
            record.start == 0,
            f"records[{i}] must begin with the first token, got start {record.start}: ask the "
            "engine for all tokens, or join it with the record of the tokens before",
        )
        require(
            known in (length - 1, length) and total >= length,
            f"records[{i}] must have {length - 1} or {length} tokens for a sequence of {length} "
            f"tokens (padded to {total}), got {known}: give the lengths of prompt and answer "
            "together",
        )
        parts = [values] if known == length else [values, last(values, length)]
        parts.append(values.new_full((total - length, *values.shape[1:]), -1))
        yield torch.cat(parts)


def _by_layer(
    whole: list[torch.Tensor], columns: Mapping[int, int], alternating: bool
) -> dict[int, torch.Tensor]:
    shapes = {x.shape[1:] for x in whole}
    require(len(shapes) == 1, f"records must agree in layers and width, got {sorted(shapes)}")
    layers = next(iter(shapes))[0]
    require(
        all(0 <= column < layers for column in columns.values()),
        f"columns must be below the {layers} layers of the records, got {dict(columns)}: see "
        "record_layers",
    )
    if alternating:
        require(
            len({len(x) for x in whole}) == 1,
            "records of an unpacked microbatch must have equal lengths: pad the sequences",
        )
        joined = torch.stack(whole, 1).flatten(0, 1)
    else:
        joined = torch.cat(whole)
    return {layer: joined[:, column].contiguous() for layer, column in columns.items()}
