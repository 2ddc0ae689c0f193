"""The folder for a long request: a command that was killed continues there.

A file holds the request. It is written after all files that the request leads to, so a folder
without it holds nothing that counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...console.differences import differences
from ...console.errors import BusyError, RunError
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal

LOCK = ".lock"


class RequestFolder:
    """A request's folder: its file, and the folders that exist before this file."""

    def __init__(self, root: str | Path, kind: str, before: tuple[str, ...]) -> None:
        """`kind` names the request in messages, and its file."""
        self.root = Path(root)
        self.kind = kind
        self.request = self.root / f"{kind}.json"
        self._before = before

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with this process."""
        self.check_free()
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise BusyError(
                f"{self.root} is in use by another {self.kind}",
                hint="wait until it has ended, or choose another --out",
            ) from None
        finally:
            os.close(descriptor)

    def check_free(self) -> None:
        """Raise if the folder holds anything but a request."""
        if not self.root.is_dir() or self.request.exists():
            return
        known = (LOCK, *self._before, f".{self.request.name}")
        unknown = [p.name for p in self.root.iterdir() if not p.name.startswith(known)]
        if unknown:
            raise RunError(
                f"{self.root} holds other files ({', '.join(sorted(unknown)[:3])}) and no "
                f"{self.kind}",
                hint="choose another --out",
            )

    def read_stored(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the contents of the request's file, or None if it does not exist.

        Raise if it holds a different request.
        """
        if not self.request.exists():
            return None
        stored = self.read()
        requested = json.loads(json.dumps(request))
        same_keys = {key: stored.get(key) for key in requested}
        changed = [
            f"{path}: the folder has {remote}, this {self.kind} {local}"
            for path, remote, local in differences(same_keys, requested)
        ]
        if changed:
            raise RunError(
                f"{self.root} holds another {self.kind}",
                where="\n" + "\n".join(f"    {line}" for line in changed),
                hint="choose another --out, give the folder's settings again, or remove "
                f"{self.root} to begin anew",
            )
        return stored

    def read(self) -> dict[str, Any]:
        """Return the contents of the request's file, which must exist."""
        hint = "restore it from a copy, or choose another --out"
        return unseal(str(self.request), self.request.read_bytes(), hint=hint)

    def store(self, request: Mapping[str, Any], **facts: Any) -> None:
        """Write the request, with facts that follow from it."""
        write(self.request, seal({**request, **facts}, indent=1).decode())


def write(file: Path, text: str) -> None:
    """Write a file atomically."""
    storage.write(str(file), text.encode())
