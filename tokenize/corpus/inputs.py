"""What a corpus is made of: files, globs, folders and URLs become a list of files."""

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
from ..sources import COMPRESSIONS, ENDINGS, SOURCES, File, SourceConfig, check_meant, web
from .file_hashes import information

log = get_logger(__name__)


def find(inputs: Sequence[str], config: SourceConfig, out: str | None = None) -> list[File]:
    """The files of all inputs: in the order of the inputs, by name within each, each file once.
    What lies in the output is none. They have no fingerprints yet."""
    names: dict[str, None] = {}
    problems: list[UserError] = []
    for given in inputs:
        found = _expand(given, config)
        if out is not None and any(_below(name, out) for name in found):
            if _below(given, out):
                raise MisuseError(
                    f"the input {given} lies in the output, {out}",
                    hint="give the output a folder of its own",
                )
            found = [name for name in found if not _below(name, out)]
        names.update(dict.fromkeys(found))
        if not found:
            problems.append(
                InputError(
                    f"no files at {given}",
                    hint="check the path; a folder is searched for "
                    + ", ".join(f".{ending}" for ending in ENDINGS),
                )
            )
    files = []
    for name in names:
        try:
            files.append(_file(name, config))
        except (InputError, StorageError) as error:
            problems.append(error)
    _raise_all(problems)
    check_meant(config, {file.format for file in files})
    return files


def _raise_all(problems: Sequence[UserError]) -> None:
    """Tell all problems at once."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"  {problem.what}: {problem.hint}" for problem in problems[:20]]
        if len(problems) > len(lines):
            lines.append(f"  and {len(problems) - len(lines)} more")
        raise InputError("\n".join([f"{len(problems)} problems with the inputs", *lines]))


def kind_of(name: str, config: SourceConfig) -> tuple[str | None, str | None]:
    """A file's format and compression, by the endings of its name."""
    path = name.split("?")[0] if web.is_web(name) else name
    parts = posixpath.basename(path).lower().split(".")
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
            return [name for name in _files_below(local) if _wanted(name, config, str(local))]
        if local.is_file():
            return [str(local)]
        if local.exists():
            raise InputError(
                f"{given} is no file, and files are read more than once", hint="write it to a file"
            )
        matches = sorted(glob.iglob(str(local), recursive=True))  # noqa: PTH207
        return [name for name in matches if storage.local_path(name).is_file()]
    if web.is_web(given):  # has no folders; whether the file is there is asked with its size
        return [given]

    def look(fs: Any, path: str) -> list[str]:
        if fs.isdir(path):
            found = [fs.unstrip_protocol(name) for name in fs.find(path)]
            return sorted(name for name in found if _wanted(name, config, given))
        if fs.exists(path):
            return [given]
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))

    return remote.request("list", given, look)


def _files_below(folder: Path) -> list[str]:
    """All files of a local folder. What is none is named; links to folders may go in circles."""
    found = []
    for place, folders, files in os.walk(folder):
        here = Path(place)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in [*links, *files]):
            if path.is_file():
                found.append(str(path))
            else:
                log.warning("%s is left out: it is a link to a folder, or no file", path)
    return sorted(found)


def _below(name: str, folder: str) -> bool:
    """Whether a file or folder is the other one, or lies in it."""
    return f"{_absolute(name)}/".startswith(f"{_absolute(folder)}/")


def _absolute(name: str) -> str:
    if not storage.is_local(name):
        return name.rstrip("/")
    return os.path.abspath(storage.local_path(name))  # noqa: PTH100 (resolve() asks the disk)


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
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # how Python holds other bytes
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise InputError(f"{shown}: its name is not UTF-8", hint="rename it; datasets keep names")
    kind, compression = kind_of(name, config)
    if kind is None:
        raise InputError(
            f"{name}: its ending says nothing of its format",
            hint=f"say it with --input-format ({', '.join(SOURCES)})",
        )
    if compression and kind in ("parquet", "arrow"):
        raise InputError(
            f"{name} is a compressed {kind} file, which cannot be read from its end",
            hint=f"decompress it ({kind} compresses within)",
        )
    return File(name, _size(name), kind, compression, fingerprint="")


def _size(name: str) -> int:
    return storage.size(name) if storage.is_local(name) else int(information(name).get("size") or 0)
