"""Answers on disk that only a built or traced model gives, in `~/.cache/headrace-traces`.

A file's name is the hash of the question, of the source that answers it, and of torch's version. A
trace takes seconds for large models, and a stored answer needs no torch. The first line of a file
is the hash of the rest. A file that is damaged, or cannot be written, is no error: the answer is
found again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from .pieces import Pass, Passes, Piece

T = TypeVar("T")
PACKAGE = Path(__file__).parents[1]
"""Modules whose source decides an answer."""


def stored(
    question: str,
    make: Callable[[], T],
    pack: Callable[[T], Any] = lambda answer: answer,
    unpack: Callable[[Any], T] = lambda packed: packed,
    source: Path = PACKAGE,
) -> T:
    """Return the stored answer to a question, or make and store it. `pack` and `unpack` turn an
    answer into JSON and back; modules of the folder `source` decide the answer too."""
    key = hashlib.sha256(f"{_hash(PACKAGE)} {_hash(source)} {question}".encode()).hexdigest()[:32]
    file = folder() / f"{key}.json"
    try:
        digest, text = file.read_text().split("\n", 1)
        if digest != _digest(text):
            raise ValueError("the file is damaged")
        return unpack(json.loads(text))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        answer = make()
    text = json.dumps(pack(answer))
    with contextlib.suppress(OSError):  # a folder without room or rights
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
            written.write(f"{_digest(text)}\n{text}")
        Path(written.name).replace(file)
    return answer


def stored_passes(question: str, make: Callable[[], Passes]) -> Passes:
    """Return the stored passes of a question, or make and store them."""
    return stored(f"passes {question}", make, _packed, _passes)


def folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace-traces"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _packed(passes: Passes) -> Any:
    return [
        [[each.high, each.change, each.gradient, each.size] for each in pieces]
        for pieces in (passes.forward, passes.backward)
    ]


def _passes(packed: Any) -> Passes:
    forward, backward = packed
    return Passes(_pieces(forward), _pieces(backward))


def _pieces(rows: list[tuple[int, int, str, int]]) -> Pass:
    return tuple(Piece(*row) for row in rows)


@cache
def _hash(package: Path) -> str:
    """Return the hash of a package's source, and of torch's version."""
    found = hashlib.sha256(metadata.version("torch").encode())
    for file in sorted(package.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()
