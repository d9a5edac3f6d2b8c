"""Command ``prepare-data``: tokenises shards in parallel and joins them to a data set."""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.prepare_data.shards import Record, Shard, Workspace
from megatron_dsa.extras.prepare_data.tokens import byte_tokens, hugging_face_tokens

#: Seconds between progress lines: on a terminal, in a file.
_EVERY = (1, 10)
_MB = 10**6
_NAMED = 10


def run(arguments: argparse.Namespace) -> int:
    if arguments.tokenizer is None:
        tokens = byte_tokens()
    else:
        tokens = hugging_face_tokens(arguments.tokenizer, arguments.append_eod)
    workspace = Workspace(
        arguments.output, tokens, arguments.jsonl_key, skip_broken=arguments.skip_broken
    )
    shards = workspace.plan(arguments.input, int(arguments.shard_mb * _MB))
    workers = arguments.workers or len(os.sched_getaffinity(0))
    with workspace:
        records = _finish(workspace, shards, workers)
        total = sum(record.documents for record in records)
        require(total, _without_documents(records))
        workspace.join(shards)
    kind = "tokens" if arguments.tokenizer else "byte tokens"
    print(
        f"{total} documents, {sum(r.tokens for r in records)} {kind} ({tokens.dtype.__name__}), "
        f"longest {max(r.longest for r in records)}, in {arguments.output}.bin and .idx"
    )
    skipped = _skipped(records)
    if skipped:
        print("left out: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()))
    for named in _named(records):
        print(f"  {named}")
    if tokens.note:
        print(f"note: {tokens.note}")
    print(f"train with\n  --data-path {arguments.output} {tokens.flags}")
    return 0


def _skipped(records: list[Record]) -> Counter[str]:
    return sum((Counter(record.skipped) for record in records), Counter())


def _named(records: list[Record]) -> list[str]:
    named = [each for record in records for each in record.named][:_NAMED]
    rest = _skipped(records)["broken records"] - len(named)
    return [*named, *([f"and {rest} others"] if rest else [])]


def _without_documents(records: list[Record]) -> str:
    reasons = [f"{count} {reason}" for reason, count in _skipped(records).items()]
    found = ", ".join([*reasons, *_named(records)])
    return f"the text is empty: give a file with at least one document ({found or 'no text'})"


def _finish(workspace: Workspace, shards: list[Shard], workers: int) -> list[Record]:
    """Write the missing shards; return the records of all shards in order."""
    records = [workspace.record(shard) for shard in shards]
    missing = [i for i, record in enumerate(records) if record is None]
    if len(missing) < len(shards):
        _say(f"> {len(shards) - len(missing)} of {len(shards)} shards are kept from before")
    with _Pool(workspace, min(workers, max(len(missing), 1))) as pool:
        written = pool.write([shards[i] for i in missing])
    for i, record in zip(missing, written, strict=True):
        records[i] = record
    complete = [record for record in records if record is not None]
    for note in dict.fromkeys(note for record in complete for note in record.notes):
        _say(f"note: {note}")
    return complete


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


#: State of a worker: workspace, bytes read by all workers, stop event.
_worker: tuple[Workspace, Any, Any]


class _Stopped(Exception):
    """Another worker failed, or the command was interrupted."""


def _start_worker(workspace: Workspace, consumed: Any, stop: Any, parent: int) -> None:
    global _worker
    _worker = workspace, consumed, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Exit when the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _write(shard: Shard) -> Record:
    workspace, consumed, stop = _worker

    def progress(count: int) -> None:
        with consumed.get_lock():
            consumed.value += count
        if stop.is_set():
            raise _Stopped

    return workspace.write(shard, progress)


class _Pool:
    """Pool of forked workers, which share a loaded tokenizer."""

    def __init__(self, workspace: Workspace, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._consumed, self._stop = context.Value("q", 0), context.Event()
        self._workers = workers
        self._pool = ProcessPoolExecutor(
            workers, context, _start_worker, (workspace, self._consumed, self._stop, os.getpid())
        )

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, kind, _error, _traceback) -> None:
        if kind is not None:
            self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def write(self, shards: Sequence[Shard]) -> list[Record]:
        total, start = sum(shard.size for shard in shards), time.monotonic()
        every = _EVERY[0] if sys.stderr.isatty() else _EVERY[1]
        futures = [self._pool.submit(_write, shard) for shard in shards]
        try:
            while True:
                done, rest = wait(futures, every, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if not rest:
                    return [future.result() for future in futures]
                self._show(total, time.monotonic() - start, len(done), len(shards))
        except BrokenProcessPool as error:
            raise ConfigError(
                f"a worker of --workers {self._workers} was killed, perhaps for want of memory: "
                "start the same command again, with fewer --workers; finished shards are kept"
            ) from error

    def _show(self, total: int, seconds: float, done: int, shards: int) -> None:
        read = self._consumed.value
        line = f"> {read / _MB:.1f} of {total / _MB:.1f} MB, {done} of {shards} shards"
        if read:
            left = (total - read) * seconds / read
            line += f", {read / _MB / seconds:.2f} MB/s, {_duration(left)} left"
        if sys.stderr.isatty():
            print(f"\r{line:<78}\r", end="", file=sys.stderr, flush=True)
        else:
            _say(line)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
