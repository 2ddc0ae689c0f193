"""Bytes with a hash: read, checked, and asked for again.

A store that gives wrong bytes is asked again, because a single answer does not show what is
damaged: the file, or the way to it. Equal wrong answers accuse the file, different answers the
network or the store. A local disk is asked once.

Files named by their content prove themselves: their name holds 32 hex digits of their sha256.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...console.errors import IntegrityError
from ...console.log import get_logger
from ..arrays import Bytes
from . import host_files, remote, storage
from .faults import AbsentError, storage_error
from .mapped import FileState, map_file, read_state
from .storage import Buffer

T = TypeVar("T")
Data = TypeVar("Data", bytes, Buffer)

log = get_logger(__name__)

ANSWERS = 4
"""Answers from a store that are checked before an error is raised."""
READERS = 16
"""Files that are checked in parallel: on an object store a file is a request."""
NAME = re.compile(r"[0-9a-f]{32}")
REBUILD = "restore it from a copy, or build the dataset again at another URL"


def read_checked(
    url: str, check: Callable[[bytes], T], start: int = 0, end: int | None = None
) -> T:
    """Read the bytes [start, end) of a file and return `check(bytes)`.

    `check` raises an IntegrityError for wrong bytes. A store is then asked again; the error says
    whether its answers were equal.
    """
    return _checked(url, lambda: storage.read(url, start, end), check)


def view_checked(
    url: str, check: Callable[[Buffer], T], start: int = 0, end: int | None = None
) -> T:
    """Do as `read_checked` with bytes that are not copied (`storage.view`)."""
    return _checked(url, lambda: storage.view(url, start, end), check)


def _checked(url: str, read: Callable[[], Data], check: Callable[[Data], T]) -> T:
    answers: list[str] = []
    for attempt in range(1, ANSWERS + 1):
        data = read()
        try:
            return check(data)
        except IntegrityError as error:
            if storage.is_local(url):
                raise
            answers.append(hashlib.sha256(data).hexdigest())
            if attempt == ANSWERS:
                raise _blame(error, answers) from None
            log.warning("%s; asking the store again", error.message)
            time.sleep(remote.POLICY.first_pause * attempt)
    raise AssertionError("unreachable")


def _blame(error: IntegrityError, answers: list[str]) -> IntegrityError:
    """Return the error for wrong answers: it accuses the file if all are equal."""
    if len(set(answers)) == 1:
        message = f"{error.message} (the store gave the same wrong bytes {len(answers)} times)"
        return IntegrityError(message, where=error.where, hint=error.hint)
    return IntegrityError(
        f"{error.message} (the store gave different bytes each time it was asked: {len(answers)} "
        f"answers, {len(set(answers))} of them different)",
        where=error.where,
        hint="check the network and the store: the file itself may be whole. Run the same command "
        "again",
    )


def write_named(url: str, folder: str, ending: str, data: bytes) -> str:
    """Write a file into a folder below `url`, named by its content; return its name."""
    name = f"{folder}/{hashlib.sha256(data).hexdigest()[:32]}.{ending}"
    storage.write(storage.join(url, name), data)
    return name


def read_named(url: str, name: str, *, hint: str = REBUILD) -> bytes:
    """Return the bytes of a file below `url` that is named by its content."""
    where = storage.join(url, name)

    def check(data: bytes) -> bytes:
        check_name(where, data, hint=hint)
        return data

    with add_hint(hint):
        return read_checked(where, check)


@contextmanager
def add_hint(hint: str) -> Iterator[None]:
    """Add a hint to the error about an absent file."""
    try:
        yield
    except AbsentError as error:
        error.hint = hint
        raise


def find_damaged(url: str, names: Iterable[str]) -> set[str]:
    """Return which files below `url`, named by their content, are absent or damaged."""

    def is_intact(name: str) -> bool:
        try:
            read_named(url, name)
        except (AbsentError, IntegrityError):
            return False
        return True

    listed = list(names)
    with ThreadPoolExecutor(READERS) as pool:
        results = pool.map(is_intact, listed)
        return {name for name, intact in zip(listed, results, strict=True) if not intact}


class NamedFile:
    """A file below `url` that is named by its content, verified and mapped.

    A host's processes share its bytes. A remote file is copied to this host's folder first.
    """

    def __init__(self, url: str, name: str, *, hint: str = REBUILD) -> None:
        self.url, self.name, self.hint = url, name, hint
        self.where = storage.join(url, name)
        self._path: str | None = None
        self._state: FileState | None = None
        self._data = self._map()

    @property
    def data(self) -> Bytes:
        """The bytes; mapped and verified again if the file has changed since."""
        if self._path is not None and self._current() != self._state:
            self._data = self._map()
        return self._data

    def _map(self) -> Bytes:
        if storage.is_local(self.url):
            try:
                path = storage.local_path(self.where)
                return self._map_path(path, self.where, map_file)
            except OSError as error:
                with add_hint(self.hint):
                    raise storage_error("read", self.where, error) from None
        copy = host_files.folder() / self.name.rpartition("/")[2]
        with suppress(OSError, IntegrityError):
            return self._map_path(copy, str(copy), host_files.map_shared)
        content = read_named(self.url, self.name, hint=self.hint)
        try:
            host_files.write(copy, content)
            return self._map_path(copy, str(copy), host_files.map_shared)
        except OSError as error:
            reason = error.strerror or error
            log.warning("cannot keep %s in %s: %s", self.where, copy, reason)
            self._path = None
            return np.frombuffer(content, np.uint8)

    def _map_path(self, path: Path, where: str, map: Callable[[Path], Bytes]) -> Bytes:
        data = map(path)
        self._path, self._state = str(path), read_state(str(path))
        check_name(where, data.data, hint=self.hint)
        return data

    def _current(self) -> FileState | None:
        assert self._path is not None
        try:
            return read_state(self._path)
        except OSError:
            return None


def map_named(url: str, name: str) -> Bytes:
    """Return the verified bytes of a file that is named by its content, mapped."""
    return NamedFile(url, name).data


def check_name(where: str, data: bytes | memoryview, *, hint: str = REBUILD) -> None:
    """Raise if a file's bytes do not match the hash in its name."""
    hash_in_name = NAME.match(where.rpartition("/")[2])
    if hash_in_name is None:
        raise IntegrityError(f"{where} is not named by its content", hint=hint)
    if not hashlib.sha256(data).hexdigest().startswith(hash_in_name[0]):
        raise IntegrityError(
            f"{where} is damaged: its content ({len(data):,} bytes) does not match the hash in "
            "its name",
            hint=hint,
        )
