"""What a corpus is made of: files, globs, folders and URLs become a list of files."""

from __future__ import annotations

import glob
import hashlib
import posixpath
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..console.errors import InputError
from ..console.log import get_logger
from ..console.progress import Progress
from ..dataplane import storage
from .sources import BLOCK_BYTES, COMPRESSIONS, ENDINGS, SOURCES, File, SourceConfig, check_meant
from .sources.streams import open_file

log = get_logger(__name__)

READERS = 8
"""Files that are hashed at once."""

CONTENT = ("md5Hash", "Content-MD5")
"""What a store says of an object that is a hash of its content and nothing else."""
VERSIONS = ("ETag", "etag", "LastModified", "Last-Modified", "last_modified")
"""What changes when an object under the same name does. Two names may share it by chance."""


def find(inputs: Sequence[str], config: SourceConfig, *, fingerprints: bool = True) -> list[File]:
    """The files of all inputs: in the order of the inputs, by name within each, each file once.

    Their fingerprints are hashes of all that they hold: who needs none saves the reading.
    """
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
    files = [_file(name, config) for name in names]
    check_meant(config, {file.format for file in files})
    return _named_by_content(files) if fingerprints else files


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
    return File(name, _size(name), kind, compression, fingerprint="")


def _size(name: str) -> int:
    return storage.size(name) if storage.is_local(name) else int(_info(name).get("size") or 0)


def _info(name: str) -> dict[str, Any]:
    fs, path = storage.file_system(name)
    try:
        return dict(fs.info(path))
    except OSError as error:
        raise InputError(f"cannot read {name}: {error}") from None


def _named_by_content(files: Sequence[File]) -> list[File]:
    named = []
    with (
        Progress(
            "hashing the inputs", total=sum(file.size for file in files), unit="B"
        ) as progress,
        ThreadPoolExecutor(READERS) as pool,
    ):
        for file, mark in zip(files, pool.map(_fingerprint, files), strict=True):
            named.append(replace(file, fingerprint=mark))
            progress.advance(file.size, files=1)
    return named


def _fingerprint(file: File) -> str:
    """What names a file's content: equal for files of equal content, and for no others."""
    digest = hashlib.sha256()
    version = None if storage.is_local(file.name) else _version(file)
    if version is not None:
        digest.update(version.encode())
    else:
        with open_file(file.name) as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()[:32]


def _version(file: File) -> str | None:
    """What a store says of an object that is as good as a hash of it, if it says anything."""
    info = _info(file.name)
    for key in CONTENT:
        if info.get(key):
            return f"{file.size} {info[key]}"
    for key in VERSIONS:
        if info.get(key):
            # S3's tag is made from the content; anyone else's says something of one name only.
            same_anywhere = key == "ETag" and file.name.startswith(("s3://", "s3a://"))
            return f"{'' if same_anywhere else file.name} {file.size} {info[key]}"
    return None
