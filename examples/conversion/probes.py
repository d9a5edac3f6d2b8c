"""Accuracy of copies and look-ups over thousands of tokens.

Probes are held-out text with some tokens replaced. *copy*: a passage of another sequence appears
twice, and the model continues the second copy, whose first quarter is not counted; ``none`` omits
the first copy, as a guessing baseline. *look-up*: four records of a name (3 random tokens) and a
value (1 token) appear again in another order; guessing among the values is right a quarter of the
time. Queries are in the last eighth of a sequence.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from held_out import mean_over_clusters

#: Tokens of a name and its value; records per definition; longest passage.
NAME, VALUE, RECORDS, PASSAGE = 3, 1, 4, 32
NOTHING = "none"

#: ``tokens [s]``, positions ``[n]`` -> likeliest next token at each position.
Predict = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Probe:
    """A sequence and its questions.

    Attributes:
        tokens: int64 ``[s]``.
        asked: distance (tokens between both occurrences, or :data:`NOTHING`) -> positions whose
            next token is predicted.
    """

    tokens: torch.Tensor
    asked: dict[str, list[int]] = field(default_factory=dict)


def distances(length: int) -> list[int]:
    return [length // 8, length // 4, length // 2, length * 7 // 8]


def copies(sequences: torch.Tensor, generator: torch.Generator) -> Iterator[Probe]:
    """Yield a probe per sequence of ``sequences [n, s]``, ``n`` at least 2."""
    number, length = sequences.shape
    asked = [*map(str, distances(length)), NOTHING]
    slot = length // 8 // len(asked)
    size = min(PASSAGE, slot - slot // 3)
    for index in range(number):
        probe = Probe(sequences[index].clone())
        for place, part in enumerate(asked):
            other = sequences[(index + 1 + place % (number - 1)) % number]
            first = int(torch.randint(length - size, (), generator=generator))
            passage = other[first : first + size]
            use = length - length // 8 + place * slot
            if part != NOTHING:
                probe.tokens[use - int(part) :][:size] = passage
            probe.tokens[use:][:size] = passage
            probe.asked[part] = list(range(use + size // 4 - 1, use + size - 1))
        yield probe


def lookups(sequences: torch.Tensor, generator: torch.Generator) -> Iterator[Probe]:
    """Yield a probe per sequence of ``sequences [n, s]``, with names and values from its tokens."""
    number, length = sequences.shape
    known = sequences.unique()
    width = NAME + VALUE
    slot = length // 8 // len(distances(length))
    for index in range(number):
        probe = Probe(sequences[index].clone())
        for place, distance in enumerate(distances(length)):
            drawn = torch.randperm(len(known), generator=generator)[: RECORDS * width]
            records = known[drawn].view(RECORDS, width)
            again = records[torch.randperm(RECORDS, generator=generator)]
            use = length - length // 8 + place * slot
            probe.tokens[use - distance :][: records.numel()] = records.flatten()
            probe.tokens[use:][: records.numel()] = again.flatten()
            probe.asked[str(distance)] = [use + width * r + NAME - 1 for r in range(RECORDS)]
        yield probe


def accuracies(predict: Predict, probes: Iterator[Probe]) -> dict[str, tuple[float, float, int]]:
    """Return accuracy, standard error and number of sequences, by distance."""
    right: dict[str, list[tuple[int, int]]] = {}
    for probe in probes:
        positions = torch.tensor([p for asked in probe.asked.values() for p in asked])
        correct = (predict(probe.tokens, positions).cpu() == probe.tokens[positions + 1]).tolist()
        for part, asked in probe.asked.items():
            mine, correct = correct[: len(asked)], correct[len(asked) :]
            right.setdefault(part, []).append((sum(mine), len(mine)))
    return {
        part: (*mean_over_clusters(*zip(*found, strict=True)), len(found))
        for part, found in right.items()
    }


def check(sequences: torch.Tensor) -> None:
    """Raise :class:`ValueError` unless probes fit into ``sequences [n, s]``."""
    number, length = sequences.shape
    if number < 2 or length < 8 * len(distances(length)) * RECORDS * (NAME + VALUE):
        raise ValueError(
            f"probes need 2 sequences of 512 tokens, got {number} of {length}: give longer ones, "
            "or --probe-sequences 0"
        )
    if (kinds := len(sequences.unique())) < RECORDS * (NAME + VALUE):
        raise ValueError(f"probes need text of 16 different tokens, got {kinds}")


def probe(
    predict: Predict, sequences: torch.Tensor, seed: int = 1
) -> dict[str, dict[str, tuple[float, float, int]]]:
    """Return the :func:`accuracies` of both kinds of probes, drawn with ``seed``."""
    check(sequences)
    kinds = {"copy": copies, "look-up": lookups}
    return {
        name: accuracies(predict, make(sequences, torch.Generator().manual_seed(seed)))
        for name, make in kinds.items()
    }
