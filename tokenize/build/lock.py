"""One build at a time at a URL: a claim beside the dataset, kept alive while the build lives.

A build writes its claim, then looks for others. Whoever finds a living one gives way, so that two
never hold at once; of two that come at the same moment, the one with the smaller name stays. A
claim of a dead process on this machine counts for nothing at once; one of another machine when it
has not been renewed for LEASE seconds. Only writing, reading and listing are needed of the store.
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
from .settings import CLAIMS, WORK

log = get_logger(__name__)

LEASE = 120.0
BEAT = 20.0
PATIENCE = 10.0


class Claim:
    """Holds the folder `url` for as long as the `with` lasts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"{uuid.uuid4().hex}.json"
        self._stop = threading.Event()
        self._beat = 0.0
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> Claim:
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
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        try:
            storage.delete(storage.join(self.url, self.name))
        except StorageError as told:  # nobody waits for it, once this process is gone
            log.warning("cannot take back this build's claim: %s", told.what)
        if storage.is_local(self.url):
            folder = storage.local_path(self.url)
            with contextlib.suppress(OSError):  # not empty: another build has begun
                folder.rmdir()
                folder.parent.rmdir()

    def check(self) -> None:
        """Refuse to go on if another build may have taken over."""
        late = time.time() - self._beat > LEASE
        if late or any(other["holding"] for other in self._others()):
            raise BusyError(
                "this build was out of touch for so long that another may have taken its place",
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
                gives_way = other["holding"] or other["name"] < self.name
                if gives_way or time.monotonic() > deadline:
                    raise BusyError(
                        f"another build is at work here (process {other['pid']} on "
                        f"{other['host']}, begun {other['begun']})",
                        where=self.url.removesuffix(f"/{WORK}/{CLAIMS}"),
                        hint="wait until it is done, or build at another URL; a build that was "
                        f"killed on another machine gives way after {LEASE:.0f} s",
                    )
            time.sleep(0.2)

    def _others(self) -> list[dict[str, Any]]:
        """Living claims besides this one. Dead ones are removed."""
        living = []
        for name in storage.list_files(self.url):
            if name == self.name or "/" in name or name.startswith("."):
                continue
            where = storage.join(self.url, name)
            try:
                other = json.loads(storage.read(where))
                alive = _alive(other)
            except StorageError:
                continue  # it has just been given up
            except (ValueError, TypeError, KeyError):
                raise StorageError(
                    f"{where} is not the claim of a build",
                    hint="remove it, unless another program puts it there",
                ) from None
            if alive:
                living.append({**other, "name": name})
            else:
                log.info("removing the claim of a dead build (process %s)", other["pid"])
                storage.delete(where)
        return living

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
        self._beat = now

    def _keep_alive(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                self._write(holding=True)
            except StorageError as error:
                log.warning("cannot renew this build's claim: %s", error.what)


def _alive(claim: dict[str, Any]) -> bool:
    if claim["machine"] == _machine():
        return _started(int(claim["pid"])) == str(claim["started"])
    return time.time() - float(claim["beat"]) < LEASE


def _machine() -> str:
    """Names this boot of this machine, and the processes that we can see on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot: a pid is used again, a pair of both is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]
