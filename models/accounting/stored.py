"""Disk cache in `~/.cache/headrace-traces` for answers that need a built or traced model.

Tracing a large model takes seconds; reading a cached answer does not even need torch. A file is
named by a hash over the question, the source code behind the answer and torch's version. Its first
line is a hash of the remaining content. A damaged or unwritable file is no error: the answer is
computed again.
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

from .pieces import Pass, Passes, PassSegment

T = TypeVar("T")
PACKAGE = Path(__file__).parents[1]
"""The answers depend on its modules' source."""


def load_or_compute(
    question: str,
    compute: Callable[[], T],
    pack: Callable[[T], Any] = lambda answer: answer,
    unpack: Callable[[Any], T] = lambda packed: packed,
    source: Path = PACKAGE,
) -> T:
    """Return the cached answer to a question, or compute and cache it. `pack` and `unpack` convert
    an answer to JSON and back. The answer also depends on the modules in the folder `source`."""
    name = hashlib.sha256(
        f"{_hash_source(PACKAGE)} {_hash_source(source)} {question}".encode()
    ).hexdigest()[:32]
    file = cache_folder() / f"{name}.json"
    try:
        digest, content = file.read_text().split("\n", 1)
        if digest != _digest(content):
            raise ValueError("the file is damaged")
        return unpack(json.loads(content))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        answer = compute()
    content = json.dumps(pack(answer))
    with contextlib.suppress(OSError):  # a folder without room or rights
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(f"{_digest(content)}\n{content}")
        Path(temporary.name).replace(file)
    return answer


def load_or_compute_passes(question: str, compute: Callable[[], Passes]) -> Passes:
    """Return the cached passes for a question, or compute and cache them."""
    return load_or_compute(f"passes {question}", compute, _pack_passes, _unpack_passes)


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace-traces"


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _pack_passes(passes: Passes) -> Any:
    return [
        [[segment.high, segment.change, segment.gradient, segment.size] for segment in segments]
        for segments in (passes.forward, passes.backward)
    ]


def _unpack_passes(packed: Any) -> Passes:
    forward, backward = packed
    return Passes(_unpack_segments(forward), _unpack_segments(backward))


def _unpack_segments(rows: list[tuple[int, int, str, int]]) -> Pass:
    return tuple(PassSegment(*row) for row in rows)


@cache
def _hash_source(package: Path) -> str:
    """Hash a package's source and torch's version."""
    digest = hashlib.sha256(metadata.version("torch").encode())
    for file in sorted(package.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
