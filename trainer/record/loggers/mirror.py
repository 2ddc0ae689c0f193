"""Mirror the run's files in a store: `watch.mirror: s3://bucket/runs`."""

from __future__ import annotations

import threading

from ....dataplane.storage import storage
from ..config import WatchConfig
from ..logger import LoggedRun, Logger
from ..mirror import Mirror

PAUSE = 15.0
"""Polling interval in seconds."""


class StoreMirror(Logger):
    """Mirrors the run's files in a thread: no step waits for the store."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        assert run.watch.mirror is not None
        self.mirror = Mirror(run.folder, run.watch.mirror)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        return watch.mirror is not None

    @classmethod
    def check(cls, watch: WatchConfig) -> None:
        assert watch.mirror is not None
        storage.check_writable(watch.mirror)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.is_set():
            self.mirror.update()
            self._ended.wait(PAUSE)
        self.mirror.update(final=True)
