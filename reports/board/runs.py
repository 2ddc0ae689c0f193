"""Runs below folders and URLs, as their files show them: on any machine, without torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...console import yaml_text
from ...console.errors import IntegrityError, UserError, file_fault
from ...dataplane.order.plan import read_saved
from ...dataplane.runlog.reader import METRICS
from ...dataplane.runlog.writer import entry_of
from ...dataplane.storage import host_files, sealed, storage
from ...trainer.folders import folder as files
from ...trainer.folders.folder import RunFolder
from ...trainer.scores.missing import Missing, missing
from .byte_sizes import ByteSizes
from .levels import Levels

T = TypeVar("T")

DEEPEST = 4
"""Folders between a place in a store and its runs."""
NUMBERED = re.compile(r"(runs|trials)/[\d-]+")
"""The last parts of the path of a run that belongs to a request."""
BY_STARTS = frozenset({files.ABOUT, METRICS, files.EVENTS})
"""Files that a start writes; a run.yaml without them may be one that a person has written."""
STARTS = ("start", "resume")
SKIPPED = ("spike", "not finite")
"""Events of skipped steps."""
ENDS = {"finish": "finished", "stop": "interrupted", "fail": "failed"}
NOT_STARTED = "not started"
"""No start has joined its ranks."""
RUNNING = "running"
KILLED = "killed"
"""The last event is no end, and the process that held the folder's lock has ended."""
UNSCORED = "unscored"
"""All steps were taken, and the scores of the last checkpoint are missing."""


def status_of(
    event: dict[str, Any] | None, *, ended: bool = False, missing: Sequence[Missing] = ()
) -> str:
    """Return the status of a run whose last event this is. `ended`: its process has ended;
    `missing`: scores that it was to have."""
    if event is None:
        return KILLED if ended else NOT_STARTED
    status = ENDS.get(event["event"], RUNNING)
    if status == RUNNING and ended:
        status = KILLED
    owed = any(each.reason is None for each in missing)
    return UNSCORED if status != RUNNING and owed else status


def shortest_names(folders: Sequence[Path]) -> list[str]:
    """Return the fewest last parts of each path that tell it from the other paths. A number is no
    name: the run of a request is called `anneal/runs/00`."""
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for parts in paths:
        count = 3 if NUMBERED.fullmatch("/".join(parts[-2:])) else 1
        while count < len(parts) and sum(path[-count:] == parts[-count:] for path in paths) > 1:
            count += 1
        names.append(str(Path(*parts[-count:])))
    return names


def runs_below(place: str, depth: int = DEEPEST) -> Iterator[str]:
    """Yield the runs in and below a folder or URL."""
    if not storage.is_local(place):
        names = storage.names(place)
        if files.RUN in names and not BY_STARTS.isdisjoint(names):
            yield place.rstrip("/")
        elif depth:
            for name in names:
                if "." not in name:
                    yield from runs_below(storage.join(place, name), depth - 1)
        return
    path = storage.local_path(place)
    if begun(path):
        yield str(path)
    elif path.is_dir():
        for inner in inner_folders(path):
            yield from runs_below(str(inner))


def begun(folder: Path) -> bool:
    """Return True if a folder holds a run that this user may read."""
    try:
        return RunFolder(folder).begun
    except PermissionError:
        return False


def inner_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder in which runs may be, in order; none if this user may not look
    into it, or it has just been deleted."""
    try:
        return [
            inner
            for inner in sorted(folder.iterdir())
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith(".")
        ]
    except (PermissionError, FileNotFoundError):
        return []


def settings_of(run: str) -> dict[str, Any]:
    """Return all settings of a run, its model and its mixture, by dotted path."""
    found = _yaml(run, files.RUN)
    parts = {"model": _yaml(run, files.MODEL), "mixture": _yaml(run, files.MIXTURE)}
    return dict(_flat({**found, **parts}))


def stored_plan(run: str) -> dict[str, Any] | None:
    """Return the plan of a run as it is stored; None for synthetic rows."""
    file = storage.join(run, files.PLAN)
    if not storage.exists(file):
        return None
    try:
        found = read_saved(file)
        last = found["phases"][-1]
        int(last["first_step"] + last["rows"] // last["batch_rows"])
    except (ValueError, TypeError, LookupError):
        hint = "restore it from a copy"
        raise IntegrityError(f"{file} is not a whole plan", hint=hint) from None
    return found


def _yaml(run: str, name: str) -> dict[str, Any]:
    """Return the contents of a YAML file of the run, or nothing."""
    url = storage.join(run, name)
    if not storage.exists(url):
        return {}
    return dict(yaml_text.parse(storage.read(url).decode(), source=url)[0])


class BoardRun:
    """A run of the page."""

    def __init__(self, url: str) -> None:
        self.url = url
        place = str(storage.local_path(url).resolve()) if storage.is_local(url) else url
        self.id = hashlib.sha256(place.encode()).hexdigest()[:12]  # one run, whatever its path
        self.number = 0
        """The lowest that no other run of the page had when this one appeared: its colour."""
        folder = _levels_folder(url, self.id)
        self.metrics = Levels(storage.join(url, METRICS), folder / "metrics")
        self.evaluations = Levels(storage.join(url, files.EVALUATIONS), folder / "evaluations")
        self.signals = Levels(storage.join(url, files.SIGNALS), folder / "signals")
        self.events: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        """All settings of the run, its model and its mixture, by dotted path; empty if they cannot
        be read."""
        self.plan: dict[str, Any] | None = None
        """The plan as it is stored; None for synthetic rows, or if it cannot be read."""
        self.version = 0
        """Number of times that settings or plan were read: a start may change them."""
        self.sizes: ByteSizes | None = None
        """Bytes per token of the sources, once `measure` has read them."""
        self.sizes_problem: str | None = None
        """Reason for which they are not known."""
        self.problem: str | None = None
        """Errors of the run's files; its curves end before them."""
        self._states: dict[str, object] = {}
        """State of the small files when they were read."""
        self._damage: dict[str, str] = {}
        """Errors of the small files."""

    def refresh(self) -> Iterator[None]:
        """Read what is new in the run's files, a part at a time. A damaged file hides no other."""
        found = []
        for part in (self._small_files, *(each.refresh for each in self._levels)):
            try:
                yield from part()
            except UserError as error:
                found.append(str(error))
            except OSError as error:
                found.append(f"{error.filename or self.url}: {file_fault(error)[0]}")
        self.problem = "\n".join([*self._damage.values(), *found]) or None

    @property
    def plan_problem(self) -> str | None:
        """Error of the stored plan, if it cannot be read."""
        return self._damage.get(files.PLAN)

    @property
    def tokenizer(self) -> str | None:
        """What identifies the tokens of the run; None while it is not known."""
        if self.plan is not None:
            return str(self.plan["tokenizer"])
        vocabulary = self.settings.get("model.vocab_size")
        return None if vocabulary is None else f"synthetic {vocabulary}"

    def measure(self) -> None:
        """Read the bytes per token of the run's sources from their datasets, or note why not."""
        try:
            if self.plan is None:
                synthetic = f"the rows of {self.url} are synthetic and have no bytes"
                raise UserError(self.plan_problem or synthetic)
            sizes = ByteSizes.measured(_urls(self.plan), self._held_out())
            if unknown := self.evaluated - sizes.held_out.keys():
                raise UserError(f"{self.url} does not name those of {', '.join(sorted(unknown))}")
            self.sizes = sizes
        except UserError as error:
            self.sizes_problem = error.what
        except (OSError, ValueError, LookupError) as error:  # a file is damaged
            self.sizes_problem = f"{self.url}: {error}"

    @property
    def evaluated(self) -> set[str]:
        """The held-out sources that have curves."""
        return {
            name.removeprefix("loss/")
            for name in self.evaluations.index.series
            if name.startswith("loss/")
        }

    def _held_out(self) -> dict[str, str]:
        """Return the URLs of the held-out datasets, by name."""
        about = storage.join(self.url, files.ABOUT)
        if not storage.exists(about):
            return {}
        name = sealed.unsealed(about, storage.read(about), hint="resume the run")["held_out"]
        file = storage.join(self.url, name) if name else None
        if file is None or not storage.exists(file):
            return {}
        return _urls(read_saved(file))

    @property
    def _levels(self) -> tuple[Levels, ...]:
        return self.metrics, self.evaluations, self.signals

    def _small_files(self) -> Iterator[None]:
        if not storage.is_local(self.url):
            storage.names(self.url)  # a new listing: fsspec takes sizes from the last one
        self.events = self._lines(files.EVENTS, self.events, ("time", "event", "step"))
        self.scores = self._lines(files.SCORES, self.scores, ("step", "asked", "failed", "tasks"))
        states = [self._state(name) for name in (files.RUN, files.MODEL, files.MIXTURE)]
        settings = self._reread("settings", states, settings_of, self.settings)
        plan = self._reread(files.PLAN, self._state(files.PLAN), stored_plan, self.plan)
        if settings is not self.settings or plan is not self.plan:
            self.version += 1
            self.sizes = self.sizes_problem = None
        self.settings, self.plan = settings, plan
        yield

    def _reread(self, name: str, state: object, read: Callable[[str], T], before: T) -> T:
        """Return the present content of the run's files; the earlier one if they have not changed,
        or cannot be read: then the next look tries again."""
        if state == self._states.get(name, ...):
            return before
        self._damage.pop(name, None)
        try:
            found = read(self.url)
        except UserError as error:
            self._damage[name] = str(error)
            return before
        self._states[name] = state
        return found

    def _state(self, name: str) -> object:
        """Return what changes with a file; None if there is none."""
        url = storage.join(self.url, name)
        if not storage.exists(url):
            return None
        if not storage.is_local(url):
            return storage.size(url)
        found = storage.local_path(url).stat()
        return found.st_size, found.st_mtime_ns, found.st_ino

    def levels_of(self, name: str) -> Levels:
        """Return the levels that hold a curve of the training: of every step, or of few."""
        return self.signals if name in self.signals.index.series else self.metrics

    @property
    def status(self) -> str:
        ended = storage.is_local(self.url) and RunFolder(self.url).holder_has_ended
        last = self.events[-1] if self.events else None
        return status_of(last, ended=ended, missing=self.missing)

    @property
    def missing(self) -> list[Missing]:
        """Scores that the run was to have."""
        saved = {each["step"] for each in self.events if each["event"] == "checkpoint"}
        last = self.last_step if self.last_step in saved else None
        own = {name: self.settings.get(f"scores.{name}") for name in ("limit", "ema")}
        return missing(self.settings.get("scores.tasks"), self.scores, last, **own)

    @property
    def last_step(self) -> int | None:
        """One past the last step of the plan."""
        if self.plan:
            phase = self.plan["phases"][-1]
            return int(phase["first_step"] + phase["rows"] // phase["batch_rows"])
        steps = self.settings.get("synthetic.steps")
        return None if steps is None else int(steps)

    def _lines(
        self, name: str, before: list[dict[str, Any]], fields: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the whole lines of a small file that have some fields; those of before, if it has
        not changed."""

        def read(run: str) -> list[dict[str, Any]]:
            file = storage.join(run, name)
            lines = storage.read(file).splitlines(keepends=True) if state else []
            entries = [entry_with(line, fields) for line in lines if line.endswith(b"\n")]
            damaged = [number for number, entry in enumerate(entries, 1) if entry is None]
            if damaged:
                count = f"{len(damaged)} invalid line{'s' * (len(damaged) != 1)}"
                self._damage[name] = f"{file} has {count}, the first is line {damaged[0]}"
            return [entry for entry in entries if entry is not None]

        state = self._state(name)
        return self._reread(name, state, read, before)


def entry_with(line: bytes, fields: Sequence[str]) -> dict[str, Any] | None:
    """Return the object of a whole line; None if it is none, or lacks a field."""
    entry = entry_of(line)
    return entry if entry is not None and entry.keys() >= set(fields) else None


def _levels_folder(url: str, id: str) -> Path:
    """Return the folder of a run's levels: beside the run, or of this user where that is not
    writable."""
    if storage.is_local(url):
        root = storage.local_path(url)
        own = root / files.BOARD
        if os.access(own if own.exists() else root, os.W_OK):
            return own
    return host_files.folder().with_name("headrace-board") / id


def _urls(plan: dict[str, Any]) -> dict[str, str]:
    """Return the URLs of a stored plan's datasets, by source."""
    return {source["name"]: source["url"] for source in plan["sources"]}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif path and value is not None and value != {}:
        yield path, value
