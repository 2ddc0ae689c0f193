"""Sequences of a FASTA or JSONL file, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ....console.errors import InputError
from .genome import Genome
from .lines import read_lines

FASTA = ("fa", "fasta", "fna", "ffn", "faa", "frn")
JSONL = ("jsonl", "ndjson")


def read_sequences(path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each sequence. A line of JSONL has them as `id` and `text`;
    without an id, the name is its number."""
    ending = path.removesuffix(".gz").rpartition(".")[2].lower()
    if ending in FASTA:
        genome = Genome(path)
        for name, place in genome.sequences.items():
            yield name, genome.fetch(name, 0, place.length)
    elif ending in JSONL:
        yield from _read_jsonl(path)
    else:
        endings = ", ".join(f".{ending}" for ending in (*FASTA, *JSONL))
        raise InputError(
            f"{path} is no file of sequences by its name",
            hint=f"{endings}, or one of these with .gz",
        )


def _read_jsonl(path: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(read_lines(path)):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["text"]
        except (ValueError, TypeError, KeyError):
            text = None
        if not isinstance(text, str):
            raise InputError(
                f"{path}, line {number + 1} is no JSON object with a `text`",
                hint='write {"id": "a", "text": "ACGT"}',
            )
        yield str(record.get("id", number)), text
