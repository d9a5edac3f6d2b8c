"""Index scores in the fp8 arithmetic of inference engines (DeepGEMM's ``fp8_mqa_logits``).

From bf16 ``q [HI, DI]`` and ``k [DI]`` after rope and Hadamard transform:

1. Each head of ``q``, and ``k``, is a vector ``x`` with the scale ``2^ceil(log2(max(|x|max, 1e-4) /
  448))``; ``x / scale`` is rounded to e4m3, ties to even.
2. The weight of a head is ``w * HI^-1/2 * DI^-1/2`` in fp32, times the scale of its query.
3. ``p[h] = relu(q[h] . k)``. Torch computes it exactly and rounds to fp32; Hopper's tensor cores
  keep fewer bits, as in the engine.
4. Heads are summed in fp32. For ``r`` in 0 to 7, ``s[r]`` accumulates ``w[h] * p[h]`` for ``h =
  r + 8, r, r + 16, r + 24, ...`` by fused multiply-add. With ``t[i] = s[2 i] + s[2 i + 1]`` the
  score is ``((t[0] + t[1]) + (t[2] + t[3]))`` times the scale of ``k``.

Step 4 follows DeepGEMM on SM90: in ``w[r + 8] * p[r + 8] + w[r] * p[r]`` the CUDA compiler rounds
the first product and fuses the second. Only step 3 depends on the device.
"""

from collections.abc import Iterable

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import slices
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8
from megatron_dsa.ops.indexer_topk.fp8 import quantized_by_powers as quantized
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Block, Seen

#: Maximum dims of a vector: engines have one scale per 128 dims.
LARGEST_DIM = 128
SUMS = 8
#: Keys per block: 8 MiB in fp64.
KEYS = 8192


def quantized_queries(q: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q ``[r, HI, DI]`` in fp8, and fp32 weights ``[r, HI]`` times the scales of q."""
    q, scales = quantized(q)
    return q, weights.float() * scales


def check(inputs: IndexerInputs) -> None:
    require(
        inputs.relu,
        f"inputs.relu must be true with indexer_numerics {DEEPGEMM_FP8}: the engines' scores have "
        "a relu",
    )
    require(
        inputs.q.shape[2] <= LARGEST_DIM,
        f"inputs.q must have at most {LARGEST_DIM} dims with indexer_numerics {DEEPGEMM_FP8}, got "
        f"{inputs.q.shape[2]}: engines have one scale per {LARGEST_DIM} dims, and their kernel "
        "takes one",
    )


def fp32_weights(weights: torch.Tensor, dim: int) -> torch.Tensor:
    """Return ``weights [Sq, HI] * HI^-1/2 * dim^-1/2``, each product rounded to fp32."""
    return weights.detach().float() * weights.shape[1] ** -0.5 * dim**-0.5


class Scores:
    def bytes_per_score(self, heads: int, itemsize: int) -> int:
        return SUMS * (8 + 8 + 4 + 4) + 4

    def __call__(
        self, inputs: IndexerInputs, block: Block, keys: torch.Tensor, seen: Seen
    ) -> torch.Tensor:
        assert inputs.key_scales is not None
        q, weights = inputs.q[block.tokens], inputs.weights[block.tokens].double()
        scores = weights.new_empty(len(q), block.width, dtype=torch.float32)
        for some in slices(block.width, KEYS):
            slots = slice(block.lo + some.start, block.lo + some.stop)
            scores[:, some] = _scores(q, weights, keys[slots], inputs.key_scales[slots])
        return scores


def _in_order(groups: Iterable[slice]) -> list[slice]:
    first, *others = groups
    return [*others[:1], first, *others[1:]]


def _scores(q, weights, keys, key_scales) -> torch.Tensor:
    # Products of e4m3 numbers sum exactly in fp64.
    keys = keys.double().t()
    sums = weights.new_zeros(len(q), SUMS, keys.shape[1], dtype=torch.float32)
    for heads in _in_order(slices(q.shape[1], SUMS)):
        part = q[:, heads].double()
        products = (part.flatten(0, 1) @ keys).unflatten(0, part.shape[:2])
        # The product of two fp32 numbers is exact in fp64.
        products = products.float().relu_().double()
        products.mul_(weights[:, heads, None])
        taken = sums[:, : part.shape[1]]
        taken.copy_(products.add_(taken))
    pairs = sums[:, 0::2] + sums[:, 1::2]
    halves = pairs[:, 0::2] + pairs[:, 1::2]
    return (halves[:, 0] + halves[:, 1]).mul_(key_scales)
