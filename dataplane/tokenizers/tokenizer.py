"""The tokenizer interface."""

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
    """Consecutive documents as ids, with end-of-document ids."""

    tokens: Tokens
    starts: Int64
    """[documents + 1] Token offset of each document, then the number of tokens."""
    weights: npt.NDArray[np.uint8] | None = None
    """[tokens] Index into the tokenizer's loss-weight table."""


class Raw(Sequence[str]):
    """Texts as file content: UTF-8, none empty, with a separator byte after each text. A byte
    tokenizer uses the bytes; for other tokenizers it is a sequence of strings."""

    def __init__(self, data: bytes, ends: Int64) -> None:
        self.data = data
        self.ends = ends
        """[texts] End offset, separator byte included."""

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
    """A token that plain text never becomes."""

    id: int
    strips_left: bool = False
    """The token absorbs white space before it."""
    strips_right: bool = False
    """The token absorbs white space after it."""


class TextError(Exception):
    """A text that cannot be encoded."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number = number
        """Index of the text in the call."""
        self.why = why


class Tokenizer(Protocol):
    @property
    def info(self) -> TokenizerInfo:
        """The tokenizer's entry in a manifest."""
        ...

    @property
    def weight_table(self) -> tuple[float, ...] | None:
        """The loss-weight table for `Encoded.weights`, if there is one."""
        ...

    @property
    def special(self) -> Mapping[str, SpecialToken]:
        """Special tokens, by name."""
        ...

    @property
    def files(self) -> dict[str, bytes]:
        """Files to write beside the manifest, by name."""
        ...

    @property
    def end_name(self) -> str | None:
        """Name of the end-of-document token, if there is one."""
        ...

    def library_file(self) -> bytes:
        """Return an equivalent file in the `tokenizers` library's JSON format."""
        ...

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Encode texts, with end-of-document ids; raise TextError if a text cannot be encoded."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens are shown by name."""
        ...

    @property
    def unsplittable_reason(self) -> str | None:
        """Why a text must not be split at special tokens (the ids would change), or None."""
        ...

    def spans(self, texts: Sequence[str], encoded: Encoded) -> Int64:
        """Return byte spans [ids, 2]: where ids lie in their text, in UTF-8 bytes. End-of-document
        ids have an empty span at the text's end."""
        ...

    def find_misfits(self, encoded: Encoded) -> dict[int, str]:
        """Return documents that the tokenizer is not meant for, with reasons. A build rejects
        them."""
        ...

    def byte_sizes(self) -> Int64:
        """Return text bytes by id [vocab_size]; 0 for special tokens."""
        ...


def id_type(vocab_size: int) -> str:
    """Return the smallest id type for a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def spans_from_sizes(sizes: Int64, starts: Int64) -> Int64:
    """Return the byte spans [ids, 2] of ids that fill their texts, from bytes per id."""
    ends = np.cumsum(sizes)
    before = np.concatenate([[0], ends])[starts[:-1]]
    ends -= np.repeat(before, np.diff(starts))
    return np.stack([ends - sizes, ends], axis=1)


class TokenizerModule(Protocol):
    """A module that implements a kind of tokenizer."""

    PACKAGES: tuple[str, ...]
    """Packages whose versions a build records, because they may change ids."""

    def restore(self, info: TokenizerInfo, read: Callable[[str], bytes]) -> Tokenizer:
        """Restore a tokenizer from a manifest entry; `read` reads files beside the manifest."""
        ...
