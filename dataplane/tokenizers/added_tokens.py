"""Added tokens in the midst of texts, found as the `tokenizers` library finds them.

The library searches a text for the names of added tokens, first those that are searched before
normalization, then the others in the parts between, and normalizes and encodes what is left part by
part. A match is the leftmost name, and of several names there the longest. A special token that is
read as text ends a search for others within its name. Names that absorb white space, or that must
be whole words, and the second search are left to the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, AnyStr, Generic, NamedTuple

from .fast_bpe import decode_token

Normalize = Callable[[str], str]


class Part(NamedTuple):
    """A part of a text between added tokens."""

    text: str
    next_id: int | None
    """The added token after the part; None: the text ends."""


class AddedTokens:
    """The added tokens of a tokenizer."""

    def __init__(
        self,
        tokens: Sequence[Mapping[str, Any]],
        *,
        parse_special: bool,
        normalize: Normalize | None,
        words: Mapping[str, int],
        splittable: bool,
    ) -> None:
        """`words`: tokens that the library chooses for a whole word, though no merge produces them
        (`ignore_merges`). `splittable`: False if a part is not encoded as a text of its own."""
        searched = [token for token in tokens if parse_special or not token["special"]]
        early = [token for token in searched if not token["normalized"]]
        is_late = not early and normalize is None  # then the second search is the only one
        exact = [
            token
            for token in searched
            if splittable
            and bool(token["normalized"]) is is_late
            and not (token["lstrip"] or token["rstrip"] or token["single_word"])
        ]
        self._ids = {token["content"]: int(token["id"]) for token in exact}
        same_search = [token for token in tokens if bool(token["normalized"]) is is_late]
        self._exact = _compile([token["content"] for token in same_search] if exact else [])
        names = [token["content"] for token in searched if token["content"] not in self._ids]
        spellings = (
            decode_token(token["content"]) for token in tokens if token["content"] in words
        )
        names += [spelling for spelling in spellings if spelling]
        self._normalize = normalize
        if normalize is not None:  # some are searched for in the normalized text
            names += [normalize(name) for name in names]
        self._inexact = _compile(names)

    @property
    def are_absent(self) -> bool:
        """Return True if no text is searched for a name."""
        return self._exact is None and self._inexact is None

    def need_library(self, text: str) -> bool:
        """Return True if a text, or its normalized form, has a name that only the library finds."""
        if self._inexact is None:
            return False
        if self._inexact.search(text):
            return True
        return self._normalize is not None and bool(self._inexact.search(self._normalize(text)))

    def split(self, text: str) -> list[Part]:
        """Split a text at added tokens."""
        parts, start = [], 0
        if self._exact is not None:
            for match in self._exact.finditer(text):
                id = self._ids.get(match[0])
                if id is not None:
                    parts.append(Part(text[start : match.start()], id))
                    start = match.end()
        return [*parts, Part(text[start:] if start else text, None)]


class NameSearch(Generic[AnyStr]):
    """Looks for a name in texts by the rarest letter in it: Python finds single letters by vector
    instructions, and longer strings several times slower."""

    def __init__(self, name: AnyStr) -> None:
        letters = [name[k : k + 1] for k in range(len(name))]
        self._name: AnyStr = name
        self._offset = min(range(len(name)), key=lambda k: (letters[k].isalnum(), -ord(letters[k])))
        self._letter: AnyStr = letters[self._offset]

    def find_texts(self, texts: Sequence[AnyStr]) -> list[int]:
        """Return the indices of texts that contain the name."""
        letter = self._letter
        return [k for k, text in enumerate(texts) if letter in text and self.is_in(text)]

    def is_in(self, text: AnyStr) -> bool:
        place = text.find(self._letter)
        for _ in range(len(text) >> 8):  # with more letters, a search for the name is faster
            if place < 0:
                return False
            if place >= self._offset and text.startswith(self._name, place - self._offset):
                return True
            place = text.find(self._letter, place + 1)
        return place >= 0 and self._name in text


def _compile(names: Sequence[str]) -> re.Pattern[str] | None:
    """Return an expression that finds the longest name at the leftmost place."""
    if not names:
        return None
    return re.compile("|".join(map(re.escape, sorted(set(names), key=len, reverse=True))))
