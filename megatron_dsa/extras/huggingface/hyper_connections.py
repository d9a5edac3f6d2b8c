"""Hyper-connections of DeepSeek-V4 that do nothing: the plain residuals of Megatron's layers.

A V4 layer reads a weighted sum of ``hc_mult`` residual streams, adds its output to each of them
with a weight, and mixes them; all weights are ``f(scale * (fn @ streams) + base)`` with f a sigmoid
for reading, twice a sigmoid for adding, and a doubly stochastic matrix for mixing. With ``scale``
0 and the right ``base``, every layer reads stream 0, adds to stream 0 and mixes nothing.
"""

from collections.abc import Iterator

import torch

from megatron_dsa.extras.huggingface.files import CheckpointReader

#: A sigmoid of it is 1, of its negative 0 in fp32.
_LARGE = 200.0


def _bases(streams: int) -> dict[str, torch.Tensor]:
    mix = torch.full((streams, streams), -_LARGE).fill_diagonal_(_LARGE)
    read = mix[0]
    add = read.clamp(max=0)  # twice a sigmoid of 0
    layer = torch.cat([read, add, mix.flatten()])
    return {"attn": layer, "ffn": layer, "head": read}


def identity(
    streams: int, hidden: int, layers: list[str], heads: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and fp32 tensor of hyper-connections that leave plain residuals.

    Args:
        streams: ``hc_mult``.
        hidden: width of a stream.
        layers: prefixes of the names of layers.
        heads: prefixes of those that read the streams at the end: the model and every
            multi-token-prediction layer.
    """
    bases = _bases(streams)
    places = [(prefix, kind) for prefix in layers for kind in ("attn", "ffn")]
    for prefix, kind in places + [(prefix, "head") for prefix in heads]:
        base = bases[kind]
        yield f"{prefix}hc_{kind}_fn", torch.zeros(len(base), streams * hidden)
        yield f"{prefix}hc_{kind}_base", base
        yield f"{prefix}hc_{kind}_scale", torch.zeros(1 if kind == "head" else 3)


def is_identity(reader: CheckpointReader, names: list[str], streams: int) -> bool:
    """Whether the hyper-connections of a checkpoint, these ``names``, leave plain residuals."""
    bases = _bases(streams)
    for name in names:
        kind, part = name.rsplit("_", 2)[-2:]
        if part == "scale" and reader.read(name).any():
            return False
        if part == "base" and not torch.equal(reader.read(name).float(), bases[kind]):
            return False
    return True
