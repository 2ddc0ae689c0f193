"""Run ordinary commands one after the other, each printed before it runs: it can be pasted."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ...console import command
from ...console.errors import RunError
from ...dataplane.runlog import writer as lines
from ..cluster.ranks import die_with_parent
from ..folders.folder import RunFolder


@dataclass(frozen=True)
class Shell:
    folder: Path
    """Working directory of the commands."""
    program: str
    """Command that a person runs again to go on."""

    def run(self, *words: str, expected: Sequence[int] = (0,)) -> int:
        """Print a command, run it, and return its exit code, one of `expected`."""
        command.say(f"\n$ {join(words)}")
        child = subprocess.Popen(words, cwd=self.folder, env=_environment())
        try:
            code = _wait(child)
        except (KeyboardInterrupt, SystemExit):
            command.say(f"to go on, run the same `{self.program}` again")
            raise
        if code not in expected:
            raise RunError(
                f"`{join(words)}` ended with exit code {code}",
                where=None if self.folder == Path() else str(self.folder),
                hint=f"its error is printed above; once that is mended, the same `{self.program}` "
                "goes on from here",
            )
        return code

    @contextmanager
    def background(self, *words: str) -> Iterator[None]:
        """Print a command, and run it beside the commands of the `with` block."""
        command.say(f"\n$ {join(words)} &")
        child = subprocess.Popen(
            words,
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            preexec_fn=_leave_to_parent,
        )
        try:
            yield
        finally:
            child.terminate()
            child.wait()


def join(words: Sequence[str]) -> str:
    """Return a line that a shell reads as these words."""
    return " ".join(
        f'"{word}"' if "'" in word and not re.search(r'["$`\\!]', word) else shlex.quote(word)
        for word in words
    )


def note(text: str) -> None:
    """Print what the next commands are for."""
    command.say(f"\n# {text}")


def has_finished(run: RunFolder) -> bool:
    """Return True if the run's last event is its end."""
    events = list(lines.read(run.events))
    return bool(events) and events[-1]["event"] == "finish"


def _environment() -> dict[str, str]:
    """Return the environment, with this installation's commands first on the path."""
    programs = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}


def _leave_to_parent() -> None:
    """Let the parent end this process: Ctrl-C would reach it directly."""
    os.setpgrp()
    die_with_parent()


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a command, which saves and ends by itself.

    Ctrl-C reaches it directly, and SIGTERM is forwarded.
    """
    signals: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if number == signal.SIGTERM:
            child.terminate()

    handlers: dict[int, Callable[..., object] | int | None] = {
        number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        code = child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if signals:
        if code == command.INTERRUPTED:  # the command has said so
            raise SystemExit(code)
        raise KeyboardInterrupt
    return code
