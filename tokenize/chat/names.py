"""Find fragments of special tokens' names in a record, from which a template could compose a name.

A template that writes `<|`, a message's role and `|>` composes a special token's name if the role
is its middle. Marks at the role's ends keep the name apart.
"""

from __future__ import annotations

from collections.abc import Iterable


class NameParts:
    """Finds name beginnings and endings at a value's ends."""

    def __init__(self, names: Iterable[str]) -> None:
        lowered = [name.lower() for name in names]  # templates change the case of roles
        self._longest = max(map(len, lowered), default=0)
        self._beginnings = {name[:k] for name in lowered for k in range(1, len(name))}
        self._endings = {name[k:] for name in lowered for k in range(1, len(name))}
        self._inner = "\0".join(name[1:] for name in lowered)

    def find(self, value: str) -> list[int]:
        """Return offsets where a mark must be inserted so that no name spans the value's ends.
        Templates strip white space, so it is ignored at the ends."""
        word = value.strip().lower()
        if not word or not self._longest:
            return []
        start = len(value) - len(value.lstrip())
        end_length = min(self._longest, len(word)) + 1
        places = []
        if any(word[:k] in self._endings for k in range(1, end_length)) or word in self._inner:
            places.append(start)  # the name begins before the value
        end = len(value.rstrip())
        places += [end - k + 1 for k in range(1, end_length) if word[-k:] in self._beginnings]
        return places
