"""Cost of FP8 in the indexer's linears: recall of the selection, and captured attention.

    python -m benchmarks recall

A small DSA model is trained in bf16 on Python's standard library. Each layer's indexer then gets
the hidden states of held-out text again, with its linears in bf16 and quantised, all with the same
weights. Ways: ``bf16``; ``e4m3``, factors rounded to e4m3 with one scale per tensor, in torch;
``tensorwise``, ``delayed`` and ``blockwise``, transformer-engine's recipes with FP8 products.
Scores and selection are the same in all these. ``deepgemm-fp8`` has linears in bf16 and scores like
inference engines (``--dsa-indexer-numerics``). Compares queries that see more keys than they
select, evenly spaced over the sequence.
"""

import argparse
import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.process_groups import alone
from benchmarks.recall.model import WIDTHS, Recorded, Text, build, recorded, train
from benchmarks.settings import Settings, Work
from megatron_dsa.errors import ImplementationError
from megatron_dsa.metrics.quality import query_scores, recall, visible_keys
from megatron_dsa.ops.dispatch.policy import DEEPGEMM_FP8
from megatron_dsa.ops.indexer_topk import engine
from megatron_dsa.ops.indexer_topk.spec import IndexerInputs
from megatron_dsa.ops.layout.layout import Seen, bshd_layout
from megatron_dsa.testing.comparison import relative_error
from megatron_dsa.versions import why_not_transformer_engine

CEILINGS = ()
ON_DEVICE = True
TIMEOUT = 1800.0
BF16, ROUNDED, ENGINE = "bf16", "e4m3", DEEPGEMM_FP8
RECIPES = ("tensorwise", "delayed", "blockwise")
#: Passes before the one that counts: delayed scaling takes its scales from earlier ones.
WARMING = {"delayed": 3}
QUERIES = 256
E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        preset: key of :data:`~benchmarks.recall.model.WIDTHS`.
        tokens: of a sequence; one is a batch.
        steps: of training.
    """

    preset: str
    tokens: int
    steps: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help="of training (400, with --quick 10)")


def plan(options: argparse.Namespace) -> list[tuple[Case, list[Work]]]:
    preset, tokens, steps = ("tiny", 128, 10) if options.quick else ("small", 4096, 400)
    works = [Work("all", way) for way in (BF16, ENGINE, ROUNDED, *RECIPES)]
    return [(Case(preset, tokens, options.steps or steps), works)]


class _Measurer:
    def __init__(self, case: Case, device: torch.device):
        self._case, self._device = case, device
        self._unusable = why_not_transformer_engine(device.type == "cuda")
        self._loss, self._layers = math.nan, list[Recorded]()
        #: By layer: the keys that ``bf16`` selects, its scores and captured mass.
        self._exact: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def measure(self, work: Work) -> Iterator[tuple[str, dict]]:
        if work.way in RECIPES and self._unusable is not None:
            raise ImplementationError(f"transformer-engine cannot be used: {self._unusable}")
        if not self._layers:
            self._train()
        first = work.way == BF16
        if not first and not self._exact:
            raise ImplementationError(f"{BF16} was not measured before")
        found = []
        for number, layer in enumerate(self._layers):
            indices, scores = self._selected(layer, work.way)
            mass = captured(layer, indices, self._queries)
            if first:
                self._exact.append((indices, scores, mass))
            reference, exact_scores, _ = self._exact[number]
            shares = recall(indices, reference)
            found.append({
                "recall": shares.mean().item(), "least_recall": shares.min().item(),
                "mass_captured": mass, "score_error": relative_error(scores, exact_scores),
            })  # fmt: skip
            yield f"layer {number + 1}", {"status": "ok", **found[-1]}
        every = {name: math.fsum(one[name] for one in found) / len(found) for name in found[0]}
        every["least_recall"] = min(one["least_recall"] for one in found)
        yield work.part, {"status": "ok", "validation_loss": self._loss, **every}

    def _train(self) -> None:
        case = self._case
        model = build(case.preset, case.tokens, self._unusable is None, self._device)
        text = Text(case.tokens, self._device)
        train(model, text, case.steps)
        self._loss, self._layers = recorded(model, text.batch(held_out=True))
        topk = WIDTHS[case.preset]["dsa_indexer_topk"]
        count = min(QUERIES, case.tokens - topk)
        places = torch.linspace(topk, case.tokens - 1, count, device=self._device)
        self._queries = places.long()

    @torch.no_grad()
    def _selected(self, layer: Recorded, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return lists int32 ``[queries, K]`` and index scores of a way."""
        indexer = layer.core.indexer
        x, qr, rope, ranks, *_ = layer.indexer
        for _ in range(1 + WARMING.get(way, 0)):
            with _quantised(indexer, way):  # its end computes new scales
                found = indexer(x, qr, rope, ranks)
        if way in RECIPES and not getattr(indexer.linear_wq_b, "fp8", False):
            raise RuntimeError(f"{way}: the indexer's linear did not multiply in FP8")
        if way == ENGINE:
            scores = _engine_scores(found, self._queries)
        else:
            inputs = IndexerInputs(found.q, found.k, found.weights, found.relu)
            scores = query_scores(inputs, self._queries)
        seen = visible_keys(layer.layout, self._queries)
        best = scores.masked_fill(~seen, -math.inf).topk(indexer.config.dsa_indexer_topk)
        return torch.where(best.values.isinf(), -1, best.indices).int(), scores


def _engine_scores(found: IndexerInputs, queries: torch.Tensor) -> torch.Tensor:
    """Return the scores ``[queries, keys]`` of the engines' rule, by torch."""
    assert found.fp32_weights is not None
    q, weights = engine.quantized_queries(found.q[queries], found.fp32_weights[queries])
    k, scales = engine.quantized(found.k)
    (block,) = bshd_layout(len(k), 1, k.device).blocks(lambda width: len(k))
    block = replace(block, tokens=slice(0, len(q), 1))
    start = torch.zeros(len(q), dtype=torch.int32, device=k.device)
    given = IndexerInputs(q, k, weights, key_scales=scales)
    return engine.Scores()(given, block, k, Seen(start, start + len(k)))


def _linears(indexer) -> list[torch.nn.Module]:
    return [indexer.linear_wq_b, indexer.linear_wk, indexer.linear_weights_proj]


@contextlib.contextmanager
def _quantised(indexer, way: str) -> Iterator[None]:
    """Make an indexer's linears compute like a way."""
    if way == BF16:
        yield
    elif way == ENGINE:
        indexer.as_engine = True
        try:
            yield
        finally:
            indexer.as_engine = False
    elif way == ROUNDED:
        weights = [linear.weight.data for linear in _linears(indexer)]
        hooks = [
            linear.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
            for linear in _linears(indexer)
        ]
        for linear in _linears(indexer):
            linear.weight.data = rounded(linear.weight.data)
        try:
            yield
        finally:
            for linear, weight, hook in zip(_linears(indexer), weights, hooks, strict=True):
                linear.weight.data = weight
                hook.remove()
    else:
        with _of_the_recipe(indexer, way):
            yield


@contextlib.contextmanager
def _of_the_recipe(indexer, name: str) -> Iterator[None]:
    """Quantise by a recipe of transformer-engine, instead of the linears' own."""
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.fp8 import fp8_autocast

    made = {
        "tensorwise": lambda: recipe.Float8CurrentScaling(fp8_format=recipe.Format.HYBRID),
        "delayed": lambda: recipe.DelayedScaling(
            fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
        ),
        "blockwise": lambda: recipe.Float8BlockScaling(fp8_format=recipe.Format.E4M3),
    }[name]()
    before = [linear.te_quant_params for linear in _linears(indexer)]
    for linear in _linears(indexer):
        linear.te_quant_params = None
    try:
        with fp8_autocast(enabled=True, fp8_recipe=made):
            yield
    finally:
        for linear, params in zip(_linears(indexer), before, strict=True):
            linear.te_quant_params = params


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round ``x`` to e4m3 with one scale."""
    scale = E4M3_LARGEST / x.float().abs().max().clamp_min(1e-12)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


@torch.no_grad()
def captured(layer: Recorded, indices: torch.Tensor, queries: torch.Tensor) -> float:
    """Return the share of dense attention's probability on selected keys, mean over heads."""
    q, kv, w_uk = layer.q[queries].float(), layer.kv.float(), layer.w_uk.float()
    nope, rope = q.split([w_uk.shape[1], q.shape[2] - w_uk.shape[1]], dim=-1)
    absorbed = torch.cat([torch.einsum("rha,hal->rhl", nope, w_uk), rope], -1)
    logits = torch.einsum("rhd,kd->rhk", absorbed, kv) * layer.core.softmax_scale
    seen = visible_keys(layer.layout, queries)
    p = logits.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    chosen = torch.zeros(len(queries), len(kv) + 1, dtype=torch.bool, device=kv.device)
    chosen.scatter_(1, torch.where(indices < 0, len(kv), indices).long(), True)
    return (p * chosen[:, None, :-1]).sum(-1).mean().item()


def prepare(case: Case, device: torch.device, settings: Settings) -> _Measurer:
    if (there := alone()).type != device.type:
        raise ImplementationError(f"layers run on {there}, where Megatron puts them")
    return _Measurer(case, device)
