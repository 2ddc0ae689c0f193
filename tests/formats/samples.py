"""Committed samples of what headrace writes: files on disk, printed JSON, keys, flags, names.

    compare("flags.txt", text)        the text is that of samples/flags.txt
    pin_keys("eval", value)           the keys and types of a JSON value are those of samples/keys/

`make samples` writes the samples again in place of comparing.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent / "samples"
WORLD = SAMPLES / "world"
"""Files that the commands of story.py have written."""
RENEW = "RENEW_SAMPLES" in os.environ
MAX_LINES = 60
"""Lines of a difference that are shown."""


def compare(name: str, text: str) -> None:
    """Compare a text with its sample; renew the sample if that is asked for."""
    file = SAMPLES / name
    if RENEW:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    assert file.exists(), f"{name} has no sample: run `make samples`, and read what it adds"
    difference = differing_lines(name, file.read_text(), text)
    assert not difference, "\n".join(difference)


def differing_lines(name: str, sample: str, text: str) -> list[str]:
    lines = difflib.unified_diff(
        sample.splitlines(), text.splitlines(), f"{name} (sample)", f"{name} (now)", "", "", 2, ""
    )
    return list(lines)[:MAX_LINES]


def pin_keys(name: str, value: Any) -> None:
    """Compare the keys and types of a JSON value with their sample."""
    compare(f"keys/{name}.json", as_text(shape(value)))


def as_text(value: Any) -> str:
    """Return JSON with its keys in their order."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def shape(value: Any) -> Any:
    """Return the keys and types of a JSON value. A list has the shapes of its items."""
    if isinstance(value, dict):
        return {str(key): shape(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return distinct(shape(item) for item in value)
    return "null" if value is None else type(value).__name__


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return different values in the order of their first place."""
    by_text = {json.dumps(value): value for value in values}
    return list(by_text.values())


VOLATILE = {
    *("time", "seconds", "blocked", "tokens_per_second", "data_wait", "memory", "changed", "size"),
    *("check", "sha256", "bytes"),
}
"""Keys of a run's files whose values differ from run to run: only their types are compared."""
VERSIONS = re.compile(r"\d+\.\d+\.\d+(\+\w+)?")


def masked(value: Any, *, measured: bool, key: str = "") -> Any:
    """Return a JSON value as it is compared. Versions of packages, absolute folders and seals are
    masked. In what a run has `measured`, so are times, sizes, checksums and floats, which depend on
    the machine."""
    if isinstance(value, dict):
        return {name: masked(item, measured=measured, key=name) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item, measured=measured, key=key) for item in value]
    if isinstance(value, str) and (key == "seal" or VERSIONS.fullmatch(value)):
        return "SEAL" if key == "seal" else "VERSION"
    if isinstance(value, str) and key == "folder" and value.startswith("/"):
        return "FOLDER"
    if measured and value is not None and (key in VOLATILE or isinstance(value, float)):
        return type(value).__name__.upper()
    return value
