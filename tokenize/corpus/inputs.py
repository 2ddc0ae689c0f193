"""Find a corpus's files: expand files, globs, folders and URLs."""

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
from ..files.input_file import COMPRESSIONS, File, is_web
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
    """List the files of all inputs, without repeats: by order of inputs, then by name.

    Files in the output folder `out` are left out. Hints name `formats`, by default all. `pipe`
    allows standard input, which the caller must store. Fingerprints are not computed yet.
    """
    names: dict[str, None] = {}
    problems: list[UserError] = []
    skipped = SkippedFiles()
    for input in inputs:
        if input in standard_input.ARGUMENTS:
            names["-"] = None
            continue
        with remote.first_requests():
            matches = _list_matches(input, config, skipped)
        if out is not None and any(is_within(name, out) for name in matches):
            if is_within(input, out):
                raise MisuseError(
                    f"the input {input} is in the output folder {out}",
                    hint="choose another folder for --out",
                )
            matches = [name for name in matches if not is_within(name, out)]
        names.update(dict.fromkeys(matches))
        if not matches:
            problems.append(_no_files_error(input, formats or CORPUS_FORMATS))
    skipped.log()
    files = []
    for name in names:
        try:
            if name == "-":
                files.append(_standard_input(config, pipe))
                continue
            with remote.first_requests():
                files.append(_file(name, config, formats))
        except (InputError, StorageError) as error:
            problems.append(error)
    _raise_all(problems)
    if kinds := {file.format for file in files} - {"auto"}:
        check_settings(config, kinds)
    return files


def store_standard_input(
    files: Sequence[File], config: SourceConfig, folder: str | None = None
) -> list[File]:
    """Replace standard input, if it is among the files, by a stored copy: in `folder`, if that is
    local, else in a folder that is removed when this process ends."""
    local = folder if folder is not None and storage.is_local(folder) else None
    stored = standard_input.store(files, local)
    check_settings(config, {file.format for file in stored})
    return stored


def _standard_input(config: SourceConfig, allowed: bool) -> File:
    if not allowed:
        raise InputError(
            "only the corpus of `tokenize build`, `count` and `train` can be standard input",
            hint="save it as a file",
        )
    return standard_input.make_placeholder(config.format)


@dataclass
class SkippedFiles:
    """Files in input folders that are not part of the corpus."""

    unknown: list[str] = field(default_factory=list)
    """Files with an ending that names no known format."""
    links: list[str] = field(default_factory=list)
    """Links to folders, and special files."""

    def log(self) -> None:
        if self.unknown:
            endings = Counter(Path(name).suffix.lower() or "no ending" for name in self.unknown)
            log.warning(
                "left out: %s with an ending that names no known format (%s), such as %s; if "
                "they are text, name their format with --input-format",
                _format_count(self.unknown, "file"),
                ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(5)),
                ", ".join(self.unknown[:2]),
            )
        if self.links:
            log.warning(
                "left out: %s to folders or special files, such as %s",
                _format_count(self.links, "link"),
                ", ".join(self.links[:2]),
            )


def _format_count(names: Sequence[str], noun: str) -> str:
    return f"{len(names):,} {noun}{'s' * (len(names) != 1)}"


def _no_files_error(input: str, formats: Iterable[str]) -> InputError:
    known = ", ".join(f"{name} (.{corpus_format(name).endings[0]} …)" for name in formats)
    hint = f"check the path; a folder is searched for {known}: docs/tokenize.md"
    if storage.is_local(input):
        path = storage.local_path(input)
        hint = hint if path.exists() else path_hint(path, hint)
    return InputError(f"no files at {input}", hint=hint)


def _raise_all(problems: Sequence[UserError]) -> None:
    """Raise all problems as one error."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = [f"  {problem.message}: {problem.hint}" for problem in problems[:20]]
        if len(problems) > len(lines):
            lines.append(f"  and {len(problems) - len(lines)} more")
        raise InputError("\n".join([f"{len(problems)} problems with the inputs", *lines]))


def parse_endings(name: str, config: SourceConfig) -> tuple[str | None, str | None]:
    """Return format and compression by a file name's endings."""
    path = name.split("?")[0] if is_web(name) else name
    name_parts = posixpath.basename(path).lower().split(".")
    compression = COMPRESSIONS.get(name_parts[-1]) if len(name_parts) > 1 else None
    if compression:
        name_parts.pop()
    if config.format != "auto":
        return config.format, compression
    return (format_of_ending(name_parts[-1]) if len(name_parts) > 1 else None), compression


def _list_matches(input: str, config: SourceConfig, skipped: SkippedFiles) -> list[str]:
    if storage.is_local(input):
        local = storage.local_path(input)
        if local.is_dir():
            return _select_files(_walk_folder(local, skipped), config, str(local), skipped)
        if local.is_file():
            return [str(local)]
        if local.exists():
            raise InputError(
                f"{input} is not a regular file, and inputs are read more than once",
                hint="save it as a file, or pipe it into `tokenize build -`",
            )
        _check_listable(str(local))
        matches = sorted(glob.iglob(str(local), recursive=True))  # noqa: PTH207
        return [name for name in matches if storage.local_path(name).is_file()]
    if is_web(input):  # no folders; the request for its size shows if the file exists
        return [input]

    def expand(fs: Any, path: str) -> list[str]:
        if fs.isdir(path):
            files = sorted(fs.unstrip_protocol(name) for name in fs.find(path))
            return _select_files(files, config, input, skipped)
        if fs.exists(path):
            return [input]
        return sorted(fs.unstrip_protocol(name) for name in fs.glob(path))

    return remote.request("list", input, expand)


def _walk_folder(folder: Path, skipped: SkippedFiles) -> list[str]:
    """Return all files in a local folder. Links to folders may form a loop, so they are skipped;
    special files are too."""
    names = []
    for root, folders, files in os.walk(folder, onerror=_refuse_folder):
        folder_path = Path(root)
        links = [name for name in folders if (folder_path / name).is_symlink()]
        for path in (folder_path / name for name in [*links, *files]):
            if path.is_file():
                names.append(str(path))
            else:
                skipped.links.append(str(path))
    return sorted(names)


def _check_listable(pattern: str) -> None:
    """Raise InputError if a glob looks into an unreadable folder: Python's glob skips it."""
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


def _select_files(
    names: Sequence[str], config: SourceConfig, root: str, skipped: SkippedFiles
) -> list[str]:
    """Return a folder's files that belong to the corpus: not hidden, in a known format."""
    selected: list[str] = []
    for name in names:
        if any(part.startswith((".", "_")) for part in name[len(root) :].strip("/").split("/")):
            continue
        is_known = parse_endings(name, config)[0] is not None
        (selected if is_known else skipped.unknown).append(name)
    return selected


def _file(name: str, config: SourceConfig, formats: Collection[str] | None) -> File:
    if any("\ud800" <= letter <= "\udfff" for letter in name):  # bytes that are not UTF-8
        printable = os.fsencode(name).decode(errors="backslashreplace")
        raise InputError(
            f"{printable}: its name is not UTF-8", hint="rename it; datasets store file names"
        )
    kind, compression = parse_endings(name, config)
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
