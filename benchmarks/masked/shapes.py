"""Cases of masked dense attention, the operations that are measured, and their FLOP."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One causal sequence.

    Attributes:
        tokens: of the sequence, queries and keys.
        heads: of one rank.
        nope, rope, v: dims of a key without and with rope, and of a value.
        topk: keys selected per query, as far as it sees so many.
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


#: Measured operation -> the dispatched operation that it runs.
OPERATIONS = {
    "forward": "masked_attention_forward",
    "teacher": "masked_attention_probabilities",
    "backward": "masked_attention_backward",
}
#: Measured operation -> dims per pair of a query and a key: of the products with keys, with values.
PAIR_DIMS = {"forward": (1, 1), "teacher": (1, 0), "backward": (3, 2)}
#: cuDNN's attention through torch, causal, with all visible keys.
PEER = "cudnn-dense"
#: FlashAttention 4, causal, with all visible keys.
FLASH4 = "flash4-dense"
#: Ways that read no mask -> what charts call them.
PEERS = {PEER: "cuDNN without a mask", FLASH4: "FlashAttention 4 without a mask"}


def flops(operation: str, case: Case) -> int:
    """Floating-point operations of one call, counting visible pairs, selected or not."""
    pairs = case.tokens * (case.tokens + 1) // 2
    key, value = PAIR_DIMS[operation]
    return 2 * pairs * case.heads * (key * (case.nope + case.rope) + value * case.v)
