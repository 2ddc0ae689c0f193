"""Files by URL: one interface for local paths and object stores, with atomic writes.

A write becomes visible whole or not at all: by a rename on a local disk (atomic.py), by one PUT or
a completed multipart upload on an object store. Failures raise a StorageError that names the URL.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ...console.errors import StorageError, file_fault
from . import hub, remote, s3
from .atomic import HALF_WRITTEN, replacing, sync
from .faults import read_response, storage_error

Buffer = bytes | memoryview


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """Return the path of a local URL."""
    assert is_local(url), url
    if "\0" in url:
        raise StorageError(f"{url!r} is not a path: it contains a NUL byte", hint="remove the byte")
    return Path(url.removeprefix("file://")).expanduser()


def join(url: str, *names: str) -> str:
    return "/".join([url.rstrip("/"), *(name.strip("/") for name in names)])


def read(url: str, start: int = 0, end: int | None = None) -> bytes:
    """Read the bytes [start, end) of a file, or the whole file."""
    data = view(url, start, end)
    return data if isinstance(data, bytes) else bytes(data)


def view(url: str, start: int = 0, end: int | None = None) -> Buffer:
    """Read the bytes [start, end), without copying them out of the receiving client's memory.

    To copy megabytes into new memory takes more CPU time than to receive them.
    """
    if is_local(url):
        try:
            with local_path(url).open("rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(end - start)
        except OSError as error:
            raise storage_error("read", url, error) from None
    if url.startswith("s3://"):
        data = s3.read(url, start, end)
        if data is not None:
            return data
    if start == 0 and end is None:
        return remote.request("read", url, lambda fs, path: bytes(fs.cat_file(path)))

    def fetch(fs: Any, path: str) -> bytes:
        return bytes(fs.cat_file(path, start=start, end=end, **hub.read_arguments(fs)))

    return remote.request("read", url, fetch)


def size(url: str) -> int:
    if is_local(url):
        try:
            return local_path(url).stat().st_size
        except OSError as error:
            raise storage_error("read", url, error) from None
    return int(remote.request("read", url, lambda fs, path: fs.info(path)["size"]))


def exists(url: str) -> bool:
    if is_local(url):
        return local_path(url).exists()
    return bool(remote.request("look for", url, lambda fs, path: fs.exists(path)))


def write(url: str, data: bytes) -> None:
    """Write a small file atomically."""
    if not is_local(url):

        def send(fs: Any, path: str) -> None:
            fs.pipe_file(path, data, **remote.timeout_arguments(fs, len(data)))

        remote.request("write", url, send)
        return
    target = local_path(url)
    try:
        try:
            _write_local(target, data)
        except FileNotFoundError:  # another process has just removed the folder
            _write_local(target, data)
    except OSError as error:
        raise storage_error("write", url, error) from None


def _write_local(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(data)


def put(source: Path, url: str) -> None:
    """Move a finished local file to `url` atomically."""
    if not is_local(url):

        def send(fs: Any, path: str) -> None:
            fs.put_file(str(source), path, **remote.timeout_arguments(fs, source.stat().st_size))

        remote.request("write", url, send)
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
            with source.open("rb") as file, replacing(target) as copy:
                shutil.copyfileobj(file, copy)
            source.unlink()
    except OSError as error:
        raise storage_error("write", url, error) from None


def check_writable(url: str, *, file: bool = False, label: str | None = None) -> None:
    """Raise if a local folder, or file, cannot be written at `url`; `label` names it in errors.

    Of a store, the host and the credentials are checked.
    """
    if not is_local(url):
        with remote.first_requests():
            remote.request("write", url, lambda fs, path: fs.exists(path))
        return
    path = local_path(url).absolute()
    path = path.parent if file else path
    if (reason := _why_not_writable(path)) is not None:
        raise StorageError(
            f"cannot write {label or url}: {reason}",
            hint="choose another path, or fix its permissions",
        )


def _why_not_writable(path: Path) -> str | None:
    """Return why no file can be created in a folder, or None; the folder need not exist."""
    for folder in (path, *path.parents):
        if folder.exists():
            break
        if folder.is_symlink():
            return f"{folder} is a link to nothing, or to itself"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"the file system of {folder} is read-only"
    if not os.access(folder, os.W_OK):
        return f"{folder} is not writable"
    try:
        with tempfile.TemporaryFile(dir=folder):  # /proc says that root may write there
            return None
    except OSError as error:
        return f"no file can be created in {folder} ({file_fault(error)[0]})"


def delete(url: str) -> None:
    """Remove a file if it exists."""
    if is_local(url):
        try:
            local_path(url).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error("delete", url, error) from None
        return

    def remove(fs: Any, path: str) -> None:
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            return

    remote.request("delete", url, remove)


def remove_half_written(url: str, target: str = "") -> None:
    """Remove temporary files that killed writers left in a local folder, for all files or `target`.

    A living writer that loses its file writes it once more.
    """
    if is_local(url):
        for name in names(url):
            if HALF_WRITTEN.fullmatch(name) and name.startswith(f".{target}"):
                delete(join(url, name))


def list_files(url: str) -> list[str]:
    """List all files below a folder, as sorted paths relative to it."""
    if is_local(url):
        root = local_path(url)
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def find(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        root = path.rstrip("/") + "/"
        return sorted(str(name)[len(root) :] for name in fs.find(path))

    return remote.request("list", url, find)


def names(url: str) -> list[str]:
    """List the names in a folder, sorted; empty if there is no folder."""
    if is_local(url):
        folder = local_path(url)
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def list_folder(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        try:
            paths = fs.ls(path, detail=False)
        except FileNotFoundError as error:
            if read_response(error)[1] == "NoSuchBucket":
                raise
            return []
        return sorted(str(name).rstrip("/").rsplit("/", 1)[-1] for name in paths)

    return remote.request("list", url, list_folder)
