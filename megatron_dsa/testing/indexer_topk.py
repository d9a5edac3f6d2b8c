"""Inputs, float64 scores and comparison of index selection, also with engine numerics.

Engine numerics (:mod:`megatron_dsa.ops.indexer_topk.engine`) match bitwise if products are exact.
"""

from dataclasses import replace

import torch

from megatron_dsa.ops.indexer_topk import engine
from megatron_dsa.ops.indexer_topk.fp8 import DTYPE
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, engine_scores, index_scores
from megatron_dsa.ops.layout.layout import Block, Layout, Seen
from megatron_dsa.ops.naive import indexer_topk
from megatron_dsa.testing.cases import Shape, chunks, layout_of_tokens, normal, visible_keys
from megatron_dsa.testing.comparison import LEAST_ENGINE_SHARE, LEAST_RECALL, Comparison


def random_index_inputs(
    shape: Shape, tokens: int, device: torch.device, seed: int = 5
) -> IndexerInputs:
    draw = normal(device, seed)
    scale = shape.index_heads**-0.5 * shape.index_dim**-0.5
    return IndexerInputs(
        draw(tokens, shape.index_heads, shape.index_dim).to(shape.dtype),
        draw(shape.seq, shape.index_dim).to(shape.dtype),
        draw(tokens, shape.index_heads, scale=scale).to(shape.dtype),
    )


def integer_index_inputs(
    shape: Shape, tokens: int, device: torch.device, *, seed: int = 6, span: int = 1, relu=True
) -> IndexerInputs:
    """Draw integers up to ``span``, so that scores are exact and often tie."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size):
        values = torch.randint(-span, span + 1, size, generator=generator, device=device)
        return values.to(shape.dtype)

    return IndexerInputs(
        draw(tokens, shape.index_heads, shape.index_dim),
        draw(shape.seq, shape.index_dim),
        draw(tokens, shape.index_heads),
        relu,
    )


def expected_scores(inputs: IndexerInputs, tokens: torch.Tensor) -> torch.Tensor:
    """Return the float64 index scores ``[len(tokens), Skv]``."""
    k = inputs.k.double()
    per_token = 8 * 3 * inputs.q.shape[1] * len(k)
    return torch.cat([
        index_scores(
            inputs.q[tokens[chunk]].double(), k, inputs.weights[tokens[chunk]].double(), inputs.relu
        )
        for chunk in chunks(len(tokens), per_token)
    ])  # fmt: skip


class SelectionCase:
    """Inputs of one selection, with reference scores and keys of sampled query tokens.

    Layout slots must be key indices.
    """

    least_recall = LEAST_RECALL

    def __init__(self, inputs: IndexerInputs, layout: Layout, tokens: torch.Tensor, topk: int):
        self.inputs, self.layout, self.tokens, self.topk = inputs, layout, tokens, topk
        self.scores = self.right_scores()
        self.visible = visible_keys(layout, tokens)
        self.best = indexer_topk(self.scores, self.visible, topk)

    def right_scores(self) -> torch.Tensor:
        return expected_scores(self.inputs, self.tokens)

    def selected(self, found: Comparison, indices, length) -> torch.Tensor:
        """Check that lists are valid; return a mask of listed keys, ``[len(tokens), Skv]``."""
        indices, length = indices[self.tokens].long(), length[self.tokens].long()
        listed = torch.arange(self.topk, device=indices.device) < length[:, None]
        wanted = self.visible.sum(-1).clamp_max(self.topk)
        found.require((length == wanted).all(), "wrong number of selected keys")
        found.require(
            ((indices >= 0) == listed).all() and (indices[~listed] == -1).all(),
            "the list is no prefix of keys followed by -1",
        )
        rising = (indices[:, 1:] > indices[:, :-1]) | ~listed[:, 1:]
        found.require(rising.all(), "keys are not distinct and ascending")
        in_range = (indices >= 0) & (indices < self.layout.num_keys)
        found.require(in_range[listed].all(), "a selected key does not exist")
        spare = self.layout.num_keys
        chosen = torch.zeros(len(indices), spare + 1, dtype=torch.bool, device=indices.device)
        chosen.scatter_(1, torch.where(listed & in_range, indices, spare), True)
        chosen = chosen[:, :spare]
        found.require(not (chosen & ~self.visible).any(), "an invisible key is selected")
        return chosen

    def compare_exactly(self, what: str, found: Comparison, indices, length) -> None:
        """Compare a selection from exact scores, which has one right answer."""
        chosen = self.selected(found, indices, length)
        found.require((chosen == self.best).all(), f"{what}: not the best keys, smallest first")

    def compare(self, found: Comparison, indices, length) -> None:
        """Compare a selection from rounded scores, which may swap near-ties.

        ``score shortfall``: lowest score of the best keys minus lowest selected score, relative to
        the root mean square of visible scores. ``score inversion``: highest rejected minus lowest
        selected score, relative to the largest.
        """
        chosen = self.selected(found, indices, length)
        missed = (self.best & ~chosen).sum() / self.best.sum().clamp_min(1)
        recall = 1.0 - float(missed)
        found.figures["recall"] = min(recall, found.figures.get("recall", 1.0))
        found.require(recall >= self.least_recall, f"recall {recall:.4f} < {self.least_recall}")
        infinity = float("inf")
        bar = self.scores.masked_fill(~self.best, infinity).amin(-1)
        least = self.scores.masked_fill(~(chosen & self.visible), infinity).amin(-1)
        some = self.best.any(-1) & (least < infinity)
        size = (self.scores.square() * self.visible).sum(-1) / self.visible.sum(-1).clamp_min(1)
        rejected = self.scores.masked_fill(chosen | ~self.visible, -infinity).amax(-1)
        largest = (self.scores.abs() * self.visible).amax(-1)
        for name, gap, unit in (
            ("score shortfall", bar - least, size.sqrt()),
            ("score inversion", rejected - least, largest),
        ):
            # relu can cut all scores to 0.
            gaps = (gap / torch.where(unit > 0, unit, 1.0))[some].clamp_min(0)
            found.keep_worst(name, float(gaps.max()) if some.any() else 0.0)


def exact_products(shape: Shape, tokens: int, device: torch.device) -> IndexerInputs:
    """Draw inputs whose products are exact on tensor cores, but not their weighted sums."""
    whole = integer_index_inputs(shape, tokens, device, span=2)
    return replace(whole, weights=normal(device, 7)(tokens, shape.index_heads).float())


class EngineCase(SelectionCase):
    least_recall = LEAST_ENGINE_SHARE

    def right_scores(self) -> torch.Tensor:
        x = self.inputs
        per_token = 8 * 12 * len(x.k)
        return torch.cat([
            engine_scores(x.q[self.tokens[chunk]], x.k, x.weights[self.tokens[chunk]])
            for chunk in chunks(len(self.tokens), per_token)
        ])  # fmt: skip

    def arguments(self) -> tuple[IndexerInputs, Block, torch.Tensor, Seen]:
        x, layout = self.inputs, layout_of_tokens(self.layout, self.tokens)
        q, weights = engine.quantized_queries(x.q[self.tokens], x.weights[self.tokens])
        k, scales = engine.quantized(x.k)
        assert q.dtype == DTYPE
        (block,) = layout.blocks(lambda width: layout.num_queries)
        return IndexerInputs(q, k, weights, key_scales=scales), block, k, layout.seen(block)

    def seen_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Set scores of invisible keys, which are undefined, to 0."""
        return torch.where(self.visible[:, : scores.shape[1]], scores, 0)

    def compare_scores(self, found: Comparison, scores: torch.Tensor) -> None:
        found.compare("engine scores", scores, self.seen_scores(self.scores))

    def compare_bits(self, found: Comparison, scores: torch.Tensor) -> None:
        same = (scores == self.seen_scores(self.scores)).all()
        found.require(same, "exact products are not added up in the order of the rule")
