"""A shell whose commands, `python -` too, are forks of a process that has imported torch.

    with ForkedShell(folder) as shell:
        code, output = shell.run("trainer list runs | head -n 1")

bash finds a small program under the name of each command. The program sends its words, folder,
environment and standard streams to a server, and ends with the exit code that the server returns.
So pipes, redirections, loops and `set -e` are those of a real shell, and a command costs a few
hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from support.ranks import forked
from support.ranks.ranks import forkserver

STDIN = "<stdin>"
MODULES = {
    "headrace": "headrace.console.headrace",
    "mixtures": "headrace.mixtures.cli",
    "python": STDIN,
    "tokenize": "headrace.tokenize.cli",
    "trainer": "headrace.trainer.cli",
}
LARGEST = 1 << 20
"""Bytes of a part of a request."""
END = b"\0\0"
PROGRAM = (
    f"#!{sys.executable} -IS"
    + """
import os, socket, sys
folder, name = os.path.split(sys.argv[0])
with socket.socket(socket.AF_UNIX) as server:
    server.connect(folder + "/server")
    texts = [os.getcwd(), name, str(len(sys.argv) - 1), *sys.argv[1:]]
    texts += ["=".join(each) for each in os.environ.items()]
    request = "\\0".join(texts) + "\\0\\0"
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"1"))
"""
)


class ForkedShell:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = tempfile.TemporaryDirectory()
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(f"{self.programs.name}/server")
        self.listening.listen(64)
        for name in MODULES:
            program = Path(self.programs.name, name)
            program.write_text(PROGRAM)
            program.chmod(0o700)

    def __enter__(self) -> ForkedShell:
        self.server = forkserver().Process(target=_serve, args=(self.listening,), daemon=True)
        self.server.start()
        self.listening.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.server.kill()
        self.server.join()
        self.programs.cleanup()

    def run(self, script: str) -> tuple[int, str]:
        """Return the exit code of a script and what it printed on either stream."""
        path = os.pathsep.join([self.programs.name, os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout


def _serve(listening: socket.socket) -> None:
    """Start a process for each request; it sends the exit code of the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    while True:
        asking, _ = listening.accept()
        with asking:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                with forked.ended():
                    asking.send(str(_answer(asking)).encode())


def _answer(asking: socket.socket) -> int:
    """Run the command of a request; return its exit code."""
    request, streams, _, _ = socket.recv_fds(asking, LARGEST, 3)
    while not request.endswith(END):
        request += asking.recv(LARGEST)
    folder, name, count, *texts = request.removesuffix(END).decode().split("\0")
    words, variables = texts[: int(count)], texts[int(count) :]
    if (command := os.fork()) == 0:
        asking.close()
        environment = dict(variable.split("=", 1) for variable in variables)
        with forked.ended():
            _become([MODULES[name], *words], environment, Path(folder), streams)
    for stream in streams:
        os.close(stream)
    _, status = os.waitpid(command, 0)
    return os.waitstatus_to_exitcode(status)


def _become(
    words: list[str], environment: dict[str, str], folder: Path, streams: list[int]
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})  # ranks take a thread for each core
    if words[0] != STDIN:
        forked.become([sys.executable, "-m", *words], environment, folder, streams)
        return
    assert words[1:] == ["-"], "a forked Python runs only programs of stdin"
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    with open(0) as program:
        exec(compile(program.read(), STDIN, "exec"), {"__name__": "__main__"})
