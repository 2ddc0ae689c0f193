"""Lock of a dataset's URL: one build at a time writes there.

A build writes a lock file, then lists the others. If it finds the lock of a live build it gives up,
so two builds never hold the lock together; if two builds start at the same moment, the one with
the smaller file name continues. The lock of a dead process of this machine is ignored at once; the
lock of another machine is ignored when it has not been renewed for LEASE seconds. The store needs
to support only write, read, list and delete.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from ...console.errors import BusyError, StorageError
from ...console.log import get_logger
from ...dataplane.storage import storage
from .settings import LOCKS, WORK

log = get_logger(__name__)

LEASE = 120.0
"""Seconds after which the lock of another machine is stale, if it was not renewed."""
RENEWAL = 20.0
"""Seconds between two renewals."""
PATIENCE = 10.0
"""Seconds to wait for other builds that start at the same moment."""


class BuildLock:
    """Holds the lock in the folder `url` while the `with` block runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"{uuid.uuid4().hex}.json"
        self._stop = threading.Event()
        self._renewed = 0.0
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> BuildLock:
        self._write(holding=False)
        try:
            self._settle()
            self._write(holding=True)
        except BaseException:
            storage.delete(storage.join(self.url, self.name))
            raise
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        try:
            storage.delete(storage.join(self.url, self.name))
        except StorageError as error:  # harmless: the lock is stale once this process has ended
            log.warning("cannot remove this build's lock: %s", error.what)
        if storage.is_local(self.url):
            folder = storage.local_path(self.url)
            with contextlib.suppress(OSError):  # not empty: another build has started
                folder.rmdir()
                folder.parent.rmdir()

    def check(self) -> None:
        """Raise an error if another build may have taken the lock."""
        late = time.time() - self._renewed > LEASE
        if late or any(other["holding"] for other in self._others()):
            raise BusyError(
                "this build could not renew its lock in time; another build may be writing here",
                where=self.url,
                hint="run the same command again: finished shards are kept",
            )

    def _settle(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            others = self._others()
            if not others:
                return
            for other in others:
                must_yield = other["holding"] or other["name"] < self.name
                if must_yield or time.monotonic() > deadline:
                    raise BusyError(
                        f"another build is writing here (process {other['pid']} on "
                        f"{other['host']}, started {other['begun']})",
                        where=self.url.removesuffix(f"/{WORK}/{LOCKS}"),
                        hint="wait until it is done, or build at another URL; the lock of a build "
                        f"that was killed on another machine expires after {LEASE:.0f} s",
                    )
            time.sleep(0.2)

    def _others(self) -> list[dict[str, Any]]:
        """Return the locks of other live builds. Stale locks are removed."""
        live = []
        for name in storage.list_files(self.url):
            if name == self.name or "/" in name or name.startswith("."):
                continue
            where = storage.join(self.url, name)
            try:
                other = json.loads(storage.read(where))
                alive = _alive(other)
            except StorageError:
                continue  # it was released just now
            except (ValueError, TypeError, KeyError):
                raise StorageError(
                    f"{where} is not the lock of a build",
                    hint="remove it, unless another program writes it there",
                ) from None
            if alive:
                live.append({**other, "name": name})
            else:
                log.info("removing the stale lock of process %s", other["pid"])
                storage.delete(where)
        return live

    def _write(self, *, holding: bool) -> None:
        now = time.time()
        data = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "holding": holding,
            "beat": now,
            "begun": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        }
        storage.write(storage.join(self.url, self.name), json.dumps(data).encode())
        self._renewed = now

    def _keep_alive(self) -> None:
        while not self._stop.wait(RENEWAL):
            try:
                self._write(holding=True)
            except StorageError as error:
                log.warning("cannot renew this build's lock: %s", error.what)


def _alive(lock: dict[str, Any]) -> bool:
    if lock["machine"] == _machine():
        return _started(int(lock["pid"])) == str(lock["started"])
    return time.time() - float(lock["beat"]) < LEASE


def _machine() -> str:
    """Return an id of this boot of this machine and of this PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot. A PID can be reused; the pair of PID
    and start time cannot."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]
