"""Scores and selections in the arithmetic of inference engines, and the comparison with its rule.

The rule (:mod:`megatron_dsa.ops.indexer_topk.engine`) says how every step rounds. An
implementation must follow it to the bit where its products are exact, and may differ by the bits
that tensor cores do not keep where they are not.
"""

from dataclasses import replace

import torch

from megatron_dsa.ops.indexer_topk import engine
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, engine_scores
from megatron_dsa.ops.layout.blocks import Block, Seen
from megatron_dsa.testing.comparison import Comparison
from megatron_dsa.testing.indexer_topk import SelectionCase, integer_index_inputs
from megatron_dsa.testing.layouts import chunks, layout_of_tokens
from megatron_dsa.testing.shapes import Shape
from megatron_dsa.testing.sparse_attention import normal
from megatron_dsa.testing.tolerances import LEAST_ENGINE_SHARE


def exact_products(shape: Shape, tokens: int, device: torch.device) -> IndexerInputs:
    """Draw queries and keys whose products tensor cores form exactly, and weights that round."""
    whole = integer_index_inputs(shape, tokens, device, span=2)
    return replace(whole, weights=normal(device, 7)(tokens, shape.index_heads).float())


class EngineCase(SelectionCase):
    """Inputs of one selection with the rule's scores and keys for some query tokens."""

    least_recall = LEAST_ENGINE_SHARE

    def right_scores(self) -> torch.Tensor:
        x = self.inputs
        per_token = 8 * 12 * len(x.k)  # eight sums, products, and what is made of them
        return torch.cat([
            engine_scores(x.q[self.tokens[chunk]], x.k, x.weights[self.tokens[chunk]])
            for chunk in chunks(len(self.tokens), per_token)
        ])  # fmt: skip

    def arguments(self) -> tuple[IndexerInputs, Block, torch.Tensor, Seen]:
        """Return the arguments of ``indexer_engine_scores`` for the query tokens."""
        x, layout = self.inputs, layout_of_tokens(self.layout, self.tokens)
        q, weights = engine.quantized_queries(x.q[self.tokens], x.weights[self.tokens])
        k, scales = engine.quantized(x.k)
        assert q.dtype == DTYPE
        (block,) = layout.blocks(lambda width: layout.num_queries)
        return IndexerInputs(q, k, weights, key_scales=scales), block, k, layout.kept_seen(block)

    def seen_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of a block, 0 where a query sees no key: memory may hold anything."""
        return torch.where(self.visible[:, : scores.shape[1]], scores, 0)

    def compare_scores(self, found: Comparison, scores: torch.Tensor) -> None:
        """Compare :meth:`seen_scores` that round otherwise than the rule's."""
        found.compare("engine scores", scores, self.seen_scores(self.scores))

    def compare_bits(self, found: Comparison, scores: torch.Tensor) -> None:
        """Compare :meth:`seen_scores` of exact products: the sums must be the rule's to the bit."""
        same = (scores == self.seen_scores(self.scores)).all()
        found.require(same, "exact products are not added up in the order of the rule")
