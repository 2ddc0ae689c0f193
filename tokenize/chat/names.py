"""Parts of the names of special tokens, which a record and a template could put together.

A template that writes `<|`, the role of a message and `|>` makes the name of a special token from a
role that is a part of the name. Marks in the role keep the name apart.
"""

from __future__ import annotations

from collections.abc import Iterable


class NameParts:
    """Finds parts of names at the ends of a value."""

    def __init__(self, names: Iterable[str]) -> None:
        lowered = [name.lower() for name in names]  # templates change the case of roles
        self._longest = max(map(len, lowered), default=0)
        self._beginnings = {name[:k] for name in lowered for k in range(1, len(name))}
        self._endings = {name[k:] for name in lowered for k in range(1, len(name))}
        self._inner = "\0".join(name[1:] for name in lowered)

    def find(self, value: str) -> list[int]:
        """Return the places in a value before which a mark separates each name that goes on beyond
        the value. White space at its ends does not count, because templates strip it."""
        word = value.strip().lower()
        if not word or not self._longest:
            return []
        first = len(value) - len(value.lstrip())
        most = min(self._longest, len(word)) + 1
        places = []
        if any(word[:k] in self._endings for k in range(1, most)) or word in self._inner:
            places.append(first)  # the name begins before the value
        end = len(value.rstrip())
        places += [end - k + 1 for k in range(1, most) if word[-k:] in self._beginnings]
        return places
