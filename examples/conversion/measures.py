"""Measurements in every evaluation of a training, for ``train.py``."""

import csv
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy
import probes
import selection
import torch
from held_out import mean_over_clusters, summary, sums_by_document
from megatron.core.utils import unwrap_model

from megatron_dsa.errors import require
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.metrics.tags import EVALUATION
from megatron_dsa.training.data import train_valid_test_datasets
from megatron_dsa.training.setup import forward_step

MEASURES = ("step", "measure", "part", "value", "error", "count")
DOCUMENTS = ("step", "document", "band", "loss_sum", "tokens")


def append(file: Path, columns: tuple[str, ...], rows: Iterable[tuple]) -> None:
    new = not file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerows(([columns] if new else []) + list(rows))


class Measures:
    """Collector of an evaluation's losses, and measurements at its end.

    Raises:
        ConfigError: more than one process, or a partial held-out set.
    """

    def __init__(self, args):
        require(
            args.world_size == 1,
            f"--measures must run in one process, got {args.world_size}: start one",
        )
        require(
            args.full_validation and args.multiple_validation_sets,
            "--measures needs --full-validation and --multiple-validation-sets (of one set)",
        )
        self._args, self._held_out, self._last = args, None, None
        self._losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: (layer, figure) -> means per sequence.
        self._selected: dict[tuple[int, str], list[torch.Tensor]] = {}

    def data_sets(self):
        """Wrap Megatron's data-set provider to keep the held-out set."""

        def build(samples, vp_stage=None):
            found = train_valid_test_datasets(samples, vp_stage)
            (self._held_out,) = found[1] if isinstance(found[1], list) else [found[1]]
            return found

        build.is_distributed = True
        return build

    def forward_step(self, data_iterator, model, return_schedule_plan=False):
        """Run Megatron's forward step; keep an evaluation's losses."""
        if model.training:
            return forward_step(data_iterator, model, return_schedule_plan)
        count = self._args.selection_sequences
        of_some = selection.measured(model, self._record)
        with of_some if len(self._losses) < count else nullcontext():
            losses, reduction = forward_step(data_iterator, model, return_schedule_plan)
        (mask,) = reduction.args
        self._losses.append((losses.detach().float(), mask > 0))
        return losses, reduction

    def _record(self, layer: int, attended) -> None:
        if self._args.dsa_stage == "sparse":
            for name, values in selection.quality(attended, self._args.selection_queries).items():
                self._selected.setdefault((layer, name), []).append(values.mean())

    def __call__(self, model) -> None:
        """Measure the model at the end of an evaluation."""
        args = self._args
        step = args.consumed_train_samples // args.global_batch_size
        losses, self._losses = self._losses, []
        selected, self._selected = self._selected, {}
        rows = self._layers(selected)
        if step == self._last:  # Megatron evaluates the last step twice
            return
        self._last = step
        sums = sums_by_document(*self._by_token(losses))
        rows += [("loss", part, *figures) for part, figures in summary(sums).items()]
        if args.probe_sequences:
            rows += self._probes(model[0])
        if torch.cuda.is_available():
            rows.append(("peak memory", "", torch.cuda.max_memory_allocated() / 2**30, "", 1))
        append(args.measures / "measures.csv", MEASURES, [(step, *row) for row in rows])
        by_document = [(step, *key, *of) for key, of in sums.items()]
        append(args.measures / "documents.csv", DOCUMENTS, by_document)

    def _by_token(self, losses) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        values, counted = (torch.cat(found).cpu().numpy() for found in zip(*losses, strict=True))
        held_out = self._held_out
        require(
            len(values) == len(held_out),
            f"an evaluation must go over the {len(held_out)} held-out sequences, got {len(values)}",
        )
        documents = []
        for number in range(len(held_out)):
            _, ids, lengths = held_out._query_document_sample_shuffle_indices(number)
            documents.append(numpy.repeat(ids, lengths)[1 : values.shape[1] + 1])
        return values, counted, numpy.stack(documents)

    def _layers(self, selected) -> list[tuple]:
        rows = []
        for (layer, name), means in sorted(selected.items()):
            values = torch.stack(means).double().cpu()
            value, error = mean_over_clusters(values, torch.ones_like(values))
            rows.append((name, f"layer {layer}", value, error, len(values)))
        if IndexerLog.is_on():
            loss = IndexerLog.reduce()[EVALUATION]
            for layer, count in enumerate(loss.count.tolist(), 1):
                if count:
                    value = loss.value[layer - 1].item()
                    rows.append(("indexer KL", f"layer {layer}", value, "", int(count)))
        return rows

    def _probes(self, model) -> list[tuple]:
        count = min(self._args.probe_sequences, len(self._held_out))
        sequences = torch.stack([self._held_out[number]["tokens"] for number in range(count)])
        found = probes.probe(predictor(model), sequences)
        if IndexerLog.is_on():
            IndexerLog.reduce()  # discard the indexer loss on probes
        return [
            (kind, part, *figures)
            for kind, parts in found.items()
            for part, figures in parts.items()
        ]


def predictor(model) -> probes.Predict:
    """Return a predictor that computes logits only at given positions."""
    output_layer = unwrap_model(model).output_layer
    device = next(model.parameters()).device

    def predict(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        asked = positions.to(device)
        hook = output_layer.register_forward_pre_hook(
            lambda _, given: (given[0].index_select(0, asked), *given[1:])
        )
        places = torch.arange(len(tokens), device=device)
        try:
            logits = model(tokens.to(device)[None], places[None], None)
        finally:
            hook.remove()
        return logits[0].argmax(-1)

    return predict
