"""The grid of shapes that the user asked for."""

import argparse
from itertools import product

import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.testing.cases import Shape

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Fewer would leave no room for the tokens and keys that are made difficult on purpose.
MINIMUM = {"seq": 64, "rows": 16}
_SWITCH = {"off": (False,), "on": (True,), "both": (False, True)}


def shapes_from(arguments: argparse.Namespace) -> list[Shape]:
    """Return the grid of shapes that the arguments ask for.

    Raises:
        ConfigError: for a sequence or a number of rows that is too short to check anything.
    """
    for name, minimum in MINIMUM.items():
        if getattr(arguments, name) < minimum:
            raise ConfigError(
                f"--{name} must be at least {minimum}, got {getattr(arguments, name)}: some rows "
                "and keys are made invalid on purpose, and the others must carry the check."
            )
    qk_dim, v_dim = arguments.dims
    return [
        Shape(
            heads=heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
            index_heads=arguments.index_heads,
            index_dim=arguments.index_dim,
            topk=topk,
            seq=arguments.seq,
            rows=min(arguments.rows, arguments.seq),
            packed=packed,
            sink=sink,
            dtype=_DTYPES[arguments.dtype],
        )
        for heads, topk, packed, sink in product(
            arguments.heads, arguments.topk, _SWITCH[arguments.packed], _SWITCH[arguments.sink]
        )
    ]
