"""Runs below folders and URLs, as their files show them: on any machine, without torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...console import yaml_text
from ...console.errors import UserError
from ...dataplane.runlog.reader import METRICS
from ...dataplane.storage import host_files, storage
from .. import folder as files
from ..folder import RunFolder
from ..scores.missing import Missing, missing
from .levels import Levels

DEEPEST = 4
"""Folders between a place in a store and its runs."""
STARTS = ("start", "resume")
SKIPPED = ("spike", "not finite")
"""Events of skipped steps."""
ENDS = {"finish": "finished", "stop": "interrupted", "fail": "failed"}
NOT_STARTED = "not started"
"""No start has joined its ranks; a folder of settings that people wrote looks the same."""
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
    """Return the fewest last parts of each path that tell it from the other paths."""
    paths = [folder.resolve().parts for folder in folders]
    names = []
    for parts in paths:
        count = 1
        while count < len(parts) and sum(path[-count:] == parts[-count:] for path in paths) > 1:
            count += 1
        names.append(str(Path(*parts[-count:])))
    return names


def runs_below(place: str, depth: int = DEEPEST) -> Iterator[str]:
    """Yield the runs in and below a folder or URL."""
    if not storage.is_local(place):
        names = storage.names(place)
        if files.RUN in names:
            yield place.rstrip("/")
        elif depth:
            for name in names:
                if "." not in name:
                    yield from runs_below(storage.join(place, name), depth - 1)
        return
    path = storage.local_path(place)
    if RunFolder(path).begun:
        yield str(path)
    elif path.is_dir():
        for inner in sorted(path.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and not inner.name.startswith("."):
                yield from runs_below(str(inner))


def settings_of(run: str) -> dict[str, Any]:
    """Return all settings of a run, its model and its mixture, by dotted path."""
    found = _yaml(run, files.RUN)
    parts = {"model": _yaml(run, files.MODEL), "mixture": _yaml(run, files.MIXTURE)}
    return dict(_flat({**found, **parts}))


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
        self.id = hashlib.sha256(url.encode()).hexdigest()[:12]
        folder = _levels_folder(url, self.id)
        self.metrics = Levels(storage.join(url, METRICS), folder / "metrics")
        self.evaluations = Levels(storage.join(url, files.EVALUATIONS), folder / "evaluations")
        self.signals = Levels(storage.join(url, files.SIGNALS), folder / "signals")
        self.events: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.problem: str | None = None
        """Error of the run's files; its curves end before it."""
        self._sizes: dict[str, int] = {}
        """Bytes of the small files when they were read."""

    def refresh(self) -> Iterator[None]:
        """Read what is new in the run's files, a part at a time."""
        try:
            if not storage.is_local(self.url):
                storage.names(self.url)  # a new listing: fsspec takes sizes from the last one
            self.events = self._lines(files.EVENTS, self.events)
            self.scores = self._lines(files.SCORES, self.scores)
            yield from self.metrics.refresh()
            yield from self.evaluations.refresh()
            yield from self.signals.refresh()
            self.problem = self._settings[1]
        except UserError as error:
            self.problem = str(error)

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
        return missing(self.settings.get("scores.tasks"), self.scores, last)

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the run, its model and its mixture, by dotted path; empty if they cannot
        be read."""
        return self._settings[0]

    @cached_property
    def _settings(self) -> tuple[dict[str, Any], str | None]:
        """The settings, or the error of their files."""
        try:
            return settings_of(self.url), None
        except UserError as error:
            return {}, str(error)

    @cached_property
    def plan(self) -> dict[str, Any] | None:
        """The plan as it is stored; None for synthetic rows."""
        file = storage.join(self.url, files.PLAN)
        if not storage.exists(file):
            return None
        found: dict[str, Any] = json.loads(storage.read(file))
        return found

    @cached_property
    def last_step(self) -> int | None:
        """One past the last step of the plan."""
        if self.plan:
            phase = self.plan["phases"][-1]
            return int(phase["first_step"] + phase["rows"] // phase["batch_rows"])
        steps = self.settings.get("synthetic.steps")
        return None if steps is None else int(steps)

    def _lines(self, name: str, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the whole lines of a small file; those of before, if it has not changed."""
        file = storage.join(self.url, name)
        size = storage.size(file) if storage.exists(file) else 0
        if size == self._sizes.get(name):
            return before
        lines = storage.read(file, 0, size).splitlines(keepends=True) if size else []
        self._sizes[name] = size
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _levels_folder(url: str, id: str) -> Path:
    """Return the folder of a run's levels: beside the run, or of this user where that is not
    writable."""
    if storage.is_local(url) and os.access(storage.local_path(url), os.W_OK):
        return storage.local_path(url) / files.BOARD
    return host_files.folder().with_name("headrace-board") / id


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif path and value is not None and value != {}:
        yield path, value
