"""Files by URL: the same verbs for local paths and for stores, and every write atomic.

A write is visible whole or not at all. On a local disk that is one rename (atomic.py); on an object
store one PUT, or a completed multipart upload. What cannot be done is a StorageError that names the
URL.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

from ...console.errors import StorageError
from . import remote
from .atomic import becoming, sync
from .faults import failed


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local URL."""
    assert is_local(url), url
    if "\0" in url:
        raise StorageError(f"{url!r} is no path: it holds a NUL", hint="write it without")
    return Path(url.removeprefix("file://")).expanduser()


def join(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *(name.strip("/") for name in names)])


def read(url: str, start: int = 0, end: int | None = None) -> bytes:
    """The bytes [start, end) of a file, or all of it."""
    if is_local(url):
        try:
            with local_path(url).open("rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(end - start)
        except OSError as error:
            raise failed("read", url, error) from None
    if start == 0 and end is None:
        return remote.ask("read", url, lambda fs, path: bytes(fs.cat_file(path)))
    return remote.ask("read", url, lambda fs, path: bytes(fs.cat_file(path, start=start, end=end)))


def size(url: str) -> int:
    if is_local(url):
        try:
            return local_path(url).stat().st_size
        except OSError as error:
            raise failed("read", url, error) from None
    return int(remote.ask("read", url, lambda fs, path: fs.info(path)["size"]))


def exists(url: str) -> bool:
    if is_local(url):
        return local_path(url).exists()
    return bool(remote.ask("look for", url, lambda fs, path: fs.exists(path)))


def write(url: str, data: bytes) -> None:
    """Write a small file atomically."""
    if not is_local(url):

        def send(fs: Any, path: str) -> None:
            fs.pipe_file(path, data, **remote.limit(fs, len(data)))

        remote.ask("write", url, send)
        return
    target = local_path(url)
    try:
        try:
            _write_local(target, data)
        except FileNotFoundError:  # another process has just cleared the folder
            _write_local(target, data)
    except OSError as error:
        raise failed("write", url, error) from None


def _write_local(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with becoming(target) as file:
        file.write(data)


def put(source: Path, url: str) -> None:
    """Move a finished local file to `url`, atomically."""
    if not is_local(url):

        def send(fs: Any, path: str) -> None:
            fs.put_file(str(source), path, **remote.limit(fs, source.stat().st_size))

        remote.ask("write", url, send)
        source.unlink()
        return
    target = local_path(url)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(source)
        try:
            source.replace(target)
            sync(target.parent)
        except OSError as error:
            if error.errno != errno.EXDEV:  # it is on another disk
                raise
            with source.open("rb") as file, becoming(target) as copy:
                shutil.copyfileobj(file, copy)
            source.unlink()
    except OSError as error:
        raise failed("write", url, error) from None


def delete(url: str) -> None:
    """Remove one file; one that is not there is no error."""
    if is_local(url):
        try:
            local_path(url).unlink(missing_ok=True)
        except OSError as error:
            raise failed("delete", url, error) from None
        return

    def remove(fs: Any, path: str) -> None:
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            return

    remote.ask("delete", url, remove)


def list_files(url: str) -> list[str]:
    """The names of all files below a folder, relative to it, sorted."""
    if is_local(url):
        root = local_path(url)
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def find(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        root = path.rstrip("/") + "/"
        return sorted(str(name)[len(root) :] for name in fs.find(path))

    return remote.ask("list", url, find)


def names(url: str) -> list[str]:
    """What is in a folder, by name, sorted; nothing, where there is no folder."""
    if is_local(url):
        folder = local_path(url)
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def look(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        try:
            found = fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in found)

    return remote.ask("list", url, look)
