"""Read a mixture's YAML despite errors, so that all problems are reported at once.

Values of the wrong type and unknown keys are removed; the rest is built and checked. Problems that
only follow from a removed value are not reported.
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

NAMED_SECTIONS = ("sources", "phases")
"""Sections whose keys are names: a problem in one entry does not affect the others."""


@dataclass
class Draft:
    """A mixture as far as its YAML could be built, and the problems of the rest."""

    mixture: Mixture
    source: str
    """Name of the YAML in error messages."""
    lines: Lines = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    """Values of the wrong type, and unknown keys."""
    removed: list[Path] = field(default_factory=list)
    """Paths that were removed because of these problems."""
    damaged: list[Path] = field(default_factory=list)
    """Entries of named sections from which a key was removed."""

    @property
    def unreadable_names(self) -> list[str]:
        """Sources and phases that the YAML names and that were removed as a whole."""
        return [str(path[1]) for path in self.removed if len(path) == 2]

    @property
    def lacks_section(self) -> bool:
        """True if a whole section was removed, so that its names are unknown."""
        return any(len(path) == 1 for path in self.removed)

    def problem(self, finding: Finding) -> Problem | None:
        """Add the line to a finding; return None if it only follows from a removed value."""
        path = finding.path
        within_removed = any(path[: len(other)] == other for other in self.removed)
        emptied = len(path) == 1 and any(other[0] == path[0] for other in self.removed)
        # A key that seems to be missing may be there, misspelt.
        uncertain = self.lacks_section or any(path[: len(entry)] == entry for entry in self.damaged)
        if within_removed or emptied or (uncertain and path not in self.lines):
            return None
        return Problem(dotted(path), finding.what, line_of(self.lines, path))


def read(file: str | FilePath, overrides: Sequence[str] = ()) -> Draft:
    """Read a mixture's YAML, with `dotted.path=value` overrides."""
    data, lines = config.read_yaml(file)
    return build_draft(config.apply_overrides(data, overrides, lines), str(file), lines)


def build_draft(data: dict[str, Any], source: str, lines: Lines) -> Draft:
    """Build as much of a mixture as possible.

    Raises ConfigError with the problems found so far if the data as a whole cannot be used.
    """
    data, draft = deepcopy(data), Draft(Mixture(), source, lines)
    while True:
        try:
            draft.mixture = config.build(Mixture, data, source=source, lines=lines)
            return draft
        except ConfigError as error:
            known = {problem.path for problem in draft.problems}
            draft.problems += [problem for problem in error.problems if problem.path not in known]
            removable = list(_removable(data))
            bad = {
                next((place for place in removable if _within(problem.path, place)), ())
                for problem in error.problems
            }
            if () in bad:  # a problem of the whole file
                raise ConfigError(source, draft.problems) from None
            for place in sorted(bad, key=len):
                if at(data, place[:-1]) is not None:  # else its parent was removed already
                    del at(data, place[:-1])[place[-1]]
                    draft.removed.append(place)
                    draft.damaged += [place[:2]] if place[0] in NAMED_SECTIONS else []


def _removable(data: dict[str, Any]) -> Iterator[Path]:
    """Yield the paths that can be removed, smallest first: settings, entries, sections.

    A required key that is missing has no path of its own, so its entry is removed.
    """
    for section in NAMED_SECTIONS:
        entries = data.get(section)
        if isinstance(entries, dict):
            for name, entry in entries.items():
                if isinstance(entry, dict):
                    yield from ((section, name, key) for key in entry)
            yield from ((section, name) for name in entries)
    yield from ((key,) for key in data)


def _within(path: str, place: Path) -> bool:
    return path == dotted(place) or path.startswith(f"{dotted(place)}.")
