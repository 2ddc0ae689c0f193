"""User mistakes and storage faults: errors that say what failed, where, and how to fix it.

    UserError
    ├── MisuseError        the arguments of a command contradict each other, or its inputs
    ├── ConfigError        a configuration file or option is wrong (all problems at once)
    ├── InputError         a corpus does not have the format that it should have
    ├── StorageError       a file or object cannot be read or written
    ├── IntegrityError     stored bytes differ from those that were written
    ├── BusyError          another process holds a lock
    ├── PlanError          a mixture or a plan cannot be carried out
    ├── LayoutError        a parallel layout, engine or device does not support the request
    ├── CheckpointError    a checkpoint cannot be saved, or does not fit the run that loads it
    ├── RunError           a run cannot continue
    ├── MissingError       a package or program is not installed
    └── SeveralErrors      several of these, reported together

Assertions are for invariants of the code; these errors are for everything else. The command line
prints them without a traceback and exits with 1. It exits with 2 if the command line itself is
wrong, on every machine: a MisuseError, or a ConfigError whose problems are all in overrides.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

HINT = "  hint:  "
"""Start of an error's last line."""


class UserError(Exception):
    """An error that the user can fix: what failed, where, and a hint how to fix it."""

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (workers, executors), and the default pickling of
        # exceptions loses keyword arguments.
        return (_rebuild, (type(self), self.__dict__))

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  where: {self.where}".replace(" \n", "\n", 1))  # or separate lines
        if self.hint:
            lines.append(f"{HINT}{self.hint}")
        return "\n".join(lines)


def _rebuild(kind: type[UserError], state: dict[str, object]) -> UserError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class ConfigProblem:
    """A wrong value in a configuration: dotted path, message, and line number if known."""

    path: str
    message: str
    line: int | None = None
    typed: bool = False
    """True if the value is on the command line."""

    def __str__(self) -> str:
        prefix = f"line {self.line}: " if self.line else ""
        return f"{prefix}{self.path}: {self.message}" if self.path else f"{prefix}{self.message}"


class ConfigProblems(ValueError):
    """Several problems of a `__post_init__`; paths are relative to the dataclass."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


class ConfigError(UserError):
    """All problems of a configuration, reported together."""

    def __init__(self, source: str, problems: Sequence[ConfigProblem], *, hint: str | None = None):
        ordered = sorted(problems, key=lambda problem: problem.line or 0)
        count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
        message = "\n".join([f"{count} in {source}", *(f"  {problem}" for problem in ordered)])
        super().__init__(message, hint=hint)
        self.source = source
        self.problems = tuple(ordered)
        self.exit_code = 2 if all(problem.typed for problem in ordered) else 1


class MisuseError(UserError):
    """The arguments of a command contradict each other, or its inputs."""

    exit_code = 2


class InputError(UserError):
    """A corpus does not have the format that it should have."""


class StorageError(UserError):
    """A file or object cannot be read or written."""


class IntegrityError(UserError):
    """Stored bytes differ from those that were written."""


class BusyError(UserError):
    """Another process holds a lock."""


class PlanError(UserError):
    """A mixture or a plan cannot be carried out."""


class LayoutError(UserError):
    """A parallel layout, an engine or a device does not support the request."""


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or does not fit the run that loads it."""


class RunError(UserError):
    """A run cannot continue."""


class MissingError(UserError):
    """A required package or program is not installed."""


class SeveralErrors(UserError):
    """Several independent errors, reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("\nerror: ".join(map(str, errors)))
        self.errors = tuple(errors)
        self.exit_code = max(error.exit_code for error in errors)


FILE_FAULTS = {
    errno.EROFS: ("the file system is read-only", "choose a folder that can be written to"),
    errno.ENOSPC: ("the disk is full", "free some space and run the same command again"),
    errno.EDQUOT: ("the disk quota is used up", "free some space and run the same command again"),
    errno.EFBIG: (
        "the file is larger than the file system or `ulimit -f` allows",
        "raise the limit, or choose another disk",
    ),
    errno.EACCES: ("access is denied", "check the permissions of the file and of its folders"),
    errno.EPERM: ("access is denied", "check the permissions of the file and of its folders"),
    errno.ENOTDIR: ("a component of its path is a file, not a folder", "choose another folder"),
    errno.EEXIST: ("a component of its path is a file, not a folder", "choose another folder"),
    errno.EISDIR: ("it is a folder", "name a file"),
    errno.ENAMETOOLONG: ("its name is too long", "choose a shorter name"),
    errno.EMFILE: ("too many files are open", "raise the limit of open files (`ulimit -n`)"),
    errno.EIO: ("the disk reports an error", "check the disk"),
}
"""Reason and hint for local file errors that the user can fix, by errno."""


def file_fault(error: OSError) -> tuple[str, str | None]:
    """Return why a local file failed, and a hint or None."""
    if error.errno in FILE_FAULTS:
        return FILE_FAULTS[error.errno]
    return error.strerror or str(error) or type(error).__name__, None


def run_all(*steps: Callable[[], Any]) -> list[Any]:
    """Run independent steps and return their results; raise all errors together."""
    results: list[Any] = []
    errors: dict[str, UserError] = {}
    for step in steps:
        try:
            results.append(step())
        except UserError as error:
            errors.setdefault(str(error), error)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise SeveralErrors(list(errors.values()))
    return results
