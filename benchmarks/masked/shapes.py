"""Cases of masked dense attention, measured operations, FLOP."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One causal sequence.

    Attributes:
        tokens: of the sequence, queries and keys.
        heads: of one rank.
        nope, rope, v: dims of a key without and with rope, and of a value.
        topk: keys selected per query, at most all visible ones.
        distribution: ``random`` or ``clustered:SHARE``.
        workspace_mib: budget of the implementations.
    """

    tokens: int
    heads: int = 128
    nope: int = 128
    rope: int = 64
    v: int = 128
    topk: int = 2048
    distribution: str = "random"
    workspace_mib: int = 256


#: Measured operation -> dispatched operation.
OPERATIONS = {
    "forward": "masked_attention_forward",
    "teacher": "masked_attention_probabilities",
    "backward": "masked_attention_backward",
}
#: Measured operation -> products with keys, with values, per pair.
PAIR_DIMS = {"forward": (1, 1), "teacher": (1, 0), "backward": (3, 2)}
#: cuDNN's attention through torch, causal, all visible keys.
PEER = "cudnn-dense"
#: FlashAttention 4, causal, all visible keys.
FLASH4 = "flash4-dense"
#: Ways without a mask -> label in charts.
PEERS = {PEER: "cuDNN without a mask", FLASH4: "FlashAttention 4 without a mask"}


def flops(operation: str, case: Case) -> int:
    """Return the floating-point operations of one call, counting visible pairs."""
    pairs = case.tokens * (case.tokens + 1) // 2
    key, value = PAIR_DIMS[operation]
    return 2 * pairs * case.heads * (key * (case.nope + case.rope) + value * case.v)
