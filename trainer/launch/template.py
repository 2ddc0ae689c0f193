"""The process from which ranks are forked: it has imported what every rank imports.

    command ──┬── template ──┬─ rank 0
              │              ├─ rank 1
              └─ launcher    └─ …

Importing torch and an engine takes most of the time before the first step. The command imports
torch, forks the template, and resolves the run while the template imports the engine. The template
runs imports alone: it queries no GPU, reads no file, starts no thread pool. So ranks can begin as
its forks, and the command may do what no fork survives, such as listing CUDA devices.

The template is the parent of the ranks and reports their exit codes. It dies with the command, and
the ranks die with it (`cluster/ranks.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn

from ...console.errors import RunError
from ..cluster.end import PlainEnd
from ..cluster.ranks import PARENT, die_with_parent, is_rank

RANK, WORKER = "headrace.trainer.launch.rank", "headrace.trainer.launch.worker"
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop. Sent to the whole process group, they must not end the
template, and the ranks with it."""


@dataclass
class RankProcess:
    """A rank, as the launcher sees it."""

    template: Template
    pid: int
    code: int | None = None
    """Exit code as in `subprocess`; None while the rank runs."""

    def poll(self) -> int | None:
        self.template.collect()
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@dataclass(frozen=True)
class RankRequest:
    """Arguments and environment for a new rank. File descriptors follow in separate messages."""

    words: Sequence[str]
    environment: Mapping[str, str]
    has_output: bool
    descriptors: Sequence[str]
    """Environment variables that tell the rank its file descriptors."""

    @property
    def num_descriptors(self) -> int:
        return self.has_output + len(self.descriptors)


@dataclass
class Template:
    """The command's side: starts ranks and collects exit codes."""

    pid: int
    connection: Connection
    ranks: dict[int, RankProcess] = field(default_factory=dict)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the template, such as an engine's imports, without waiting."""
        with contextlib.suppress(OSError):  # it was killed: `start` says so
            self.connection.send(function)

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: int | None,
        descriptors: Mapping[str, int],
    ) -> RankProcess:
        """Start a rank that writes to `output` (None: stderr). `descriptors` are file descriptors
        by the environment variable that tells the rank its copy."""
        request = RankRequest(words, environment, output is not None, list(descriptors))
        try:
            self.connection.send(request)
            for descriptor in (*([] if output is None else [output]), *descriptors.values()):
                send_handle(self.connection, descriptor, None)
            pid = self.connection.recv()
        except (EOFError, OSError):
            raise RunError(
                "the process that imports torch for the ranks ended before it had started them",
                hint="if the machine ran out of memory or of processes, free some; then start the "
                "same command again",
            ) from None
        self.ranks[pid] = rank = RankProcess(self, pid)
        return rank

    def watch(self) -> None:
        """Let the template wait for its ranks. No rank can be started afterwards."""
        with contextlib.suppress(OSError):  # it was killed: `collect` handles that
            self.connection.send(None)

    def collect(self) -> None:
        """Receive exit codes without waiting."""
        try:
            while self.connection.poll():
                pid, code = self.connection.recv()
                self.ranks[pid].code = code
        except (EOFError, OSError):  # it was killed, and its ranks die with it
            for rank in self.ranks.values():
                rank.code = -signal.SIGKILL if rank.code is None else rank.code

    def close(self) -> None:
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def rank_template(
    end: PlainEnd, *, needed: bool
) -> contextlib.AbstractContextManager[Template | None]:
    """Fork a template for `trainer run`, unless another launcher started this command as a rank."""
    if needed and not is_rank():
        return running_template(RANK, [WORKER], end)
    return contextlib.nullcontext()


@contextlib.contextmanager
def running_template(module: str, imports: Sequence[str], end: PlainEnd) -> Iterator[Template]:
    """Import modules and fork the template; kill it when the context ends.

    A rank runs the function `main` in `module`, which returns the exit code. `end` must be created
    before the imports, so that a rank runs all exit handlers.
    """
    if not sys.flags.safe_path and sys.path[0] in ("", str(Path.cwd())):  # of `python -m`
        del sys.path[0]  # a file http.py of the user's folder is not Python's http
    for imported_module in imports:
        importlib.import_module(imported_module)
    single_threaded = threading.active_count() == 1
    command_end, template_end = Pipe()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    mask, command = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK), os.getpid()
    pid = os.fork()
    if pid == 0:
        command_end.close()
        _Server(module, template_end, end, single_threaded, mask).serve(command)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    template_end.close()
    template = Template(pid, command_end)
    try:
        yield template
    finally:
        template.close()


@dataclass(frozen=True)
class _Server:
    """The template's side."""

    module: str
    connection: Connection
    end: PlainEnd
    single_threaded: bool
    """True if the command had a single Python thread when it forked the template."""
    mask: set[int | signal.Signals]

    def serve(self, command: int) -> NoReturn:
        """Start ranks until the command sends None, then wait for them. End with the command."""
        try:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have ignored it
            os.dup2(2, 1)  # stdout is the command's, for programs
            count = 0
            while os.getppid() == command and (request := self.connection.recv()) is not None:
                if not isinstance(request, RankRequest):
                    with contextlib.suppress(Exception):  # the rank that repeats it reports it
                        request()
                    continue
                descriptors = [recv_handle(self.connection) for _ in range(request.num_descriptors)]
                gc.freeze()  # a collection in a rank would copy the pages of all objects
                pid = os.fork()
                if pid == 0:
                    self._become(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                self.connection.send(pid)
                count += 1
            for _ in range(count):
                pid, status = os.wait()
                self.connection.send((pid, os.waitstatus_to_exitcode(status)))
        except (EOFError, OSError):
            pass  # the command has ended
        finally:
            os._exit(0)

    def _become(self, request: RankRequest, descriptors: list[int]) -> NoReturn:
        """Turn this fork into a rank."""
        code = 1
        try:
            command = self._prepare(request, descriptors)
            if not self.single_threaded or _cuda_was_used():
                # A thread may have held a lock, or CUDA fails after a fork: begin anew.
                os.execv(command[0], command)
            sys.argv = [self.module, *request.words]
            code = importlib.import_module(self.module).main()
        except BaseException:
            traceback.print_exc()
        finally:
            self.end.leave(code)

    def _prepare(self, request: RankRequest, descriptors: list[int]) -> list[str]:
        """Set this fork's streams, environment and signal handlers. Return the command that starts
        the rank in a new process."""
        self.connection.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = descriptors.pop(0) if request.has_output else 2
        for source, stream in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, stream)
        for source in {nothing, output} - {0, 1, 2}:
            os.close(source)
        os.environ.clear()
        os.environ.update(request.environment)
        os.environ[PARENT] = str(os.getppid())
        for variable, descriptor in zip(request.descriptors, descriptors, strict=True):
            os.set_inheritable(descriptor, True)
            os.environ[variable] = str(descriptor)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        return [sys.executable, "-m", self.module, *request.words]


def _cuda_was_used() -> bool:
    """Return True if a parent process has used CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()
