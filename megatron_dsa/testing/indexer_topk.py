"""Index selection: inputs of a call, float64 scores, and the comparison of a selection."""

import torch

from megatron_dsa.ops.indexer_topk.spec import IndexerInputs, index_scores
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.testing.comparison import Comparison
from megatron_dsa.testing.layouts import chunks, visible_keys
from megatron_dsa.testing.shapes import Shape
from megatron_dsa.testing.sparse_attention import normal
from megatron_dsa.testing.tolerances import LEAST_RECALL


def random_index_inputs(
    shape: Shape, tokens: int, device: torch.device, seed: int = 5
) -> IndexerInputs:
    """Draw index queries of ``tokens`` tokens over ``shape.seq`` keys."""
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
    """Draw whole numbers up to ``span``: scores are exact in any order of sums, ties abound."""
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
    """Return the float64 index scores ``[len(tokens), Skv]`` of some query tokens."""
    k = inputs.k.double()
    per_token = 8 * 3 * inputs.q.shape[1] * len(k)
    return torch.cat([
        index_scores(
            inputs.q[tokens[chunk]].double(), k, inputs.weights[tokens[chunk]].double(), inputs.relu
        )
        for chunk in chunks(len(tokens), per_token)
    ])  # fmt: skip


def best_keys(scores: torch.Tensor, visible: torch.Tensor, topk: int) -> torch.Tensor:
    """Return bool ``[r, Skv]``: the ``topk`` best visible keys or fewer, ties to the smallest."""
    hidden = scores.masked_fill(~visible, float("-inf"))
    order = hidden.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(visible).scatter_(1, order, True) & visible


class SelectionCase:
    """Inputs of one selection with what is right for some query tokens.

    The layout's slots must be the rows of the key buffer.
    """

    #: Share of the right keys that a selection from scores that round must hold.
    least_recall = LEAST_RECALL

    def __init__(self, inputs: IndexerInputs, layout: Layout, tokens: torch.Tensor, topk: int):
        self.inputs, self.layout, self.tokens, self.topk = inputs, layout, tokens, topk
        self.scores = self.right_scores()
        self.visible = visible_keys(layout, tokens)
        self.best = best_keys(self.scores, self.visible, topk)

    def right_scores(self) -> torch.Tensor:
        """Return what scores the selection is from, ``[len(tokens), Skv]``."""
        return expected_scores(self.inputs, self.tokens)

    def selected(self, found: Comparison, indices, length) -> torch.Tensor:
        """Check the form of a selection; return it as bool ``[len(tokens), Skv]``.

        Args:
            found: takes complaints.
            indices, length: of all query tokens.
        """
        indices, length = indices[self.tokens].long(), length[self.tokens].long()
        place = torch.arange(self.topk, device=indices.device)
        listed = place < length[:, None]
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
        # A spare column takes what is not listed.
        spare = self.layout.num_keys
        chosen = torch.zeros(len(indices), spare + 1, dtype=torch.bool, device=indices.device)
        chosen.scatter_(1, torch.where(listed & in_range, indices, spare), True)
        chosen = chosen[:, :spare]
        found.require(not (chosen & ~self.visible).any(), "an invisible key is selected")
        return chosen

    def compare_exactly(self, what: str, found: Comparison, indices, length) -> None:
        """Compare a selection from scores that are exact in fp32: there is one right answer."""
        chosen = self.selected(found, indices, length)
        found.require((chosen == self.best).all(), f"{what}: not the best keys, smallest first")

    def compare(self, found: Comparison, indices, length) -> None:
        """Compare a selection from scores that round: the best keys but for near-ties.

        The error ``score shortfall`` is by how much the worst selected key lies below the worst of
        the best keys, relative to the root mean square of the query's visible scores, and ``score
        inversion`` by how much the best rejected key beats the worst selected one, relative to the
        query's largest score.
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
            # Scores that the relu cuts to 0 have no size, and no gap either.
            gaps = (gap / torch.where(unit > 0, unit, 1.0))[some].clamp_min(0)
            found.keep_worst(name, float(gaps.max()) if some.any() else 0.0)
