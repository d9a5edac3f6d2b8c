"""Losses on held-out text by position in the sequence, with standard errors over documents."""

import numpy

#: Ends of the position bands; in shorter sequences 1/8, 1/2 and all of the length.
ENDS = (1024, 4096, 8192, 16384)


def bands(length: int) -> list[tuple[int, int]]:
    """Return a sequence's bands as (first position, last position + 1)."""
    if length < ENDS[2]:
        ends = [length // 8, length // 2, length]
    else:
        ends = [end for end in ENDS if end < length] + [length]
    return list(zip([0, *ends], ends, strict=False))


def name_of(band: tuple[int, int]) -> str:
    return f"{band[0]}-{band[1]}"


def sums_by_document(
    losses: numpy.ndarray, counted: numpy.ndarray, documents: numpy.ndarray
) -> dict[tuple[int, str], tuple[float, int]]:
    """Sum the losses of each document in each band.

    Args:
        losses: ``[sequences, length]``, nats per token.
        counted: bool, same shape: losses to include.
        documents: int, same shape: document of the predicted token.

    Returns:
        (document, band) -> (sum of losses, number of tokens), without empty bands.
    """
    found = {}
    for first, end in bands(losses.shape[1]):
        kept = counted[:, first:end]
        where, values = documents[:, first:end][kept], losses[:, first:end][kept]
        totals = numpy.bincount(where, weights=values.astype(numpy.float64))
        for document, tokens in enumerate(numpy.bincount(where)):
            if tokens:
                key = (document, name_of((first, end)))
                found[key] = (float(totals[document]), int(tokens))
    return found


def mean_over_clusters(totals, counts) -> tuple[float, float]:
    """Return the mean of clustered entries and its standard error.

    The error is linearised for a ratio of sums, and NaN for a single cluster.

    Args:
        totals: sum of each cluster's entries; counts: number of each cluster's entries.
    """
    totals, counts = numpy.asarray(totals, float), numpy.asarray(counts, float)
    mean = totals.sum() / counts.sum()
    number = len(totals)
    if number < 2:
        return float(mean), float("nan")
    spread = ((totals - mean * counts) ** 2).sum() * number / (number - 1)
    return float(mean), float(numpy.sqrt(spread) / counts.sum())


def by_band(
    sums: dict[tuple[int, str], tuple[float, int]],
) -> dict[str, dict[int, tuple[float, int]]]:
    """Return band or ``all`` -> document -> (sum, number of tokens)."""
    parts: dict[str, dict[int, tuple[float, int]]] = {"all": {}}
    for (document, band), (total, tokens) in sums.items():
        parts.setdefault(band, {})[document] = (total, tokens)
        before = parts["all"].get(document, (0.0, 0))
        parts["all"][document] = (before[0] + total, before[1] + tokens)
    return parts


def gaps(
    sums: dict[tuple[int, str], tuple[float, int]], others: dict[tuple[int, str], tuple[float, int]]
) -> dict[str, tuple[float, float]]:
    """Return the difference of two models' mean losses and its error, by band and for ``all``.

    The error is of paired differences, over documents.

    Raises:
        ValueError: the models were measured on different tokens.
    """
    if {key: tokens for key, (_, tokens) in sums.items()} != {
        key: tokens for key, (_, tokens) in others.items()
    }:
        raise ValueError("the losses are of different documents: measure both on the same text")
    apart = {key: (total - others[key][0], tokens) for key, (total, tokens) in sums.items()}
    return {
        part: mean_over_clusters(*zip(*found.values(), strict=True))
        for part, found in by_band(apart).items()
    }


def summary(
    sums: dict[tuple[int, str], tuple[float, int]],
) -> dict[str, tuple[float, float, int]]:
    """Return mean, standard error and number of documents, by band and for ``all``."""
    return {
        part: (*mean_over_clusters(*zip(*found.values(), strict=True)), len(found))
        for part, found in by_band(sums).items()
    }
