"""The reference of Savanna's keys, from the tables that the conversion reads."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.models.conversion.savanna.keys import ALIASES, ELSEWHERE, USED
from headrace.models.conversion.savanna.limits import MISSING, REFUSED

from .markdown import code

INTRODUCTION = """\
# Savanna's keys

Where headrace has each key of [Savanna](https://github.com/Zymrael/savanna), or why it has none.
`headrace models convert` follows these tables; [Savanna's recipes](../savanna.md) shows how.
`*` stands for any letters.
"""


def savanna_page() -> str:
    """Return the page of all keys; keys with one destination share a row."""
    reasons = {
        "Keys that end the conversion": (
            "The model would be another function. Values that mean “off” pass.",
            REFUSED,
        ),
        "Keys that headrace cannot express": (
            "The conversion goes on and names them. Values that mean “off” pass.",
            MISSING,
        ),
    }
    return "\n\n".join(
        [
            INTRODUCTION,
            _table(
                "Keys that the conversion uses", {key: place for key, (_, place) in USED.items()}
            ),
            *(
                _table(title, {key: why for key, (_, _, why) in limits.items()}, note)
                for title, (note, limits) in reasons.items()
            ),
            _table("Keys that are set elsewhere, or not needed", ELSEWHERE),
            _table("Older names", {old: f"`{new}`" for old, new in ALIASES.items()}),
        ]
    )


def _table(title: str, places: Mapping[str, str], note: str = "") -> str:
    keys: dict[str, list[str]] = {}
    for key, place in places.items():
        keys.setdefault(place, []).append(code(key))
    rows = [f"| {', '.join(names)} | {place} |" for place, names in keys.items()]
    return (
        "\n".join(
            [
                f"## {title}\n",
                *([f"{note}\n"] if note else []),
                "| Savanna | headrace |",
                "|---|---|",
                *rows,
            ]
        )
        + "\n"
    )
