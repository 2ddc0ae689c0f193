"""Lock of a dataset's URL: one build at a time writes there.

A build writes a lock file, then lists the others. If it finds the lock of a live build it gives up,
so two builds never hold the lock together; if two builds start at the same moment, the one with
the smaller file name continues. The lock of a dead process of this machine is ignored at once. The
lock of another machine is watched: a live build renews its file, and one that does not for `lease`
seconds is dead. Clocks of two machines are never compared. The store needs to support only write,
read, list and delete.
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
    """Seconds after which builds of other machines are known to be alive or dead."""

    lease: float = 120.0
    """After these the lock of another machine is stale, if it was not renewed."""
    start_renewal: float = 1.0
    """Between two renewals, while it is not decided yet which build holds the lock."""


@dataclass
class OtherLock:
    """The lock of another live build, or of one that may have died on another machine."""

    name: str
    content: bytes
    fields: dict[str, Any]
    seen: float
    """When this content was first seen."""
    renewed: bool = False
    """True if the file has changed since it was found."""

    @property
    def here(self) -> bool:
        """True if its process runs on this machine."""
        return bool(self.fields["machine"] == _machine())

    def is_dead(self, lease: float) -> bool:
        if self.here:
            return _started(int(self.fields["pid"])) != str(self.fields["started"])
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
        self._others: dict[str, OtherLock] = {}
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> BuildLock:
        self._write(holding=False)
        try:
            self._settle()
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
            log.warning("cannot remove this build's lock: %s", error.what)
        if storage.is_local(self.url):
            folder = storage.local_path(self.url)
            with contextlib.suppress(OSError):  # not empty: another build has started
                folder.rmdir()
                folder.parent.rmdir()

    def check(self) -> None:
        """Raise an error if another build may have taken the lock."""
        late = _now() - self._renewed > self.times.lease or not self._stands()
        if late or any(other.fields["holding"] for other in self._look()):
            raise BusyError(
                "this build could not renew its lock in time; another build may be writing here",
                where=self.url,
                hint="run the same command again: finished shards are kept",
            )

    def _settle(self) -> None:
        """Return when no other build is alive; raise if one of them goes first."""
        deadline = _now() + PATIENCE
        watched: set[str] = set()
        while True:
            others = self._look()
            if not others:
                return
            for other in others:
                if not other.here and not other.renewed:
                    if other.name not in watched and _now() - other.seen > self.times.start_renewal:
                        watched.add(other.name)
                        log.info(
                            "waiting for a sign of life of the build of %s, at most %.0f s",
                            other.process,
                            self.times.lease,
                        )
                    continue
                first = other.fields["holding"] or other.name < self.name
                if first or _now() > deadline:
                    raise BusyError(
                        f"another build is writing here ({other.process}, started "
                        f"{other.fields['begun']})",
                        where=self.url.removesuffix(f"/{WORK}/{LOCKS}"),
                        hint="wait until it is done, or build at another URL",
                    )
            time.sleep(0.2)
            if _now() - self._renewed > self.times.start_renewal:
                self._write(holding=False)

    def _look(self) -> list[OtherLock]:
        """Return the locks of other builds that are not known to be dead; remove the others."""
        live: dict[str, OtherLock] = {}
        for name in storage.list_files(self.url):
            if name == self.name or "/" in name or name.startswith("."):
                continue
            where = storage.join(self.url, name)
            try:
                other = self._read(name, storage.read(where))
                dead = other.is_dead(self.times.lease)
            except StorageError:
                continue  # it was released just now
            except (ValueError, TypeError, KeyError):
                raise StorageError(
                    f"{where} is not the lock of a build",
                    hint="remove it, unless another program writes it there",
                ) from None
            if dead:
                log.info("removing the stale lock of %s", other.process)
                storage.delete(where)
            else:
                live[name] = other
        self._others = live
        return list(live.values())

    def _read(self, name: str, content: bytes) -> OtherLock:
        before = self._others.get(name)
        if before is not None and before.content == content:
            return before
        fields = json.loads(content)
        {key: fields[key] for key in ("host", "machine", "pid", "started", "holding", "begun")}
        return OtherLock(name, content, fields, seen=_now(), renewed=before is not None)

    def _write(self, *, holding: bool) -> None:
        now, self._renewals = _now(), self._renewals + 1
        data = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "holding": holding,
            "renewals": self._renewals,
            "begun": self._begun,
        }
        storage.write(storage.join(self.url, self.name), json.dumps(data).encode())
        self._renewed = now

    def _stands(self) -> bool:
        """Return False if the lock's file is gone: another build has taken this one for dead."""
        return storage.exists(storage.join(self.url, self.name))

    def _keep_alive(self) -> None:
        while not self._stop.wait(RENEWAL):
            try:
                if self._stands():
                    self._write(holding=True)
            except StorageError as error:
                log.warning("cannot renew this build's lock: %s", error.what)


def _now() -> float:
    """Return the seconds since this machine started, sleep included: no one can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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
