"""The process of one case.

Reads a request (JSON) from standard input and writes one JSON line per event to standard output:
``environment`` once, ``start`` before and ``done`` after each measurement, and ``rows``. A crash
can so be attributed to the measurement under way.
"""

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.schema import environment, long_rows
from benchmarks.settings import Settings, Work, load
from benchmarks.timing import CEILINGS, Clock, measure_ceiling
from megatron_dsa.errors import ImplementationError
from megatron_dsa.patches import cpu_host

#: Result of a measurement not started in time.
OVER = {"status": "skipped", "reason": "the time was over (--total)"}


def one_line(error: BaseException) -> str:
    """Return the first line of a message; CUDA errors append pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else ""


def complaint(error: Exception) -> dict:
    if isinstance(error, ImplementationError):
        return {"status": "skipped", "reason": one_line(error)}
    return {"status": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}


def still_works(clock: Clock) -> bool:
    """Return whether the device is still usable: a faulting kernel breaks its process."""
    try:
        gc.collect()
        if clock.on_gpu:
            torch.cuda.empty_cache()
            torch.ones(1, device="cuda").add_(1)
        clock.wait()
    except Exception:
        return False
    return True


class Case:
    """One case: ceilings first, then its measurements."""

    def __init__(self, family, case, settings: Settings):
        self.family, self.case, self.settings = family, case, settings
        self.device = torch.device(settings.device)
        self._ceilings: dict[str, float] = {}
        self._measurer = None

    def ceilings(self) -> Iterator[tuple[str, dict]]:
        """Measure the device's ceilings."""
        for name in self.family.CEILINGS:
            clock = Clock(self.device)
            result = measure_ceiling(name, self.device, clock, self.settings.repeats)
            self._ceilings[name] = result[CEILINGS[name][0]]
            yield name, result

    def results(self, work: Work) -> Iterator[tuple[str, dict]]:
        try:
            if self._measurer is None:
                self._measurer = self.family.prepare(self.case, self.device, self.settings)
            for part, result in self._measurer.measure(work):
                yield part, self._with_shares(result)
        except Exception as error:
            yield work.part, complaint(error)

    def _with_shares(self, result: dict) -> dict:
        for name, ceiling in self._ceilings.items():
            metric, share = CEILINGS[name]
            if result.get(metric):
                result = result | {share: result[metric] / ceiling}
        return result


def serve(request: dict, send: Callable[[dict], None]) -> None:
    """Run the requested measurements in order, until done or the device is unusable.

    Args:
        request: ``family``, ``case`` and ``settings`` (fields), ``works`` (pairs), and ``seconds``
            after which no measurement starts, if limited.
        send: takes events.
    """
    begin, seconds = time.monotonic(), request.get("seconds", math.inf)
    family, settings = load(request["family"]), Settings(**request["settings"])
    case = Case(family, family.Case(**request["case"]), settings)
    clock = Clock(case.device) if family.ON_DEVICE else None
    send({"event": "environment", **environment(case.device)})

    def report(way: str, part: str, result: dict) -> None:
        send({"event": "rows", "rows": [{"way": way, **row} for row in long_rows(part, result)]})

    for part, result in case.ceilings():
        report("torch", part, result)
    for place, work in enumerate(Work(*work) for work in request["works"]):
        send({"event": "start", "place": place})
        over = time.monotonic() - begin > seconds
        results = [(work.part, dict(OVER))] if over else case.results(work)
        for part, result in results:
            report(work.way, part, result)
        send({"event": "done", "place": place})
        if clock is not None and not still_works(clock):
            return


def main() -> None:
    """Serve one request. Compilers may print to standard output, which is kept for events."""
    if cpu_host.needed():
        cpu_host.hide_transformer_engine()  # before importing Megatron
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    serve(json.load(sys.stdin), lambda event: print(json.dumps(event), file=events, flush=True))


if __name__ == "__main__":
    main()
