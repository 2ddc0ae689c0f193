"""Find the files of a corpus: expand files, globs, folders and URLs."""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...console.errors import InputError, MisuseError, StorageError, UserError
from ...console.log import get_logger
from ...dataplane.storage import remote, storage
from ..files.file_hashes import information
from ..files.input_file import COMPRESSIONS, File
from ..files.web import is_web
from ..sources import (
    CORPUS_FORMATS,
    check_settings,
    corpus_format,
    format_of_ending,
    known_endings,
)
from ..sources.format import SourceConfig

log = get_logger(__name__)


def find_files(inputs: Sequence[str], config: SourceConfig, out: str | None = None) -> list[File]:
    """Return the files of all inputs, each once: in the order of the inputs, by name within each.

    Files in the output folder `out` are left out. Fingerprints are not computed yet.
    """
    names: dict[str, None] = {}
    problems: list[UserError] = []
    for given in inputs:
        matches = _expand(given, config)
        if out is not None and any(_is_within(name, out) for name in matches):
            if _is_within(given, out):
                raise MisuseError(
                    f"the input {given} is in the output folder {out}",
                    hint="choose another folder for --out",
                )
            matches = [name for name in matches if not _is_within(name, out)]
        names.update(dict.fromkeys(matches))
        if not matches:
            problems.append(
                InputError(
                    f"no files at {given}",
                    hint="check the path; a folder is searched for files that end in "
                    + ", ".join(f".{ending}" for ending in known_endings()),
                )
            )
    files = []
    for name in names:
        try:
            files.append(_file(name, config))
        except (InputError, StorageError) as error:
            problems.append(error)
    _raise_all(problems)
    check_settings(config, {file.format for file in files})
    return files


def _raise_all(problems: Sequence[UserError]) -> None:
    """Raise one error for all problems."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"  {problem.what}: {problem.hint}" for problem in problems[:20]]
        if len(problems) > len(lines):
            lines.append(f"  and {len(problems) - len(lines)} more")
        raise InputError("\n".join([f"{len(problems)} problems with the inputs", *lines]))


def kind_of(name: str, config: SourceConfig) -> tuple[str | None, str | None]:
    """Return the format and the compression of a file, by the endings of its name."""
    path = name.split("?")[0] if is_web(name) else name
    parts = posixpath.basename(path).lower().split(".")
    compression = COMPRESSIONS.get(parts[-1]) if len(parts) > 1 else None
    if compression:
        parts.pop()
    if config.format != "auto":
        return config.format, compression
    return (format_of_ending(parts[-1]) if len(parts) > 1 else None), compression


def _expand(given: str, config: SourceConfig) -> list[str]:
    if storage.is_local(given):
        local = storage.local_path(given)
        if local.is_dir():
            return [name for name in _files_below(local) if _wanted(name, config, str(local))]
        if local.is_file():
            return [str(local)]
        if local.exists():
            raise InputError(
                f"{given} is not a regular file, and inputs are read more than once",
                hint="save it as a file",
            )
        matches = sorted(glob.iglob(str(local), recursive=True))  # noqa: PTH207
        return [name for name in matches if storage.local_path(name).is_file()]
    if is_web(given):  # no folders; the request for its size shows if the file exists
        return [given]

    def expand(fs: Any, path: str) -> list[str]:
        if fs.isdir(path):
            files = [fs.unstrip_protocol(name) for name in fs.find(path)]
            return sorted(name for name in files if _wanted(name, config, given))
        if fs.exists(path):
            return [given]
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))

    return remote.request("list", given, expand)


def _files_below(folder: Path) -> list[str]:
    """Return all files of a local folder. Links to folders may form a loop: they are left out, and
    so are special files, with a warning."""
    names = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in [*links, *files]):
            if path.is_file():
                names.append(str(path))
            else:
                log.warning("%s is left out: it is a link to a folder, or not a file", path)
    return sorted(names)


def _is_within(name: str, folder: str) -> bool:
    """Return True if `name` is the folder or is in it."""
    return f"{_absolute(name)}/".startswith(f"{_absolute(folder)}/")


def _absolute(name: str) -> str:
    if not storage.is_local(name):
        return name.rstrip("/")
    return os.path.abspath(storage.local_path(name))  # noqa: PTH100 (resolve() asks the disk)


def _wanted(name: str, config: SourceConfig, root: str) -> bool:
    """Return True if a file of a folder belongs to the corpus: it is not hidden, and its format is
    known (else warn)."""
    below = name[len(root) :].strip("/")
    if any(part.startswith((".", "_")) for part in below.split("/")):
        return False
    if kind_of(name, config)[0] is None:
        log.warning("%s is left out: its ending names no known format", name)
        return False
    return True


def _file(name: str, config: SourceConfig) -> File:
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes that are not UTF-8
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise InputError(
            f"{shown}: its name is not UTF-8", hint="rename it; datasets store file names"
        )
    kind, compression = kind_of(name, config)
    if kind is None:
        raise InputError(
            f"{name}: its ending names no known format",
            hint=f"name the format with --input-format ({', '.join(CORPUS_FORMATS)})",
        )
    if compression and not corpus_format(kind).compressible:
        raise InputError(
            f"{name} is a compressed {kind} file, which cannot be read from its end",
            hint=f"decompress it ({kind} files compress their data themselves)",
        )
    return File(name, _size(name), kind, compression, fingerprint="")


def _size(name: str) -> int:
    return storage.size(name) if storage.is_local(name) else int(information(name).get("size") or 0)
