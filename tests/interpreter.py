"""A Python for scripts of ``examples/``: its processes are forked from one that has torch and
Megatron.

A script that starts a dozen of them spends most of a small test on imports. This package is
imported by every process anew; environment, folder, arguments, standard streams, exit status and
signals are those of a process that was started.
"""

import json
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from pathlib import Path

from tests.processes import begin, fork_managers, leave, prepare, run_program

#: Stands in for ``python``. What is neither a module nor a file is left to a real one.
CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
arguments = sys.argv[1:]
safe = arguments[:1] == ["-P"]
arguments = arguments[safe:]
if not (arguments[:1] == ["-m"] or arguments and arguments[0].endswith(".py")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"s"], [0, 1, 2])
with server.makefile("rw") as stream:
    stream.write(json.dumps([arguments, safe, dict(os.environ), os.getcwd()]) + "\\n")
    stream.flush()
    pid = int(stream.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(stream.readline())
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[Path]:
    """Give the path of a program in ``folder`` that scripts can call in place of ``python``."""
    prepare()
    program, address = folder / "python", folder / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen()
        program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        program.chmod(0o755)
        accepting = threading.Thread(target=_accept, args=(server, program), daemon=True)
        accepting.start()
        try:
            yield program
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends accept()
            accepting.join()


def _accept(server: socket.socket, program: Path) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(client, program), daemon=True).start()


def _serve(client: socket.socket, program: Path) -> None:
    with client, client.makefile("rw") as stream:
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        request = json.loads(stream.readline())
        context = multiprocessing.get_context("forkserver")
        process = context.Process(
            target=_run,
            args=(str(program), *request, _Streams(files)),
        )
        process.start()
        for file in files:
            os.close(file)
        stream.write(f"{process.pid}\n")
        stream.flush()
        process.join()
        stream.write(f"{process.exitcode}\n")


class _Streams:
    """File descriptors that go along with the arguments of a process."""

    def __init__(self, files: list[int]):
        self.files = files

    def __reduce__(self):
        return _taken, tuple(DupFd(file) for file in self.files)


def _taken(*files) -> list[int]:
    return [file.detach() for file in files]


def _run(
    program: str, arguments: list[str], safe: bool, environment: dict, folder: str,
    streams: list[int],
) -> None:  # fmt: skip
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing gave it nothing to read
    # The objects of the server remember whether its files could seek.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    begin(environment)
    os.chdir(folder)
    fork_managers()
    sys.executable = program  # what it starts is forked, too
    if not safe:
        is_module = arguments[0] == "-m"
        sys.path.insert(0, folder if is_module else os.path.dirname(os.path.abspath(arguments[0])))
    leave(run_program(arguments))
