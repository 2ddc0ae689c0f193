"""Files by URL: local paths and anything fsspec knows, with retries and atomic writes.

A write is visible whole or not at all. On a local disk that is a temporary file, fsync and one
rename; on an object store one PUT (or a completed multipart upload). Passing faults of a remote
store are retried with growing pauses; what remains is a StorageError that names the URL.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..console.errors import MissingError, StorageError, UserError
from ..console.log import get_logger
from .atomic import becoming, sync_folder

T = TypeVar("T")

log = get_logger(__name__)

ATTEMPTS = 8
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 20.0
SLOWEST, STALLED = 256 << 10, 120.0
"""Bytes a second that a store must take of what is written to it, and the seconds on top of that:
one that takes nothing would be waited for until TCP gives up."""

PASSING = (408, 429, 500, 502, 503, 504)
"""Answers of a store that may be others in a while."""
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
"""What S3 stores say of credentials that were good once."""


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> Path:
    """The path of a local URL."""
    assert is_local(url), url
    if "\0" in url:
        raise StorageError(f"{url!r} is no path: it holds a NUL", mend="write it without")
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
        return remote("read", url, lambda fs, path: bytes(fs.cat_file(path)))
    return remote("read", url, lambda fs, path: bytes(fs.cat_file(path, start=start, end=end)))


def size(url: str) -> int:
    if is_local(url):
        try:
            return local_path(url).stat().st_size
        except OSError as error:
            raise failed("read", url, error) from None
    return int(remote("read", url, lambda fs, path: fs.info(path)["size"]))


def exists(url: str) -> bool:
    if is_local(url):
        return local_path(url).exists()
    return bool(remote("look for", url, lambda fs, path: fs.exists(path)))


def write(url: str, data: bytes) -> None:
    """Write a small file atomically."""
    if not is_local(url):
        remote("write", url, lambda fs, path: fs.pipe_file(path, data, **_limit(fs, len(data))))
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
        length = source.stat().st_size
        remote("write", url, lambda fs, path: fs.put_file(str(source), path, **_limit(fs, length)))
        source.unlink()
        return
    target = local_path(url)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb+") as file:
            os.fsync(file.fileno())
        try:
            source.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            if error.errno != 18:  # EXDEV: another file system
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

    remote("delete", url, remove)


def list_files(url: str) -> list[str]:
    """The names of all files below a folder, relative to it, sorted."""
    if is_local(url):
        root = local_path(url)
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())

    def find(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        root = path.rstrip("/") + "/"
        return sorted(str(name)[len(root) :] for name in fs.find(path))

    return remote("list", url, find)


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

    return remote("list", url, look)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise MissingError(f"cannot open {url}: {error}", mend="check the URL's scheme") from None
    return fs, path


def remote(verb: str, url: str, act: Callable[[Any, str], T]) -> T:
    """What `act` gives for a file system and a path in it, through faults that pass. A store that
    refuses is asked once more: credentials are read anew, and may have been renewed."""

    def ask() -> T:
        fs, path = file_system(url)
        try:
            return act(fs, path)
        except Exception as error:
            if not isinstance(error, PermissionError) and _answer(error)[0] != 400:
                raise
            type(fs).clear_instance_cache()
            return act(*file_system(url))

    return tried_again(verb, url, ask)


def tried_again(verb: str, url: str, act: Callable[[], T]) -> T:
    """What `act` gives, which is called again, after growing pauses, where a fault may pass."""
    for attempt, pause in enumerate(_pauses(), start=1):
        try:
            return act()
        except UserError:
            raise
        except Exception as error:  # fsspec's back ends share no class for a passing fault
            if attempt == ATTEMPTS or not _passing(error):
                raise failed(verb, url, error) from error
            why = _said(error)
            log.warning("could not %s %s (%s); trying again in %.1f s", verb, url, why, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


def _limit(fs: Any, size: int) -> dict[str, float]:
    """How long a write may take. fsspec's own back ends for stores are those that can be told."""
    return {"timeout": STALLED + size / SLOWEST} if fs.async_impl else {}


def _passing(error: Exception) -> bool:
    """Whether trying again may help: time-outs, dropped connections, throttling, 5xx."""
    status, code = _answer(error)
    if isinstance(error, (TimeoutError, ConnectionError)) or status in PASSING:
        return True
    if code == "NoSuchUpload":  # it was completed, and the answer lost: it is begun again
        return True
    if status or isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
        return False
    text = f"{type(error).__module__}.{type(error).__name__} {error}".lower()
    words = ("timeout", "connect", "slow", "throttl", "503", "429", "payload", "disconnected")
    return any(word in text for word in words)


def _answer(error: Exception) -> tuple[int, str]:
    """The status and the code with which an S3 store has refused; s3fs raises an error of Python's
    from the one that holds them."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(response.get("Error", {}).get("Code", ""))
    return 0, ""


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    for _ in range(ATTEMPTS):
        yield pause * random.uniform(0.5, 1.5)
        pause = min(pause * 2, LONGEST_PAUSE)


def failed(verb: str, url: str, error: Exception) -> StorageError:
    """What went wrong with a file, for a person."""
    mend = None
    status, code = _answer(error)
    if code in EXPIRED:
        reason, mend = "the credentials have expired", "renew them and run the same command again"
    elif code == "RequestTimeTooSkewed":
        reason, mend = "the clock of this machine is wrong, says the store", "set the clock"
    elif status == 400:
        reason = f"the store refuses the request ({error})"
        mend = "the credentials may have expired; check the endpoint and its region, too"
    elif isinstance(error, IsADirectoryError):
        reason, mend = "it is a folder", "name a file"
    elif isinstance(error, FileNotFoundError) and verb == "write":
        reason, mend = "its folder cannot be made", "choose another folder"
    elif isinstance(error, FileNotFoundError):
        reason, mend = "it does not exist", "check the path, or build the dataset first"
    elif isinstance(error, PermissionError):
        reason, mend = "access is denied", "check the credentials (`headrace doctor` shows them)"
    elif isinstance(error, (NotADirectoryError, FileExistsError)):
        reason, mend = "a part of its path is a file, not a folder", "choose another folder"
    elif type(error).__name__ == "NoCredentialsError":  # botocore's
        reason = "the store's credentials are missing"
        mend = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    elif isinstance(error, OSError) and error.errno == 28:
        reason, mend = "the disk is full", "free some space and run the same command again"
    else:
        reason = _said(error)
    return StorageError(f"cannot {verb} {url}: {reason}", mend=mend)


def _said(error: Exception) -> str:
    silent = "it took too long" if isinstance(error, TimeoutError) else type(error).__name__
    return str(error) or silent
