"""FASTA: one document per sequence, its lines joined; the header's first word is its id."""

from __future__ import annotations

from collections.abc import Iterator

from ..files.input_file import File
from .delimited import cut_bytes, record_blocks
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

DELIMITER = b"\n>"
UNIT = "record"
BREAKS = b"\n\r \t"
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*-.~"
"""Letters in sequences: bases or residues, stops and gaps."""


class Fasta(CorpusFormat):
    """FASTA files; a document is a sequence."""

    endings = ("fasta", "fa", "fna", "ffn", "faa", "frn")
    has_ids = True

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        return cut_bytes(file, DELIMITER, size)

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        name = file_slice.file.name
        previous: tuple[int, str | None] = (-1, None)
        split = config.split_large
        for block in record_blocks(file_slice, DELIMITER, limits, unit=UNIT, split=split):
            texts: list[str] = []
            positions: list[int] = []
            ids: list[str | None] = []
            problems = [] if block.problem is None else [block.problem]
            records = block.data.split(DELIMITER) if block.records else []
            for number, data in enumerate(records, start=block.first):
                if number == previous[0]:  # a further piece of a long sequence: no header
                    id, sequence = previous[1], data
                else:
                    if number == 0:
                        data = data.lstrip()
                        if not data:
                            continue
                        if not data.startswith(b">"):
                            message = "no `>` at its beginning: this is not FASTA"
                            problems.append(BadRecord("broken FASTA", message, name, 0, UNIT))
                            continue
                    header, _, sequence = data.partition(b"\n")
                    if b"\r" in header.rstrip():
                        message = "its lines end with \\r alone, and shall end with \\n"
                        problems.append(BadRecord("broken FASTA", message, name, number, UNIT))
                        continue
                    id = (header.lstrip(b">").split() or [b""])[0].decode(errors="replace") or None
                    previous = (number, id)
                sequence = sequence.translate(None, BREAKS)
                if invalid := sequence.translate(None, LETTERS):
                    message = f"`{id}` holds {invalid[:1]!r}, which is no letter of a sequence"
                    problems.append(BadRecord("broken FASTA", message, name, number, UNIT))
                    continue
                texts.append(sequence.decode("ascii"))
                positions.append(number)
                ids.append(id)
            yield Texts(texts, positions, ids, problems, block.read)


FORMAT = Fasta()
