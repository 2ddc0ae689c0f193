"""Corpus format that no module of headrace knows: `%%` lines separate the documents."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.tokenize.files.input_file import File
from headrace.tokenize.files.open_file import open_input
from headrace.tokenize.sources.format import CorpusFormat, Slice, SourceConfig, Texts


class Dummy(CorpusFormat):
    endings = ("dummy",)
    settings = ("id_field",)
    compressible = False

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        return [Slice(file, 0, file.size, 0, file.size)]

    def read(self, part: Slice, config: SourceConfig) -> Iterator[Texts]:
        with open_input(part.file) as stream:
            texts = stream.read().decode().split("\n%%\n")
        ids = [f"{config.id_field}{k}" for k in range(len(texts))] if config.id_field else None
        yield Texts(texts, range(len(texts)), ids, size=part.size)


FORMAT = Dummy()
