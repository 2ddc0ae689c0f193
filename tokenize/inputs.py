"""What a corpus is made of: files, globs, folders and URLs become a list of files."""

from __future__ import annotations

import glob
import hashlib
import posixpath
from collections.abc import Sequence
from typing import Any

from ..console.errors import InputError
from ..console.log import get_logger
from ..dataplane import storage
from .sources import COMPRESSIONS, ENDINGS, SOURCES, File, SourceConfig

log = get_logger(__name__)

SAMPLES = 8
SAMPLE_BYTES = 16 << 10


def find(inputs: Sequence[str], config: SourceConfig) -> list[File]:
    """The files of all inputs: in the order of the inputs, by name within each, each file once."""
    names: dict[str, None] = {}
    for given in inputs:
        found = _expand(given, config)
        if not found:
            raise InputError(
                f"no files at {given}",
                mend="check the path; a folder is searched for "
                + ", ".join(f".{ending}" for ending in ENDINGS),
            )
        names.update(dict.fromkeys(found))
    return [_file(name, config) for name in names]


def kind_of(name: str, config: SourceConfig) -> tuple[str | None, str | None]:
    """A file's format and compression, by the endings of its name."""
    parts = posixpath.basename(name).lower().split("?")[0].split(".")
    compression = COMPRESSIONS.get(parts[-1]) if len(parts) > 1 else None
    if compression:
        parts.pop()
    if config.format != "auto":
        return config.format, compression
    return (ENDINGS.get(parts[-1]) if len(parts) > 1 else None), compression


def _expand(given: str, config: SourceConfig) -> list[str]:
    if storage.is_local(given):
        local = storage.local_path(given)
        if local.is_dir():
            below = [str(local / name) for name in storage.list_files(str(local))]
            return [name for name in below if _wanted(name, config, str(local))]
        if local.exists():
            return [str(local)]
        matches = sorted(glob.iglob(str(local), recursive=True))  # noqa: PTH207
        return [name for name in matches if storage.local_path(name).is_file()]
    fs, path = storage.file_system(given)
    try:
        if glob.has_magic(path) and not given.startswith("http"):
            return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))
        if not given.startswith("http") and fs.isdir(path):
            found = sorted(fs.unstrip_protocol(name) for name in fs.find(path))
            return [name for name in found if _wanted(name, config, given)]
        return [given] if fs.exists(path) else []
    except OSError as error:
        raise InputError(f"cannot list {given}: {error}") from None


def _wanted(name: str, config: SourceConfig, root: str) -> bool:
    """Whether a file of a folder belongs to the corpus. What does not is named, or hidden."""
    below = name[len(root) :].strip("/")
    if any(part.startswith((".", "_")) for part in below.split("/")):
        return False
    if kind_of(name, config)[0] is None:
        log.warning("%s is left out: its ending says nothing of its format", name)
        return False
    return True


def _file(name: str, config: SourceConfig) -> File:
    kind, compression = kind_of(name, config)
    if kind is None:
        raise InputError(
            f"{name}: its ending says nothing of its format",
            mend=f"say it with --input-format ({', '.join(SOURCES)})",
        )
    if compression and kind in ("parquet", "arrow"):
        raise InputError(
            f"{name} is a compressed {kind} file, which cannot be read from its end",
            mend=f"decompress it ({kind} compresses within)",
        )
    size, fingerprint = _identity(name)
    return File(name, size, kind, compression, fingerprint)


def _identity(name: str) -> tuple[int, str]:
    """A file's size, and what names its content without reading it whole."""
    digest = hashlib.sha256()
    if storage.is_local(name):
        size = storage.size(name)
        digest.update(str(size).encode())
        with storage.local_path(name).open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, (size - SAMPLE_BYTES) * number // (SAMPLES - 1)))
                digest.update(file.read(SAMPLE_BYTES))
        return size, digest.hexdigest()[:32]
    fs, path = storage.file_system(name)
    try:
        info: dict[str, Any] = fs.info(path)
    except OSError as error:
        raise InputError(f"cannot read {name}: {error}") from None
    size = int(info.get("size") or 0)
    known = [info.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "last_modified")]
    version = next((str(item) for item in known if item), name)
    digest.update(f"{size} {version}".encode())
    return size, digest.hexdigest()[:32]
