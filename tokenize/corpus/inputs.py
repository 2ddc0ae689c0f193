"""Find the files of a corpus: expand files, globs, folders and URLs."""

from __future__ import annotations

import errno
import glob
import os
import posixpath
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...console.errors import InputError, MisuseError, StorageError, UserError, file_fault
from ...console.explain import path_hint
from ...console.log import get_logger
from ...dataplane.storage import remote, storage
from ..files import standard_input
from ..files.file_hashes import information
from ..files.input_file import COMPRESSIONS, File
from ..files.web import is_web
from ..sources import CORPUS_FORMATS, check_settings, corpus_format, format_of_ending
from ..sources.format import SourceConfig

log = get_logger(__name__)


def find_files(
    inputs: Sequence[str],
    config: SourceConfig,
    out: str | None = None,
    formats: Collection[str] | None = None,
    *,
    pipe: bool = False,
) -> list[File]:
    """Return the files of all inputs, each once: in the order of the inputs, by name within each.

    Files in the output folder `out` are left out. Hints name `formats`, by default all. With
    `pipe`, standard input may be one of the files, which the caller keeps. Fingerprints are not
    computed yet.
    """
    names: dict[str, None] = {}
    problems: list[UserError] = []
    left_out = LeftOut()
    for given in inputs:
        if given in standard_input.WORDS:
            names["-"] = None
            continue
        with remote.first_requests():
            matches = _expand(given, config, left_out)
        if out is not None and any(is_within(name, out) for name in matches):
            if is_within(given, out):
                raise MisuseError(
                    f"the input {given} is in the output folder {out}",
                    hint="choose another folder for --out",
                )
            matches = [name for name in matches if not is_within(name, out)]
        names.update(dict.fromkeys(matches))
        if not matches:
            problems.append(_no_files(given, formats or CORPUS_FORMATS))
    left_out.log()
    files = []
    for name in names:
        try:
            if name == "-":
                files.append(_pipe(config, pipe))
                continue
            with remote.first_requests():
                files.append(_file(name, config, formats))
        except (InputError, StorageError) as error:
            problems.append(error)
    _raise_all(problems)
    if kinds := {file.format for file in files} - {"auto"}:
        check_settings(config, kinds)
    return files


def with_standard_input(
    files: Sequence[File], config: SourceConfig, folder: str | None = None
) -> list[File]:
    """Return the files with standard input kept, if it is one of them: in a local folder, or in one
    that ends with this process."""
    local = folder if folder is not None and storage.is_local(folder) else None
    kept = standard_input.keep(files, local)
    check_settings(config, {file.format for file in kept})
    return kept


def _pipe(config: SourceConfig, allowed: bool) -> File:
    if not allowed:
        raise InputError(
            "only the corpus of `tokenize build`, `count` and `train` can be standard input",
            hint="save it as a file",
        )
    return standard_input.not_read_yet(config.format)


@dataclass
class LeftOut:
    """Files of folders that are not part of the corpus; all of them are one line of the log."""

    unknown: list[str] = field(default_factory=list)
    """Files whose endings name no known format."""
    links: list[str] = field(default_factory=list)
    """Links to folders, and special files."""

    def log(self) -> None:
        if self.unknown:
            endings = Counter(Path(name).suffix.lower() or "no ending" for name in self.unknown)
            log.warning(
                "left out: %s with an ending that names no known format (%s), such as %s; to read "
                "them, name their format with --input-format",
                _counted(self.unknown, "file"),
                ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(5)),
                ", ".join(self.unknown[:2]),
            )
        if self.links:
            log.warning(
                "left out: %s to folders or special files, such as %s",
                _counted(self.links, "link"),
                ", ".join(self.links[:2]),
            )


def _counted(names: Sequence[str], what: str) -> str:
    return f"{len(names):,} {what}{'s' * (len(names) != 1)}"


def _no_files(given: str, formats: Iterable[str]) -> InputError:
    known = ", ".join(f"{name} (.{corpus_format(name).endings[0]} …)" for name in formats)
    hint = f"check the path; a folder is searched for {known}: docs/tokenize.md"
    if storage.is_local(given):
        path = storage.local_path(given)
        hint = hint if path.exists() else path_hint(path, hint)
    return InputError(f"no files at {given}", hint=hint)


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


def _expand(given: str, config: SourceConfig, left_out: LeftOut) -> list[str]:
    if storage.is_local(given):
        local = storage.local_path(given)
        if local.is_dir():
            return _wanted(_files_below(local, left_out), config, str(local), left_out)
        if local.is_file():
            return [str(local)]
        if local.exists():
            raise InputError(
                f"{given} is not a regular file, and inputs are read more than once",
                hint="save it as a file, or pipe it into `tokenize build -`",
            )
        _check_listable(str(local))
        matches = sorted(glob.iglob(str(local), recursive=True))  # noqa: PTH207
        return [name for name in matches if storage.local_path(name).is_file()]
    if is_web(given):  # no folders; the request for its size shows if the file exists
        return [given]

    def expand(fs: Any, path: str) -> list[str]:
        if fs.isdir(path):
            files = sorted(fs.unstrip_protocol(name) for name in fs.find(path))
            return _wanted(files, config, given, left_out)
        if fs.exists(path):
            return [given]
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))

    return remote.request("list", given, expand)


def _files_below(folder: Path, left_out: LeftOut) -> list[str]:
    """Return all files of a local folder. Links to folders may form a loop: they are left out, and
    so are special files."""
    names = []
    for place, folders, files in os.walk(folder, onerror=_refuse_folder):
        here = Path(place)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here / name for name in [*links, *files]):
            if path.is_file():
                names.append(str(path))
            else:
                left_out.links.append(str(path))
    return sorted(names)


def _check_listable(pattern: str) -> None:
    """Raise an error for a folder that a glob looks into and may not read: Python's skips it."""
    while glob.has_magic(pattern):
        pattern, child = os.path.split(pattern)
        need = os.X_OK | (os.R_OK if glob.has_magic(child) else 0)
        for folder in glob.iglob(pattern or ".", recursive=True):  # noqa: PTH207
            if Path(folder).is_dir() and not os.access(folder, need, effective_ids=True):
                _refuse_folder(PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder))


def _refuse_folder(error: OSError) -> None:
    reason, hint = file_fault(error)
    raise InputError(f"cannot list {error.filename}: {reason}", hint=hint) from None


def is_within(name: str, folder: str) -> bool:
    """Return True if `name` is the folder or is in it."""
    return f"{_absolute(name)}/".startswith(f"{_absolute(folder)}/")


def _absolute(name: str) -> str:
    if not storage.is_local(name):
        return name.rstrip("/")
    return os.path.abspath(storage.local_path(name))  # noqa: PTH100 (resolve() asks the disk)


def _wanted(names: Sequence[str], config: SourceConfig, root: str, left_out: LeftOut) -> list[str]:
    """Return the files of a folder that belong to the corpus: those that are not hidden and whose
    format is known."""
    wanted: list[str] = []
    for name in names:
        if any(part.startswith((".", "_")) for part in name[len(root) :].strip("/").split("/")):
            continue
        known = kind_of(name, config)[0] is not None
        (wanted if known else left_out.unknown).append(name)
    return wanted


def _file(name: str, config: SourceConfig, formats: Collection[str] | None) -> File:
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes that are not UTF-8
        shown = os.fsencode(name).decode(errors="backslashreplace")
        raise InputError(
            f"{shown}: its name is not UTF-8", hint="rename it; datasets store file names"
        )
    kind, compression = kind_of(name, config)
    if kind is None:
        raise InputError(
            f"{name}: its ending names no known format",
            hint=f"convert it to {' or '.join(formats)}"
            if formats
            else f"name the format with --input-format ({', '.join(CORPUS_FORMATS)})",
        )
    if compression and not corpus_format(kind).compressible:
        raise InputError(
            f"{name} is a compressed {kind} file, which cannot be read from its end",
            hint=f"decompress it ({kind} files compress their data themselves)",
        )
    return File(name, _size(name), kind, compression, fingerprint="")


def _size(name: str) -> int:
    return storage.size(name) if storage.is_local(name) else int(information(name).get("size") or 0)
