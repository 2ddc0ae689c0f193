"""What can go wrong through no fault of ours, each with what, where and how to fix it.

    UserError
    ├── MisuseError        a command is given what contradicts itself, or its inputs
    ├── ConfigError        a file or option that a person wrote is wrong (all problems at once)
    ├── InputError         a corpus cannot be read as what it is said to be
    ├── StorageError       a file or object cannot be read or written
    ├── IntegrityError     stored bytes are not the ones that were written
    ├── BusyError          another process holds what this one needs
    ├── PlanError          a mixture cannot be carried out as asked
    ├── LayoutError        a parallel layout, engine or device cannot do what is asked
    ├── CheckpointError    a checkpoint cannot be saved, or is not one that this run can load
    ├── RunError           a run cannot go on
    ├── MissingError       a package or program is not installed
    └── SeveralErrors      some of these, found together

Assertions are for our own invariants; these are for everything else. The command line prints
them without a traceback and exits with 1, of misuse with 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """An error that a person can fix: what happened, where, and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (workers, executors); keyword arguments do not survive
        # the default pickling of exceptions.
        return (_rebuild, (type(self), self.__dict__))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}".replace(" \n", "\n", 1))  # or lines of its own
        if self.hint:
            lines.append(f"  hint:  {self.hint}")
        return "\n".join(lines)


def _rebuild(kind: type[UserError], state: dict[str, object]) -> UserError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["what"])
    error.__dict__.update(state)
    return error


@dataclass(frozen=True)
class Problem:
    """One wrong value of a configuration: its dotted path, what is wrong, the line if known."""

    path: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.path}: {self.what}" if self.path else f"{place}{self.what}"


class Problems(ValueError):
    """Several things that a `__post_init__` finds wrong; each path is that within the dataclass."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


class ConfigError(UserError):
    """Everything that is wrong with one configuration, reported together."""

    def __init__(self, source: str, problems: Sequence[Problem], *, hint: str | None = None):
        ordered = sorted(problems, key=lambda problem: problem.line or 0)
        count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
        what = "\n".join([f"{count} in {source}", *(f"  {problem}" for problem in ordered)])
        super().__init__(what, hint=hint)
        self.source = source
        self.problems = tuple(ordered)


class MisuseError(UserError):
    """A command is given what contradicts itself, or its inputs."""

    exit_code = 2


class InputError(UserError):
    """A corpus cannot be read as what it is said to be."""


class StorageError(UserError):
    """A file or object cannot be read or written."""


class IntegrityError(UserError):
    """Stored bytes are not the ones that were written."""


class BusyError(UserError):
    """Another process holds what this one needs."""


class PlanError(UserError):
    """A mixture cannot be carried out as asked."""


class LayoutError(UserError):
    """A parallel layout, an engine or a device cannot do what is asked of it."""


class CheckpointError(UserError):
    """A checkpoint cannot be saved, or is not one that this run can load."""


class RunError(UserError):
    """A run cannot go on."""


class MissingError(UserError):
    """A package or program that is needed is not installed."""


class SeveralErrors(UserError):
    """Errors that do not depend on each other, told at once."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__("\nerror: ".join(map(str, errors)))
        self.exit_code = max(error.exit_code for error in errors)


def together(*steps: Callable[[], Any]) -> list[Any]:
    """What each step comes to. None waits for another: what they find wrong is told at once."""
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
