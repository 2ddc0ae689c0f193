"""The documents that a search asks for: by id, by number, or by their whole text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...console.errors import InputError
from ...dataplane import tokenizers
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.shards.documents import DocumentOrigin
from ...dataplane.storage import storage
from ..planning.id_list import read_ids

LIST_ENDINGS = (".txt", ".jsonl", ".ndjson", ".parquet", ".pq")
NUMBER = "number:"
"""Begins a document's number in a dataset."""

WITHOUT_IDS = (
    "its documents have no ids; `tokenize build --id-field` keeps them, and number:N and --text "
    "find documents without"
)


class Match(NamedTuple):
    """A dataset's document that was asked for."""

    number: int
    """Document number in the dataset."""
    key: str
    """What was asked for."""
    origin: DocumentOrigin
    further_keys: tuple[str, ...] = ()
    """Other words that ask for the same document."""


@dataclass(frozen=True)
class DocumentRequest:
    """Documents to search for."""

    ids: frozenset[str]
    """Ids in the corpus."""
    numbers: tuple[int, ...] = ()
    """Document numbers in the datasets."""
    texts: tuple[tuple[str, str], ...] = ()
    """Names and texts of documents."""

    def list_keys(self) -> list[str]:
        """Return what was asked for, as people wrote it."""
        return [
            *sorted(self.ids),
            *(f"{NUMBER}{number}" for number in self.numbers),
            *(name for name, _ in self.texts),
        ]

    def match(self, dataset: Dataset) -> list[Match]:
        """Return the dataset's documents that were asked for, sorted."""
        matches: dict[int, Match] = {}
        count = int(dataset.shard_documents[-1])
        if self.ids and dataset.has_ids:
            for number, origin in dataset.find_ids(self.ids):
                matches[number] = Match(number, str(origin.id), origin)
        named = [(number, f"{NUMBER}{number}") for number in self.numbers if number < count]
        for number, key in [*named, *_match_texts(dataset, self.texts)]:
            match = matches.get(number)
            if match is None:
                matches[number] = Match(number, key, dataset.origins(number, number + 1)[0])
            else:
                matches[number] = match._replace(further_keys=(*match.further_keys, key))
        return [matches[number] for number in sorted(matches)]


def parse_request(documents: Sequence[str], texts: Sequence[str]) -> DocumentRequest:
    """Parse ids, numbers (`number:17`), and files with lists of ids; read the files of texts."""
    ids: set[str] = set()
    numbers: list[int] = []
    for word in documents:
        if word.startswith(NUMBER) and word.removeprefix(NUMBER).isdecimal():
            numbers.append(int(word.removeprefix(NUMBER)))
        elif _is_file(word):
            ids.update(read_ids(word))
        elif word.endswith(LIST_ENDINGS):
            raise InputError(
                f"there is no file {word}", hint="an id that ends like this stands in a list of ids"
            )
        else:
            ids.update(id for id in word.split(",") if id)
    return DocumentRequest(
        frozenset(ids), tuple(dict.fromkeys(numbers)), tuple(map(_read_text, texts))
    )


def _is_file(word: str) -> bool:
    if not storage.is_local(word):
        return True
    try:
        return storage.local_path(word).is_file()
    except OSError:  # many ids are longer than a file's name may be
        return False


def _read_text(url: str) -> tuple[str, str]:
    try:
        return url, storage.read(url).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{url} is not UTF-8: {error.reason}") from None


def _match_texts(dataset: Dataset, texts: Iterable[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    """Yield the documents whose tokens are those of a whole text: number, and the text's name."""
    names, contents = [name for name, _ in texts], [content for _, content in texts]
    if not contents:
        return
    tokenizer = tokenizers.load(dataset.manifest.tokenizer, dataset.shards_url)
    encoded = tokenizer.encode(contents)
    for name, start, end in zip(names, encoded.starts[:-1], encoded.starts[1:], strict=True):
        text_tokens = encoded.tokens[start:end]
        for number, first in dataset.find_lengths(len(text_tokens)):
            tokens = np.empty(len(text_tokens), np.int64)
            dataset.fill(first, tokens)
            if np.array_equal(tokens, text_tokens):
                yield number, name
