"""Lock on a dataset's URL: one build at a time writes there.

A build writes a lock file, then lists all lock files. If another build is alive, this one gives up,
so two builds never hold the lock together; if two start at the same moment, the smaller file name
wins. The lock of a dead process on this machine is ignored at once. The lock of another machine is
watched: a live build renews its file; one that does not within `lease` seconds is dead. Clocks of
two machines are never compared. The store needs only write, read, list and delete.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ...console.errors import BusyError, StorageError
from ...console.log import get_logger
from ...dataplane.storage import storage
from .settings import LOCKS, WORK

log = get_logger(__name__)

RENEWAL = 20.0
"""Seconds between two renewals."""
PATIENCE = 10.0
"""Seconds to wait for other builds that start at the same moment."""


@dataclass(frozen=True, kw_only=True)
class LockTimes:
    """Times in seconds by which builds on other machines are known to be alive or dead."""

    lease: float = 120.0
    """Age at which another machine's lock is stale, unless it was renewed."""
    start_renewal: float = 1.0
    """Interval between renewals until it is decided which build holds the lock."""


@dataclass
class ForeignLock:
    """Another build's lock; the build is alive, or may have died on another machine."""

    name: str
    content: bytes
    fields: dict[str, Any]
    seen: float
    """When this content was first seen."""
    renewed: bool = False
    """True if the content has changed since the file was first seen."""

    @property
    def is_local(self) -> bool:
        """True if the build's process runs on this machine."""
        return bool(self.fields["machine"] == _machine())

    def is_dead(self, lease: float) -> bool:
        if self.is_local:
            return _start_time(int(self.fields["pid"])) != str(self.fields["started"])
        return _now() - self.seen > lease

    @property
    def process(self) -> str:
        return f"process {self.fields['pid']} on {self.fields['host']}"


class BuildLock:
    """Holds the lock in the folder `url` while the `with` block runs."""

    def __init__(self, url: str, times: LockTimes | None = None) -> None:
        self.url, self.times = url, times or LockTimes()
        self.name = f"{uuid.uuid4().hex}.json"
        self._begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._stop = threading.Event()
        self._renewed = 0.0
        self._renewals = 0
        self._known_locks: dict[str, ForeignLock] = {}
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> BuildLock:
        self._write(holding=False)
        try:
            self._wait_for_turn()
            self._write(holding=True)
            storage.remove_half_written(self.url)  # each lock has a name: none is written again
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
            log.warning("cannot remove this build's lock: %s", error.message)
        if storage.is_local(self.url):
            folder = storage.local_path(self.url)
            with contextlib.suppress(OSError):  # not empty: another build has started
                folder.rmdir()
                folder.parent.rmdir()

    def check(self) -> None:
        """Raise BusyError if another build may have taken the lock."""
        is_late = _now() - self._renewed > self.times.lease or not self._exists()
        if is_late or any(lock.fields["holding"] for lock in self._scan_locks()):
            raise BusyError(
                "this build could not renew its lock in time; another build may be writing here",
                where=self.url,
                hint="run the same command again: finished shards are kept",
            )

    def _wait_for_turn(self) -> None:
        """Wait until no other build is alive; raise BusyError if one goes first."""
        deadline = _now() + PATIENCE
        announced: set[str] = set()
        while True:
            locks = self._scan_locks()
            if not locks:
                return
            for lock in locks:
                if not lock.is_local and not lock.renewed:
                    if lock.name not in announced and _now() - lock.seen > self.times.start_renewal:
                        announced.add(lock.name)
                        log.info(
                            "waiting for a sign of life of the build of %s, at most %.0f s",
                            lock.process,
                            self.times.lease,
                        )
                    continue
                goes_first = lock.fields["holding"] or lock.name < self.name
                if goes_first or _now() > deadline:
                    raise BusyError(
                        f"another build is writing here ({lock.process}, started "
                        f"{lock.fields['begun']})",
                        where=self.url.removesuffix(f"/{WORK}/{LOCKS}"),
                        hint="wait until it is done, or build at another URL",
                    )
            time.sleep(0.2)
            if _now() - self._renewed > self.times.start_renewal:
                self._write(holding=False)

    def _scan_locks(self) -> list[ForeignLock]:
        """Return other builds' locks, except dead ones, which are removed."""
        live_locks: dict[str, ForeignLock] = {}
        for name in storage.list_files(self.url):
            if name == self.name or "/" in name or name.startswith("."):
                continue
            lock_url = storage.join(self.url, name)
            try:
                lock = self._read(name, storage.read(lock_url))
                is_dead = lock.is_dead(self.times.lease)
            except StorageError:
                continue  # it was released just now
            except (ValueError, TypeError, KeyError):
                raise StorageError(
                    f"{lock_url} is not the lock of a build",
                    hint="remove it, unless another program writes it there",
                ) from None
            if is_dead:
                log.info("removing the stale lock of %s", lock.process)
                storage.delete(lock_url)
            else:
                live_locks[name] = lock
        self._known_locks = live_locks
        return list(live_locks.values())

    def _read(self, name: str, content: bytes) -> ForeignLock:
        earlier = self._known_locks.get(name)
        if earlier is not None and earlier.content == content:
            return earlier
        fields = json.loads(content)
        {key: fields[key] for key in ("host", "machine", "pid", "started", "holding", "begun")}
        return ForeignLock(name, content, fields, seen=_now(), renewed=earlier is not None)

    def _write(self, *, holding: bool) -> None:
        now, self._renewals = _now(), self._renewals + 1
        data = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _start_time(os.getpid()),
            "holding": holding,
            "renewals": self._renewals,
            "begun": self._begun,
        }
        storage.write(storage.join(self.url, self.name), json.dumps(data).encode())
        self._renewed = now

    def _exists(self) -> bool:
        """Return False if the lock file is gone: another build considered this one dead."""
        return storage.exists(storage.join(self.url, self.name))

    def _keep_alive(self) -> None:
        while not self._stop.wait(RENEWAL):
            try:
                if self._exists():
                    self._write(holding=True)
            except StorageError as error:
                log.warning("cannot renew this build's lock: %s", error.message)


def _now() -> float:
    """Return seconds since this machine booted, including sleep: nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """Return an id for this machine's boot and PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _start_time(pid: int) -> str | None:
    """Return a process's start time in ticks since boot, None if it is dead. A PID can be reused;
    PID and start time together cannot."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *stat_fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else stat_fields[18]
