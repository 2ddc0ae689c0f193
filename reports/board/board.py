"""Keep the page's runs up to date in a thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from .runs import BoardRun, find_runs, shortest_names

log = get_logger(__name__)

POLL_INTERVAL = 1.0
"""Polling interval for the runs' files, in seconds."""
REMOTE_POLL_INTERVAL = 15.0
SCAN_INTERVAL = 10.0
"""Interval between scans for new runs in seconds."""


class Board:
    """All runs in and below folders and URLs."""

    def __init__(
        self, places: Sequence[str], remote_interval: float = REMOTE_POLL_INTERVAL
    ) -> None:
        """Runs in a store are polled every `remote_interval` seconds."""
        for place in places:
            if storage.is_local(place) and not storage.local_path(place).is_dir():
                hint = path_hint(Path(place), "name the folder of a run, or one above runs")
                raise RunError(f"there is no folder {place}", hint=hint)
        self.places, self.remote_interval = places, remote_interval
        self.runs: dict[str, BoardRun] = {}
        self.rows = StepRows()
        self.problems: list[str] = []
        self._ended = threading.Event()
        self._polled: dict[str, float] = {}
        self._scanned = time.monotonic()

    def scan(self) -> None:
        """Find new runs, and forget deleted ones."""
        runs_by_id: dict[str, BoardRun] = {}
        problems = []
        for place in self.places:
            try:
                runs = [BoardRun(url) for url in find_runs(place)]
            except UserError as error:
                problems.append(error.message)
                runs = [run for run in self.runs.values() if run.url.startswith(place)]
            runs_by_id |= {run.id: self.runs.get(run.id, run) for run in runs}
        self._choose_colours(runs_by_id)
        self.runs, self.problems = runs_by_id, problems

    def _choose_colours(self, runs_by_id: Mapping[str, BoardRun]) -> None:
        """Give each run without a colour the first free one, which it keeps.

        A run with the colour of one that the page shows already, such as a copy, gets another here.
        """
        free_numbers = itertools.filterfalse(
            {run.number for run in runs_by_id.values()}.__contains__, itertools.count()
        )
        used: set[int | None] = set()
        for run in sorted(runs_by_id.values(), key=lambda run: run.id not in self.runs):
            if run.number is None:
                run.keep_number(next(free_numbers))
            elif run.number in used:
                run.number = next(free_numbers)
            used.add(run.number)

    def refresh(self) -> None:
        """Read new records from all runs incrementally, in turns: a long file delays no other
        run."""
        now = time.monotonic()
        due = [
            run
            for run in self.runs.values()
            if storage.is_local(run.url)
            or now - self._polled.get(run.id, -self.remote_interval) >= self.remote_interval
        ]
        self._polled |= {run.id: now for run in due}
        refreshes = [run.refresh() for run in due]
        while refreshes and not self._ended.is_set():
            refreshes = [refresh for refresh in refreshes if next(refresh, self) is not self]

    def summary(self) -> dict[str, Any]:
        """Return the run list that the page polls."""
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
        """Start a thread that polls the runs until `end`, and return it.

        A second thread measures datasets, which takes long if they are in a store.
        """
        threads = [
            threading.Thread(target=self._repeat, args=[action], name=name, daemon=True)
            for name, action in (("board", self._follow), ("bytes per token", self.measure))
        ]
        for thread in threads:
            thread.start()
        return threads[0]

    def end(self) -> None:
        self._ended.set()

    def measure(self) -> None:
        """Measure bytes per token for runs whose tokenizers differ."""
        runs = [run for run in self.runs.values() if run.tokenizer is not None]
        if len({run.tokenizer for run in runs}) < 2:
            return
        for run in runs:
            known = run.sizes is not None and run.evaluated <= run.sizes.held_out.keys()
            if not known and run.sizes_problem is None and not self._ended.is_set():
                run.measure()

    def _follow(self) -> None:
        if time.monotonic() - self._scanned >= SCAN_INTERVAL:
            self.scan()
            self._scanned = time.monotonic()
        self.refresh()

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._ended.is_set():
            try:
                action()
            except Exception:  # without the thread, the page would silently show old curves
                log.exception("the runs could not be read; trying again")
            self._ended.wait(POLL_INTERVAL)
