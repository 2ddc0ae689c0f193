"""A mixture's YAML as far as it can be read, so that all that is wrong with it is told in one go.

What has the wrong shape (a misspelt key, a word for a number) is taken out, and the rest is built
and asked whether it makes sense. Nothing is said of what was taken out, or would have been there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ...console import config
from ...console.config import Lines
from ...console.errors import ConfigError, Problem
from ...console.explain import at, line_of
from ...console.yaml_text import Path, dotted
from .check import Finding
from .mixture import Mixture

NAMED = ("sources", "phases")
"""Sections whose keys are names: what is wrong in one entry says nothing of the others."""


@dataclass
class Draft:
    mixture: Mixture
    source: str
    """What the mixture is read from, for people."""
    lines: Lines = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """What has the wrong shape."""
    removed: list[Path] = field(default_factory=list)
    """What was taken out therefore."""
    damaged: list[Path] = field(default_factory=list)
    """Entries in which something was; they are there, whatever is left of them."""

    @property
    def unreadable_names(self) -> list[str]:
        """Sources and phases that the YAML has and that could not be read at all."""
        return [str(path[1]) for path in self.removed if len(path) == 2]

    @property
    def lacks_section(self) -> bool:
        """Whether a whole section is missing: nobody knows what it would have brought."""
        return any(len(path) == 1 for path in self.removed)

    def problem(self, finding: Finding) -> Problem | None:
        """A finding with its line, unless it only follows from what has the wrong shape."""
        path = finding.path
        gone = any(path[: len(other)] == other for other in self.removed)
        emptied = len(path) == 1 and any(other[0] == path[0] for other in self.removed)
        # What is not there may be there, misspelt.
        torn = self.lacks_section or any(path[: len(entry)] == entry for entry in self.damaged)
        if gone or emptied or (torn and path not in self.lines):
            return None
        return Problem(dotted(path), finding.what, line_of(self.lines, path))


def read(file: str | FilePath, overrides: Sequence[str] = ()) -> Draft:
    data, lines = config.read_yaml(file)
    return build_draft(config.apply_overrides(data, overrides, lines), str(file), lines)


def build_draft(data: dict[str, Any], source: str, lines: Lines) -> Draft:
    """Build what can be built. If too little is left, what has the wrong shape is all there is."""
    data, found = deepcopy(data), Draft(Mixture(), source, lines)
    while True:
        try:
            found.mixture = config.build(Mixture, data, source=source, lines=lines)
            return found
        except ConfigError as error:
            known = {problem.path for problem in found.problems}
            found.problems += [each for each in error.problems if each.path not in known]
            places = list(_places(data))
            bad = {
                next((place for place in places if _within(problem.path, place)), ())
                for problem in error.problems
            }
            if () in bad:  # of the whole
                raise ConfigError(source, found.problems) from None
            for place in sorted(bad, key=len):
                if at(data, place[:-1]) is not None:  # else it went with what it is a part of
                    del at(data, place[:-1])[place[-1]]
                    found.removed.append(place)
                    found.damaged += [place[:2]] if place[0] in NAMED else []


def _places(data: dict[str, Any]) -> Iterator[Path]:
    """What can be taken out, the smallest first: settings of entries, entries, sections. (An entry
    without what it must have is found when its own place is all that is left of the path.)"""
    for section in NAMED:
        entries = data.get(section)
        if isinstance(entries, dict):
            for name, entry in entries.items():
                if isinstance(entry, dict):
                    yield from ((section, name, key) for key in entry)
            yield from ((section, name) for name in entries)
    yield from ((key,) for key in data)


def _within(path: str, place: Path) -> bool:
    return path == dotted(place) or path.startswith(f"{dotted(place)}.")
