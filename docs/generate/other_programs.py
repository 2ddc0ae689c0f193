"""The reference of other programs' keys: Savanna's from the tables that the conversion reads, those
of fms-fsdp and Galvatron from a YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from headrace.models.conversion.savanna.keys import ALIASES, ELSEWHERE, USED
from headrace.models.conversion.savanna.limits import MISSING, REFUSED

from .markdown import code

OTHERS = Path(__file__).with_name("other_programs.yaml")
INTRODUCTION = """\
# Keys of other programs

Where headrace has each key of [Savanna](https://github.com/Zymrael/savanna),
[fms-fsdp](https://github.com/foundation-model-stack/fms-fsdp) and
[Galvatron](https://github.com/PKU-DAIR/Hetu-Galvatron), or why it has none.
`headrace models convert` reads Savanna's configurations ([Savanna's recipes](../savanna.md));
the others have no conversion. `*` stands for any letters.
"""
OFF = "Values that mean “off” pass."


def other_programs_page() -> str:
    """Return the page of all keys; keys with one destination share a row."""
    used = {key: place for key, (_, place) in USED.items()}
    refused = {key: why for key, (_, _, why) in REFUSED.items()}
    missing = {key: why for key, (_, _, why) in MISSING.items()}
    tables = [
        _table("Savanna: keys that the conversion uses", used),
        _table(
            "Savanna: keys that end the conversion",
            refused,
            f"The model would be another function. {OFF}",
        ),
        _table(
            "Savanna: keys that headrace cannot express",
            missing,
            f"The conversion goes on and names them. {OFF}",
        ),
        _table("Savanna: keys that are set elsewhere, or not needed", ELSEWHERE),
        _table("Savanna: older names", {old: f"`{new}`" for old, new in ALIASES.items()}),
        *(_table(program, places) for program, places in other_arguments().items()),
    ]
    return "\n".join([INTRODUCTION, *tables])


def other_arguments() -> dict[str, dict[str, str]]:
    """Return the places in headrace of the arguments of programs without a conversion."""
    read: dict[str, dict[str, str]] = yaml.safe_load(OTHERS.read_text())
    return {
        program: {key: place for keys, place in places.items() for key in keys.split(", ")}
        for program, places in read.items()
    }


def _table(title: str, places: Mapping[str, str], note: str = "") -> str:
    keys: dict[str, list[str]] = {}
    for key, place in places.items():
        keys.setdefault(place, []).append(code(key))
    rows = [f"| {', '.join(names)} | {place} |" for place, names in keys.items()]
    head = [f"## {title}\n", *([f"{note}\n"] if note else []), "| key | headrace |", "|---|---|"]
    return "\n".join([*head, *rows]) + "\n"
