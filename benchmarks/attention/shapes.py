"""Shapes of the models' sparse attention, measured operations, FLOP."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """The attention of one sparse layer.

    Attributes:
        heads: query heads of one rank.
        qk_dim, v_dim: dims of a query (and key) and of a value.
        topk: keys selected per query.
        softmax_scale: factor on ``q . k``.
        sink: the softmax has a learned sink per head.
    """

    heads: int
    qk_dim: int
    v_dim: int
    topk: int
    softmax_scale: float
    sink: bool = False


_V32 = Preset(128, 576, 512, 2048, 192**-0.5)
PRESETS = {
    "v3.2": _V32,
    # V3.2 with 2, 4 and 8 tensor-parallel ranks.
    "v3.2-h64": replace(_V32, heads=64),
    "v3.2-h32": replace(_V32, heads=32),
    "v3.2-h16": replace(_V32, heads=16),
    # V4's lists: a window of 128 keys and 512 or 1024 compressed keys.
    "v4-flash": Preset(64, 512, 512, 640, 512**-0.5, sink=True),
    "v4-pro": Preset(128, 512, 512, 1152, 512**-0.5, sink=True),
    # No rope; pools of 4 tokens and the 3 of an unfinished one.
    "glm-5.3": Preset(64, 512, 512, 2051, 256**-0.5),
    # The shape of cuDNN front end's published table.
    "h64-d512": Preset(64, 512, 512, 2048, 512**-0.5),
    # For trying the benchmark itself on any machine.
    "tiny": Preset(4, 48, 32, 16, 48**-0.5, sink=True),
}
DEFAULT_PRESETS = ("v3.2", "v3.2-h64", "v3.2-h32", "v3.2-h16", "v4-flash", "v4-pro")

#: Measured operation -> dispatched operation.
OPERATIONS = {
    "forward": "sparse_attention_forward",
    "teacher": "sparse_attention_probabilities",
    "backward": "sparse_attention_backward",
}


def flops(operation: str, preset: Preset, queries: int) -> int:
    """Return the floating-point operations of one call, counting selected keys only."""
    p, selected = preset, 2 * queries * preset.topk
    counts = {
        "forward": selected * p.heads * (p.qk_dim + p.v_dim),
        "backward": selected * p.heads * (3 * p.qk_dim + 2 * p.v_dim),
        "teacher": selected * p.heads * p.qk_dim,
    }
    return counts[operation]
