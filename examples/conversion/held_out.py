"""Losses on held-out text by position in the sequence, with standard errors over documents."""

import numpy

#: Ends of the bands of positions; shorter sequences have an eighth, a half and all of their length.
ENDS = (1024, 4096, 8192, 16384)


def bands(length: int) -> list[tuple[int, int]]:
    """Return first and last position, plus 1, of the bands of a sequence."""
    if length < ENDS[2]:
        ends = [length // 8, length // 2, length]
    else:
        ends = [end for end in ENDS if end < length] + [length]
    return list(zip([0, *ends], ends, strict=False))


def name_of(band: tuple[int, int]) -> str:
    """Return a band as the CSVs write it."""
    return f"{band[0]}-{band[1]}"


def sums_by_document(
    losses: numpy.ndarray, counted: numpy.ndarray, documents: numpy.ndarray
) -> dict[tuple[int, str], tuple[float, int]]:
    """Add up the losses of every document in every band.

    Args:
        losses: ``[sequences, length]``, nats per token.
        counted: bool, same shape: which of them count.
        documents: int, same shape: the document of the token that was predicted.

    Returns:
        By document and band, sum of the losses and number of tokens; only where there are any.
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
    """Return the mean of all entries and its standard error, with entries in clusters.

    The linearised error of a ratio of sums. It is NaN for a single cluster.

    Args:
        totals: sum of the entries of each cluster; counts: their numbers.
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
    """Return sum and number of tokens by document, by band and of ``all``."""
    parts: dict[str, dict[int, tuple[float, int]]] = {"all": {}}
    for (document, band), (total, tokens) in sums.items():
        parts.setdefault(band, {})[document] = (total, tokens)
        before = parts["all"].get(document, (0.0, 0))
        parts["all"][document] = (before[0] + total, before[1] + tokens)
    return parts


def gaps(
    sums: dict[tuple[int, str], tuple[float, int]], others: dict[tuple[int, str], tuple[float, int]]
) -> dict[str, tuple[float, float]]:
    """Return how much higher the mean loss of one model is, and its error, by band and of ``all``.

    Both saw the same tokens: what a document adds to both has no part in the error.

    Raises:
        ValueError: they did not.
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
    """Return mean, standard error over documents and their number, by band and of ``all``."""
    return {
        part: (*mean_over_clusters(*zip(*found.values(), strict=True)), len(found))
        for part, found in by_band(sums).items()
    }
