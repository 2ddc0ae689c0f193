"""Tokenizers, found by name: text to ids when a dataset is built, ids to text when it is read.

They live on the ground floor, because whoever reads a dataset (an audit, a sample of a run) must
be able to show its documents as text. A manifest holds what builds its tokenizer again; a file
that is too large for it lies beside the manifest, named by its content.

To add one: write a file beside this one, and add it to TOKENIZERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ...console.errors import InputError
from ..storage import storage

if TYPE_CHECKING:
    from ..arrays import Int64, Tokens
    from ..datasets.manifest import TokenizerInfo

TOKENIZERS = {
    "byte": "headrace.dataplane.tokenizers.byte",
    "bpe": "headrace.dataplane.tokenizers.bpe",
}


@dataclass(frozen=True, eq=False)
class Encoded:
    """Documents as ids, side by side, each with its end-of-document id."""

    tokens: Tokens
    starts: Int64
    """Token offsets of the documents, and after the last one."""
    weights: npt.NDArray[np.uint8] | None = None
    """Of each token, a code into the tokenizer's palette of loss weights."""


class Raw(Sequence[str]):
    """Texts that are still the bytes of their file: UTF-8, each with one byte after it, none
    empty. A byte-level tokenizer takes the bytes; to anyone else it is a sequence of strings."""

    def __init__(self, data: bytes, ends: Int64) -> None:
        self.data = data
        self.ends = ends
        """Where the texts' last bytes, which are none of theirs, end."""

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


class TextError(Exception):
    """A text that a tokenizer cannot turn into ids."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(number, why)
        self.number = number
        """Which of the texts that were to be encoded."""
        self.why = why


class Tokenizer(Protocol):
    @property
    def info(self) -> TokenizerInfo:
        """What the manifest says of it."""
        ...

    @property
    def palette(self) -> tuple[float, ...] | None:
        """The loss weights that the codes of `Encoded.weights` stand for."""
        ...

    @property
    def special(self) -> tuple[str, ...]:
        """The names of its special tokens."""
        ...

    @property
    def files(self) -> dict[str, bytes]:
        """What must lie beside the manifest, by name."""
        ...

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text, and the end-of-document id after it; TextError, if one has
        none."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are shown by their names."""
        ...


class TokenizerModule(Protocol):
    """What each module of this folder provides."""

    def restore(self, info: TokenizerInfo, read: Callable[[str], bytes], where: str) -> Tokenizer:
        """The tokenizer of which a manifest holds `info`; `read` reads what lies beside it."""
        ...


def load(info: TokenizerInfo, url: str) -> Tokenizer:
    """The tokenizer of the dataset at `url`, whose manifest holds `info`."""
    return restore(info, lambda name: storage.read(storage.join(url, name)), url)


def restore(info: TokenizerInfo, read: Callable[[str], bytes], where: str) -> Tokenizer:
    if info.kind not in TOKENIZERS:
        raise InputError(
            f"the dataset at {where} does not say how its ids become text",
            hint="index it again with --tokenizer byte or --tokenizer FILE.json",
        )
    module: TokenizerModule = import_module(TOKENIZERS[info.kind])
    return module.restore(info, read, where)


def id_type(vocab_size: int) -> str:
    """The smallest of our types that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"
