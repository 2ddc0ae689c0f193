"""The runs of the page, kept up to date by a thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...console.errors import RunError, UserError
from ...console.explain import path_hint
from ...console.html.page import PALETTE
from ...console.log import get_logger
from ...dataplane.storage import storage
from .byte_sizes import APART, BITS, CONVERTED, INCOMPARABLE, NATS
from .details import summary
from .rows import StepRows
from .runs import BoardRun, runs_below, shortest_names

log = get_logger(__name__)

PAUSE = 1.0
"""Seconds between two looks at the runs' files."""
PAUSE_REMOTE = 15.0
LOOK_FOR_NEW = 10.0
"""Seconds between two searches for new runs."""


class Board:
    """All runs below some folders and URLs."""

    def __init__(self, places: Sequence[str], remote_pause: float = PAUSE_REMOTE) -> None:
        """The files of a run on a store are read every `remote_pause` seconds."""
        for place in places:
            if storage.is_local(place) and not storage.local_path(place).is_dir():
                hint = path_hint(Path(place), "name the folder of a run, or one above runs")
                raise RunError(f"there is no folder {place}", hint=hint)
        self.places, self.remote_pause = places, remote_pause
        self.runs: dict[str, BoardRun] = {}
        self.rows = StepRows()
        self.problems: list[str] = []
        self._ended = threading.Event()
        self._looked: dict[str, float] = {}
        self._searched = time.monotonic()

    def look(self) -> None:
        """Find the runs."""
        found: dict[str, BoardRun] = {}
        problems = []
        for place in self.places:
            try:
                runs = [BoardRun(url) for url in runs_below(place)]
            except UserError as error:
                problems.append(error.what)
                runs = [run for run in self.runs.values() if run.url.startswith(place)]
            found |= {run.id: self.runs.get(run.id, run) for run in runs}
        taken = {run.number for id, run in found.items() if id in self.runs}
        free = (number for number in itertools.count() if number not in taken)
        for id, run in found.items():
            if id not in self.runs:
                run.number = next(free)
        self.runs, self.problems = found, problems

    def refresh(self) -> None:
        """Read what is new of each run, a part of each in turn."""
        now = time.monotonic()
        due = [
            run
            for run in self.runs.values()
            if storage.is_local(run.url)
            or now - self._looked.get(run.id, -self.remote_pause) >= self.remote_pause
        ]
        self._looked |= {run.id: now for run in due}
        reading = [run.refresh() for run in due]
        while reading and not self._ended.is_set():
            reading = [each for each in reading if next(each, self) is not self]

    def summary(self) -> dict[str, Any]:
        """Return the list of the runs, as the page asks for it every few seconds."""
        runs = list(self.runs.values())
        names = shortest_names([Path(run.url) for run in runs])
        return {
            "places": list(self.places),
            "problems": self.problems,
            "palette": PALETTE,
            "units": {"nats": NATS, "bits": BITS, "apart": APART},
            "notes": {"bits": CONVERTED, "apart": INCOMPARABLE},
            "runs": [{"name": name, **summary(run)} for name, run in zip(names, runs, strict=True)],
        }

    def follow(self) -> threading.Thread:
        """Start the threads that read the runs until `end`; return the first. The second reads
        datasets, which may be in a store and take long."""
        threads = [
            threading.Thread(target=self._repeat, args=[act], name=name, daemon=True)
            for name, act in (("board", self._follow), ("bytes per token", self.measure))
        ]
        for thread in threads:
            thread.start()
        return threads[0]

    def end(self) -> None:
        self._ended.set()

    def measure(self) -> None:
        """Read the bytes per token of runs that have different tokenizers."""
        runs = [run for run in self.runs.values() if run.tokenizer is not None]
        if len({run.tokenizer for run in runs}) < 2:
            return
        for run in runs:
            known = run.sizes is not None and run.evaluated <= run.sizes.held_out.keys()
            if not known and run.sizes_problem is None and not self._ended.is_set():
                run.measure()

    def _follow(self) -> None:
        if time.monotonic() - self._searched >= LOOK_FOR_NEW:
            self.look()
            self._searched = time.monotonic()
        self.refresh()

    def _repeat(self, act: Callable[[], None]) -> None:
        while not self._ended.is_set():
            try:
                act()
            except Exception:  # a thread that ended would leave a page that stands still
                log.exception("the runs could not be read; trying again")
            self._ended.wait(PAUSE)
