"""Corpus formats by name.

To add a format, write a module beside this one with a `CorpusFormat` subclass (format.py) and an
instance named FORMAT, and add a line to CORPUS_FORMATS.

This module imports no format: command-line help lists their names.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module

from ...console.errors import InputError, MisuseError
from ..files.input_file import DamagedFile, File
from .format import CorpusFormat, Slice, SourceConfig

CORPUS_FORMATS = {
    "jsonl": "headrace.tokenize.sources.jsonl",
    "parquet": "headrace.tokenize.sources.parquet",
    "arrow": "headrace.tokenize.sources.arrow",
    "text": "headrace.tokenize.sources.text",
    "fasta": "headrace.tokenize.sources.fasta",
    "csv": "headrace.tokenize.sources.separated",
    "warc": "headrace.tokenize.sources.warc",
}

OPTIONS = {"chat": "conversations"}
"""Options with other names than their settings. (A build sets `chat` later.)"""


def check_settings(config: SourceConfig, names: Collection[str]) -> None:
    """Raise MisuseError for a setting that none of these formats uses."""
    users: dict[str, list[str]] = {}
    for name in CORPUS_FORMATS:
        for setting in corpus_format(name).settings:
            users.setdefault(setting, []).append(name)
    for setting, formats in users.items():
        changed = getattr(config, setting) != getattr(SourceConfig(), setting)
        if changed and set(formats).isdisjoint(names):
            option = OPTIONS.get(setting, setting.replace("_", "-"))
            raise MisuseError(
                f"--{option} is for {', '.join(formats)}, and no input is one: they are "
                + ", ".join(sorted(names)),
                hint=f"leave --{option} out, or name the inputs' format with --input-format",
            )


def corpus_format(name: str) -> CorpusFormat:
    """Return the format with this name."""
    if name not in CORPUS_FORMATS:
        raise InputError(
            f"there is no corpus format `{name}`", hint=f"known: {', '.join(CORPUS_FORMATS)}"
        )
    format: CorpusFormat = import_module(CORPUS_FORMATS[name]).FORMAT
    return format


def format_of_ending(ending: str) -> str | None:
    """Return the name of the format with this file ending, or None."""
    for name in CORPUS_FORMATS:
        if ending in corpus_format(name).endings:
            return name
    return None


def cut(file: File, config: SourceConfig, size: int, *, skip_bad: bool) -> list[Slice]:
    """Cut a file into slices. A damaged file raises InputError; with `skip_bad` it becomes one
    slice, and reading that reports the damage."""
    try:
        return corpus_format(file.format).cut(file, config, size)
    except DamagedFile as error:
        if skip_bad:
            return [Slice(file, 0, 0, 0, file.size)]
        raise InputError(
            f"damaged file: {error}",
            where=file.name,
            hint="fix the file, or leave out damaged files with --on-error skip",
        ) from None
