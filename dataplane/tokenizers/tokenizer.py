"""The interface of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, Tokens
from ..datasets.manifest import TokenizerInfo


@dataclass(frozen=True, eq=False)
class Encoded:
    """Consecutive documents as ids, each with its end-of-document id."""

    tokens: Tokens
    starts: Int64
    """Token offsets of the documents, then the number of tokens."""
    weights: npt.NDArray[np.uint8] | None = None
    """For each token, an index into the tokenizer's loss-weight table."""


class Raw(Sequence[str]):
    """Texts as the bytes of their file: UTF-8, each followed by one separator byte, none empty. A
    byte tokenizer uses the bytes; for all others it is a sequence of strings."""

    def __init__(self, data: bytes, ends: Int64) -> None:
        self.data = data
        self.ends = ends
        """End of each text, its separator byte included."""

    @cached_property
    def _texts(self) -> list[str]:
        starts = [0, *self.ends[:-1].tolist()]
        return [
            self.data[start : end - 1].decode()
            for start, end in zip(starts, self.ends.tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        return self._texts[number]

    def count(self, value: Any) -> int:
        return self._texts.count(value) if value else 0


@dataclass(frozen=True)
class SpecialToken:
    """A token that no plain text becomes."""

    id: int
    takes_left: bool = False
    """It swallows the white space before it."""
    takes_right: bool = False
    """It swallows the white space after it."""


class TextError(Exception):
    """A text that a tokenizer cannot turn into ids."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number = number
        """Number of the text among those to encode."""
        self.why = why


class Tokenizer(Protocol):
    @property
    def info(self) -> TokenizerInfo:
        """The tokenizer's entry in a manifest."""
        ...

    @property
    def weight_table(self) -> tuple[float, ...] | None:
        """The loss-weight table that `Encoded.weights` indexes, if there is one."""
        ...

    @property
    def special(self) -> Mapping[str, SpecialToken]:
        """The special tokens by their names."""
        ...

    @property
    def files(self) -> dict[str, bytes]:
        """Files to write beside the manifest, by name."""
        ...

    @property
    def end_name(self) -> str | None:
        """The name of the token that ends every document, if there is one."""
        ...

    def library_file(self) -> bytes:
        """Return a file in the JSON format of `tokenizers` that gives the same ids."""
        ...

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts, each with an end-of-document id; raises TextError if a text has no ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens are shown by their names."""
        ...

    @property
    def whole_because(self) -> str | None:
        """Why the ids of a text are not those of its parts between special tokens, or None."""
        ...

    def spans(self, texts: Sequence[str], encoded: Encoded) -> Int64:
        """Return the bytes [start, end) of its text that each id of encoded texts stands for, as
        [ids, 2]; the ends of documents stand for none, at the end of their text."""
        ...

    def misfits(self, encoded: Encoded) -> dict[int, str]:
        """Return the numbers of documents that are not of the kind that the tokenizer is for, and
        why. A build does not accept them."""
        ...

    def byte_sizes(self) -> Int64:
        """Return the bytes of text of each id; special tokens have none."""
        ...


def id_type(vocab_size: int) -> str:
    """Return the smallest type for ids that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def spans_of_sizes(sizes: Int64, starts: Int64) -> Int64:
    """Return the spans of ids that follow each other in their texts, from the bytes of each."""
    ends = np.cumsum(sizes)
    before = np.concatenate([[0], ends])[starts[:-1]]
    ends -= np.repeat(before, np.diff(starts))
    return np.stack([ends - sizes, ends], axis=1)


class TokenizerModule(Protocol):
    """The module of a kind of tokenizer."""

    PACKAGES: tuple[str, ...]
    """Packages whose versions a build records, because they may change the ids."""

    def restore(self, info: TokenizerInfo, read: Callable[[str], bytes]) -> Tokenizer:
        """Restore a tokenizer from its manifest entry; `read` reads files beside the manifest."""
        ...
