"""The child process of the hybrid benchmark: it measures cases until all are done.

Speaks the protocol of :mod:`benchmarks.measure`, with an event ``row`` for each but the last row of
a case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.hybrid import Case
from benchmarks.hybrid_pieces import measure_piece
from benchmarks.measure import PACKAGES, environment, outcome, still_works
from benchmarks.timing import Clock, measure_ceiling

#: Cycles before each timed piece, half a millisecond: longer than the launches of a fused one take.
HEAD_START = 10**6


def rows_of(case: Case, device: torch.device, settings: dict) -> Iterator[dict]:
    """Yield the rows of a case, at least one."""
    if time.time() > settings["ends_at"]:
        yield {"status": "skipped", "reason": "the time was over (--total)"}
    elif case.operation == "copy":
        yield outcome(measure_ceiling, "copy", device, Clock(device), settings["repeats"])
    elif case.part == "pieces":
        yield outcome(measure_piece, case, device, Clock(device, HEAD_START), settings)
    else:
        # Megatron is imported for layers only: it takes seconds.
        from benchmarks.hybrid_layer import layer_rows

        yield from layer_rows(case, device, Clock(device), settings)


def serve(request: dict, send) -> None:
    """Run the request's cases in order, until all are done or the device is unusable."""
    settings = request["settings"]
    device = torch.device(settings["device"] or ("cuda" if torch.cuda.is_available() else "cpu"))
    send({"event": "environment",
          **environment(device, PACKAGES | {"triton": ("triton", "triton")})})  # fmt: skip
    check = Clock(device)
    for place, fields in enumerate(request["cases"]):
        send({"event": "start", "place": place})
        waiting = None
        for row in rows_of(Case(**fields), device, settings):
            if waiting is not None:
                send({"event": "row", "place": place, **waiting})
            waiting = row
        send({"event": "done", "place": place, **waiting})
        if waiting["status"] != "skipped" and not still_works(check):
            return


def main() -> None:
    """Serve one request. Standard output is kept for events; compilers may print to it as well."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    # What is imported stays: looking through it after every case would take longer than many do.
    gc.freeze()
    serve(request, lambda event: print(json.dumps(event), file=events, flush=True))


if __name__ == "__main__":
    main()
