"""Corpus formats, found by name.

To add one: write a file beside this one, and add it to CORPUS_FORMATS (and its endings to ENDINGS).
"""

from __future__ import annotations

from collections.abc import Iterable
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
}

ENDINGS = {
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
    **dict.fromkeys(("arrow", "feather", "ipc"), "arrow"),
    **dict.fromkeys(("txt", "text", "md"), "text"),
    **dict.fromkeys(("fasta", "fa", "fna", "ffn", "faa", "frn"), "fasta"),
}

MEANT_FOR = {
    **dict.fromkeys(("text_field", "id_field"), ("jsonl", "parquet", "arrow")),
    "text_documents": ("text",),
}
"""Settings that other formats do not use."""


def check_settings(config: SourceConfig, formats: Iterable[str]) -> None:
    """Raise an error if a setting is used by none of the corpus' formats."""
    for name, meant in MEANT_FOR.items():
        if getattr(config, name) != getattr(SourceConfig(), name) and set(meant).isdisjoint(
            formats
        ):
            option = name.replace("_", "-")
            raise MisuseError(
                f"--{option} is for {', '.join(meant)}, and no input is one: they are "
                + ", ".join(sorted(formats)),
                hint=f"leave --{option} out, or name the inputs' format with --input-format",
            )


def corpus_format(name: str) -> CorpusFormat:
    """Return the format with this name."""
    if name not in CORPUS_FORMATS:
        raise InputError(
            f"there is no corpus format `{name}`", hint=f"known: {', '.join(CORPUS_FORMATS)}"
        )
    module: CorpusFormat = import_module(CORPUS_FORMATS[name])
    return module


def cut(file: File, config: SourceConfig, size: int, *, skip_bad: bool) -> list[Slice]:
    """Cut a file into slices. A damaged file is an error; with `skip_bad` it becomes one slice
    whose reading reports the damage."""
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
