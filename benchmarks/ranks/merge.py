"""Results of one measurement, merged over ranks."""

from collections.abc import Iterator

from benchmarks.ranks.cases import ALONE, BASES, ONE_RANK, ONE_RANK_DENSE, Case
from benchmarks.timing import summary

#: Figures of the whole step, not the forward; the largest over ranks counts.
OF_STEP = (
    "communication_share", "exposed_share", "bytes_per_token", "formula_bytes_per_token",
    "hidden_bytes_per_token", "peak_mib", "graph_error",
)  # fmt: skip
#: Outputs that differ more are of different layers; bf16 reaches 1e-3.
NORM_LIMIT = 2e-2


def slowest(answers: list[dict], part: str) -> list[float]:
    """Return the milliseconds of every call on its slowest rank."""
    return [max(ranks) for ranks in zip(*(a["times"][part] for a in answers), strict=True)]


def merge(answers: list[dict]) -> Iterator[tuple[str, dict]]:
    """Yield parts and their results.

    Args:
        answers: of every rank: ``times`` (part -> ms of calls), any of :data:`OF_STEP`, ``ran``,
            ``flop`` (part -> of one rank), ``difference``.
    """
    for part in answers[0]["times"]:
        result = {"status": "ok", **summary(slowest(answers, part))}
        if flop := answers[0].get("flop"):
            result["tflops"] = flop[part] / result["ms"] / 1e9
        if "difference" in answers[0]:
            result["out_error"] = max(answer["difference"] for answer in answers)
        if part != "forward":
            result["ran"] = answers[0].get("ran")
            for name in OF_STEP:
                found = [a[name] for a in answers if a.get(name) is not None]
                result[name] = max(found) if found else None
        yield part, result


def norms(answers: list[dict]) -> dict[str, float]:
    """Return the norms over all ranks."""
    names = answers[0].get("squares", {})
    return {name: sum(a["squares"][name] for a in answers) ** 0.5 for name in names}


class Judge:
    """Compares the ways of a case with one rank's, measured first."""

    def __init__(self, case: Case):
        self._ranks = case.grid.ranks
        self._alone: dict[tuple[str, str], float] = {}  # milliseconds of one rank
        self._norms: dict[bool, dict[str, float]] = {}  # of dense attention, of selected keys

    def judged(self, way: str, part: str, result: dict, answers: list[dict]) -> dict:
        """Return a result with its efficiency, or a failed one with the reason."""
        found, base = norms(answers), BASES.get(way, ONE_RANK)
        alone, dense = way in ALONE, base == ONE_RANK_DENSE
        if alone:
            self._alone[way, part] = result["ms"]
            self._norms.setdefault(dense, found)
        if found and (wanted := self._norms.get(dense)):
            error = max(abs(found[n] - wanted[n]) / wanted[n] for n in found)
            if not error <= NORM_LIMIT:
                reason = f"wrong result: norms differ from one rank's by {error:.3g}"
                return {"status": "failed", "reason": reason, "out_error": error}
            result = result | {"out_error": error}
        ms = self._alone.get((base, part))
        if ms and not alone:
            result = result | {"efficiency": ms / (self._ranks * result["ms"])}
        return result
