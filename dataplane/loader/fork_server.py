"""A process that starts workers by forking itself.

A worker imports numpy, pyarrow and the data plane, which takes as long as reading a thousand rows.
One process does so, once for a consumer, and every worker of its loaders is a fork of it: that
takes milliseconds, and what was imported is in memory once.

The process is a new Python, not a fork of the consumer. It imports the loader and not the script
that runs: a training script imports torch, which takes seconds of CPU time, and need not be guarded
against a second run. It has no threads of the script either, which a fork would not survive.

    consumer → server    a message of one byte, with descriptors or a process number
    consumer ← server    a number: of a process, or its exit code

When the consumer ends, the server ends its workers, and itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ...console.signals import sigint_blocked

START = """
import pickle, socket, sys
channel = socket.socket(fileno=int(sys.argv[2]))
try:
    path = channel.recv(1 << 20)
except ConnectionError:  # the consumer was killed
    path = b""
if path:
    sys.path[:] = pickle.loads(path)
    from headrace.dataplane.loader.fork_server import serve
    serve(channel)
"""
"""The program of a server: its arguments are its name, and the descriptor of its channel."""
NAME = "headrace-loader"
FORK, WAIT, END = b"f", b"w", b"e"
NUMBER = struct.Struct("<q")

Work = Callable[[Connection, int], None]
"""The function that a worker runs, sent to it by its connection. The number is a descriptor."""


@dataclass(frozen=True)
class Place:
    """Where a consumer runs, for its workers: it may have changed since the server started."""

    path: list[str]
    folder: Path | None
    """None if it was deleted."""
    environment: dict[str, str]

    @classmethod
    def here(cls) -> Place:
        folder = None
        with suppress(FileNotFoundError):
            folder = Path.cwd()
        return cls(sys.path, folder, dict(os.environ))

    def enter(self) -> None:
        sys.path[:] = self.path
        if self.folder:
            os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)


# The consumer's side


class ForkServer:
    """A server of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, sigint_blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, NAME, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a fork has one thread
            )
        weakref.finalize(self, _close, self.owner, self.process, self.channel)
        with suppress(ConnectionError):
            self.channel.send(pickle.dumps(sys.path))

    def ask(self, request: bytes, descriptors: list[int] | None = None) -> int:
        """Send a request and return the answer; raise ConnectionError if the server has died."""
        with self.lock:
            socket.send_fds(self.channel, [request], descriptors or [])
            answer = self.channel.recv(NUMBER.size)
        if not answer:
            raise ConnectionResetError
        return int(NUMBER.unpack(answer)[0])


@dataclass(frozen=True)
class Worker:
    """A forked worker."""

    server: ForkServer
    number: int

    def exit_code(self) -> int | None:
        """Wait for its end, and return its exit code; None if the server has died as well."""
        return self._ask(WAIT)

    def end(self) -> None:
        if os.getpid() == self.server.owner:
            self._ask(END)

    def _ask(self, verb: bytes) -> int | None:
        with suppress(ConnectionError):
            return self.server.ask(verb + NUMBER.pack(self.number))
        return None


def start(connection: int, memory: int) -> Worker:
    """Start a worker, which receives its work by a connection, and is passed a descriptor."""
    descriptors = [connection, memory, *_streams()]
    try:
        return _forked(_server(), descriptors)
    except ConnectionError:  # the server was killed
        return _forked(_server(fresh=True), descriptors)


def _forked(server: ForkServer, descriptors: list[int]) -> Worker:
    number = server.ask(FORK, descriptors)
    if number < 0:
        raise OSError(-number, os.strerror(-number))
    return Worker(server, number)


def _streams() -> list[int]:
    """Return the descriptors of stdout and stderr, which a consumer may have closed."""
    with suppress(OSError):
        return [descriptor for descriptor in (1, 2) if os.fstat(descriptor)]
    return []


_current: ForkServer | None = None
_starting = threading.Lock()


def _server(*, fresh: bool = False) -> ForkServer:
    """Return the server of this process, started on first use."""
    global _current
    with _starting:
        if fresh or _current is None:
            _current = ForkServer()
        return _current


def _close(owner: int, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    if os.getpid() == owner:
        process.wait()


def _forget() -> None:
    """Leave the server to the process that this one was forked from."""
    global _current, _starting
    if _current:
        _current.channel.close()
    _current, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

# The server's side


def serve(channel: socket.socket) -> None:
    """Answer requests until the consumer ends."""
    import pyarrow  # noqa: F401 (every worker needs it; the package has imported the rest)

    with suppress(ImportError):
        import obstore.store  # noqa: F401
    # Of Python 3.12: jemalloc, which pyarrow brings, has a thread, and knows of forks.
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.freeze()  # a collection would copy the pages that forks share
    running: set[int] = set()
    while True:
        request, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # it was killed before it read an answer
            request, descriptors, _, _ = socket.recv_fds(channel, 64, 8)
        if not request:
            break
        if request == FORK:
            answer = _fork(channel, descriptors)
            if answer > 0:
                running.add(answer)
        else:
            number = int(NUMBER.unpack(request[1:])[0])
            answer = 0
            if number in running:  # until it is waited for, no other process has its number
                if request[:1] == END:
                    os.kill(number, signal.SIGTERM)
                answer = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
                running.remove(number)
        with suppress(ConnectionError):
            channel.send(NUMBER.pack(answer))
    for number in running:
        os.kill(number, signal.SIGTERM)


def _fork(channel: socket.socket, descriptors: list[int]) -> int:
    """Fork a worker; return its process number, or the negative number of an error."""
    try:
        number = os.fork()
    except OSError as error:
        number = -(error.errno or 1)
    if number == 0:
        channel.close()
        _run(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return number


def _run(connection: int, memory: int, *streams: int) -> None:
    """Do the work of a worker, and end the process."""
    code = 1
    try:
        for number, descriptor in enumerate(streams, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        consumer = Connection(connection)
        with suppress(EOFError, ConnectionError):  # the consumer has ended
            consumer.recv().enter()
            consumer.recv()(consumer, memory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
