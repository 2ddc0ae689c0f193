"""Find runs below folders and URLs, and read their files on any machine, without torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...console import yaml_text
from ...console.errors import IntegrityError, UserError, file_fault
from ...dataplane.order.plan import read_saved, resolve_url
from ...dataplane.runlog.reader import METRICS
from ...dataplane.runlog.writer import decode_line
from ...dataplane.storage import host_files, sealed, storage
from ...trainer.folders import folder as files
from ...trainer.folders.folder import RunFolder
from ...trainer.scores.missing import ScoreGap, find_gaps
from .byte_sizes import ByteSizes
from .levels import Levels
from .notes import Notes, read_notes

T = TypeVar("T")

MAX_DEPTH = 4
"""Folder levels between a place in a store and its runs, at most."""
NUMBER = "colour"
"""File beside a run's levels, with the number of its colour."""
NUMBERED = re.compile(r"(runs|trials)/[\d-]+")
"""Path end of a run that a request started."""
WRITTEN_BY_STARTS = frozenset({files.ABOUT, METRICS, files.EVENTS})
"""Files that a start writes; without them, a person may have written the run.yaml."""
STARTS = ("start", "resume")
SKIPPED = ("spike", "not finite")
"""Events about skipped steps."""
ENDS = {"finish": "finished", "stop": "interrupted", "fail": "failed"}
NOT_STARTED = "not started"
"""No event: no start's ranks have joined."""
RUNNING = "running"
KILLED = "killed"
"""The last event is not an end, and the process that held the folder's lock has ended."""
UNSCORED = "unscored"
"""All steps were taken, and the last checkpoint's scores are missing."""


def derive_status(
    event: dict[str, Any] | None, *, ended: bool = False, gaps: Sequence[ScoreGap] = ()
) -> str:
    """Derive a run's status from its last event, from whether its process has `ended`, and from
    its missing scores."""
    if event is None:
        return KILLED if ended else NOT_STARTED
    status = ENDS.get(event["event"], RUNNING)
    if status == RUNNING and ended:
        status = KILLED
    can_be_scored = any(gap.reason is None for gap in gaps)
    return UNSCORED if status != RUNNING and can_be_scored else status


def shortest_names(folders: Sequence[Path]) -> list[str]:
    """Return each path's shortest unique end. A number is no name: a request's run is called
    `anneal/runs/00`."""
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for path in paths:
        length = 3 if NUMBERED.fullmatch("/".join(path[-2:])) else 1
        while (
            length < len(path)
            and sum(candidate[-length:] == path[-length:] for candidate in paths) > 1
        ):
            length += 1
        names.append(str(Path(*path[-length:])))
    return names


def find_runs(place: str, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the runs in and below a folder or URL."""
    if not storage.is_local(place):
        names = storage.names(place)
        if files.RUN in names and not WRITTEN_BY_STARTS.isdisjoint(names):
            yield place.rstrip("/")
        elif depth:
            for name in names:
                if "." not in name:
                    yield from find_runs(storage.join(place, name), depth - 1)
        return
    path = storage.local_path(place)
    if holds_run(path):
        yield str(path)
    elif path.is_dir():
        for inner in inner_folders(path):
            yield from find_runs(str(inner))


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run that this user may read."""
    try:
        return RunFolder(folder).begun
    except PermissionError:
        return False


def inner_folders(folder: Path) -> list[Path]:
    """Return the subfolders in which runs may be, sorted; none if this user may not read the
    folder, or it has just been deleted."""
    try:
        return [
            inner
            for inner in sorted(folder.iterdir())
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith(".")
        ]
    except (PermissionError, FileNotFoundError):
        return []


def read_settings(run: str) -> dict[str, Any]:
    """Read all settings by dotted path: the run's, its model's and its mixture's."""
    settings = {
        **_read_yaml(run, files.RUN),
        "model": _read_yaml(run, files.MODEL),
        "mixture": _read_yaml(run, files.MIXTURE),
    }
    return dict(_flatten(settings))


def read_plan(run: str) -> dict[str, Any] | None:
    """Read a run's stored plan; None for synthetic rows."""
    file = storage.join(run, files.PLAN)
    if not storage.exists(file):
        return None
    try:
        plan = read_saved(file)
        _end_step(plan)
    except (ValueError, TypeError, LookupError):
        hint = "restore it from a copy"
        raise IntegrityError(f"{file} is not a whole plan", hint=hint) from None
    return plan


def _end_step(plan: dict[str, Any]) -> int:
    """Return the plan's end: one past its last step."""
    phase = plan["phases"][-1]
    return int(phase["first_step"] + phase["rows"] // phase["batch_rows"])


def _read_yaml(run: str, name: str) -> dict[str, Any]:
    """Read a YAML file in the run's folder; empty if there is none."""
    url = storage.join(run, name)
    if not storage.exists(url):
        return {}
    return dict(yaml_text.parse(storage.read(url).decode(), source=url)[0])


class BoardRun:
    """A run on the page."""

    def __init__(self, url: str) -> None:
        self.url = url
        place = str(storage.local_path(url).resolve()) if storage.is_local(url) else url
        # a run has the same id under any path that leads to it
        self.id = hashlib.sha256(place.encode()).hexdigest()[:12]
        folder = _levels_folder(url, self.id)
        self._number_file = folder / NUMBER
        self.number = self._read_number()
        """Number of the run's colour, kept in its folder; None before a board has chosen it."""
        self.metrics = Levels(storage.join(url, METRICS), folder / "metrics")
        self.evaluations = Levels(storage.join(url, files.EVALUATIONS), folder / "evaluations")
        self.signals = Levels(storage.join(url, files.SIGNALS), folder / "signals")
        self.events: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        """All settings by dotted path: the run's, its model's and its mixture's; empty if they
        cannot be read."""
        self.plan: dict[str, Any] | None = None
        """The stored plan; None for synthetic rows, or if it cannot be read."""
        self.notes = Notes()
        self.version = 0
        """How often settings or plan were read: a start may change them."""
        self.sizes: ByteSizes | None = None
        """Bytes per token by source, after `measure`."""
        self.sizes_problem: str | None = None
        """Why `measure` failed."""
        self.problem: str | None = None
        """Errors in the run's files; curves end at the first damaged line."""
        self._states: dict[str, object] = {}
        """The small files' states at their last reading."""
        self._damage: dict[str, str] = {}
        """Errors in the small files, by file."""

    def _read_number(self) -> int | None:
        try:
            return int(self._number_file.read_bytes())
        except (OSError, ValueError):  # none yet, or not ours
            return None

    def keep_number(self, number: int) -> None:
        """Give the run a colour that it has in every board."""
        self.number = number
        with contextlib.suppress(OSError):  # a full disk: the colour holds for this board
            self._number_file.parent.mkdir(parents=True, exist_ok=True)
            storage.write(str(self._number_file), str(number).encode())

    def refresh(self) -> Iterator[None]:
        """Read new records incrementally. An error in a file does not stop the others."""
        problems = []
        for refresh in (self._read_small_files, *(levels.refresh for levels in self._levels)):
            try:
                yield from refresh()
            except UserError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{error.filename or self.url}: {file_fault(error)[0]}")
        self.problem = "\n".join([*self._damage.values(), *problems]) or None

    @property
    def plan_problem(self) -> str | None:
        """The stored plan's error, if it cannot be read."""
        return self._damage.get(files.PLAN)

    @property
    def tokenizer(self) -> str | None:
        """Identity of the run's tokens; None while it is not known."""
        if self.plan is not None:
            return str(self.plan["tokenizer"])
        vocabulary = self.settings.get("model.vocab_size")
        return None if vocabulary is None else f"synthetic {vocabulary}"

    def measure(self) -> None:
        """Measure the bytes per token for the run's sources, or record why that fails."""
        try:
            if self.plan is None:
                synthetic = f"the rows of {self.url} are synthetic and have no bytes"
                raise UserError(self.plan_problem or synthetic)
            sizes = ByteSizes.measure(_urls(self.plan), self._held_out_urls())
            if unknown := self.evaluated - sizes.held_out.keys():
                raise UserError(f"{self.url} does not name those of {', '.join(sorted(unknown))}")
            self.sizes = sizes
        except UserError as error:
            self.sizes_problem = error.message
        except (OSError, ValueError, LookupError) as error:  # a file is damaged
            self.sizes_problem = f"{self.url}: {error}"

    @property
    def evaluated(self) -> set[str]:
        """Held-out sources that have curves."""
        return {
            name.removeprefix("loss/")
            for name in self.evaluations.index.series
            if name.startswith("loss/")
        }

    def _held_out_urls(self) -> dict[str, str]:
        """Return the held-out dataset URLs by source."""
        about = storage.join(self.url, files.ABOUT)
        if not storage.exists(about):
            return {}
        name = sealed.unseal(about, storage.read(about), hint="resume the run")["held_out"]
        file = storage.join(self.url, name) if name else None
        if file is None or not storage.exists(file):
            return {}
        return _urls(read_saved(file))

    @property
    def _levels(self) -> tuple[Levels, ...]:
        return self.metrics, self.evaluations, self.signals

    def _read_small_files(self) -> Iterator[None]:
        if not storage.is_local(self.url):
            storage.names(self.url)  # renews the listing from which fsspec takes sizes
        self.events = self._read_lines(files.EVENTS, self.events, ("time", "event", "step"))
        self.scores = self._read_lines(
            files.SCORES, self.scores, ("step", "asked", "failed", "tasks")
        )
        self.notes = self._reread(files.NOTES, self._state(files.NOTES), read_notes, self.notes)
        states = [self._state(name) for name in (files.RUN, files.MODEL, files.MIXTURE)]
        settings = self._reread("settings", states, read_settings, self.settings)
        plan = self._reread(files.PLAN, self._state(files.PLAN), read_plan, self.plan)
        if settings is not self.settings or plan is not self.plan:
            self.version += 1
            self.sizes = self.sizes_problem = None
        self.settings, self.plan = settings, plan
        yield

    def _reread(self, name: str, state: object, read: Callable[[str], T], previous: T) -> T:
        """Read files again if their state has changed. Return the previous content if it has not,
        or if they cannot be read; then the next poll tries again."""
        if state == self._states.get(name, ...):
            return previous
        self._damage.pop(name, None)
        try:
            content = read(self.url)
        except UserError as error:
            self._damage[name] = str(error)
            return previous
        self._states[name] = state
        return content

    def _state(self, name: str) -> object:
        """Return a value that changes with the file; None if there is no file."""
        url = storage.join(self.url, name)
        if not storage.exists(url):
            return None
        if not storage.is_local(url):
            return storage.size(url)
        stat = storage.local_path(url).stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def training_levels(self, name: str) -> Levels:
        """Return the levels that have a training curve: the signals', or those for all steps."""
        return self.signals if name in self.signals.index.series else self.metrics

    @property
    def status(self) -> str:
        ended = storage.is_local(self.url) and RunFolder(self.url).holder_has_ended
        last = self.events[-1] if self.events else None
        return derive_status(last, ended=ended, gaps=self.score_gaps)

    @property
    def score_gaps(self) -> list[ScoreGap]:
        """Scores that the run should have and has not."""
        saved_steps = {event["step"] for event in self.events if event["event"] == "checkpoint"}
        last = self.last_step if self.last_step in saved_steps else None
        options = {name: self.settings.get(f"scores.{name}") for name in ("limit", "ema")}
        return find_gaps(self.settings.get("scores.tasks"), self.scores, last, **options)

    @property
    def last_step(self) -> int | None:
        """One past the plan's last step."""
        if self.plan:
            return _end_step(self.plan)
        steps = self.settings.get("synthetic.steps")
        return None if steps is None else int(steps)

    def _read_lines(
        self, name: str, previous: list[dict[str, Any]], fields: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Read a small file's lines, and record lines without all `fields` as damage. Return the
        previous lines if the file has not changed."""

        def read(run: str) -> list[dict[str, Any]]:
            file = storage.join(run, name)
            lines = storage.read(file).splitlines(keepends=True) if state else []
            entries = [parse_entry(line, fields) for line in lines if line.endswith(b"\n")]
            invalid = [number for number, entry in enumerate(entries, 1) if entry is None]
            if invalid:
                count = f"{len(invalid)} invalid line{'s' * (len(invalid) != 1)}"
                self._damage[name] = f"{file} has {count}, the first is line {invalid[0]}"
            return [entry for entry in entries if entry is not None]

        state = self._state(name)
        return self._reread(name, state, read, previous)


def parse_entry(line: bytes, fields: Sequence[str]) -> dict[str, Any] | None:
    """Parse a line; None if it is invalid or lacks one of `fields`."""
    entry = decode_line(line)
    return entry if entry is not None and entry.keys() >= set(fields) else None


def _levels_folder(url: str, id: str) -> Path:
    """Return the folder for a run's levels: in the run's folder, or in the user's cache if that is
    not writable."""
    if storage.is_local(url):
        root = storage.local_path(url)
        folder = root / files.BOARD
        if os.access(folder if folder.exists() else root, os.W_OK):
            return folder
    return host_files.folder().with_name("headrace-board") / id


def _urls(plan: dict[str, Any]) -> dict[str, str]:
    """Return a stored plan's dataset URLs by source."""
    folder = plan["folder"]
    return {source["name"]: resolve_url(source["url"], folder) for source in plan["sources"]}


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    elif path and value is not None and value != {}:
        yield path, value
