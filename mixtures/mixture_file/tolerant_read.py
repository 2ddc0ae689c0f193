"""Read a mixture's YAML despite errors, so that all problems are reported at once.

Values with a wrong type and unknown keys are removed; the remaining YAML is built and checked.
Problems caused by a removed value are not reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from ...console import config
from ...console.config import Lines
from ...console.errors import ConfigError, ConfigProblem
from ...console.explain import find_line, find_value
from ...console.yaml_text import Path, dotted
from .check import MixtureFinding
from .mixture import Mixture

NAMED_SECTIONS = ("sources", "phases")
"""Sections with entries by name, which are built independently."""


@dataclass
class Draft:
    """A mixture as far as its YAML could be built, and the problems in the removed values."""

    mixture: Mixture
    source: str
    """Name that error messages give the YAML."""
    lines: Lines = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    """Wrong types and unknown keys."""
    removed: list[Path] = field(default_factory=list)
    """Paths removed because of these problems."""
    damaged: list[Path] = field(default_factory=list)
    """Entries in named sections that lost a key."""

    @property
    def unreadable_names(self) -> list[str]:
        """Sources and phases removed as a whole."""
        return [str(path[1]) for path in self.removed if len(path) == 2]

    @property
    def lacks_section(self) -> bool:
        """True if a whole section was removed, with all its names."""
        return any(len(path) == 1 for path in self.removed)

    def refuse(self, findings: Iterable[MixtureFinding] = (), *, hint: str | None = None) -> None:
        """Raise ConfigError if the YAML had problems, or if there are findings."""
        problems = [*self.problems, *filter(None, map(self._locate_problem, findings))]
        if problems:
            raise ConfigError(self.source, problems, hint=hint)

    def _locate_problem(self, finding: MixtureFinding) -> ConfigProblem | None:
        """Add the line to a finding; return None if a removed value caused it."""
        path = finding.path
        within_removed = any(path[: len(removed)] == removed for removed in self.removed)
        emptied = len(path) == 1 and any(removed[0] == path[0] for removed in self.removed)
        # A key that seems to be missing may be there, misspelt.
        uncertain = self.lacks_section or any(path[: len(entry)] == entry for entry in self.damaged)
        if within_removed or emptied or (uncertain and path not in self.lines):
            return None
        return ConfigProblem(dotted(path), finding.message, find_line(self.lines, path))


def read(file: str | FilePath, overrides: Sequence[str] = ()) -> Draft:
    """Read a mixture's YAML, with `dotted.path=value` overrides."""
    data, lines = config.read_yaml(file)
    return build_draft(config.apply_overrides(data, overrides, lines), str(file), lines)


def build_draft(data: dict[str, Any], source: str, lines: Lines) -> Draft:
    """Build as much of a mixture as possible.

    Raises ConfigError with the collected problems if the data as a whole cannot be used.
    """
    data, draft = deepcopy(data), Draft(Mixture(), source, lines)
    while True:
        try:
            draft.mixture = config.build(Mixture, data, source=source, lines=lines)
            return draft
        except ConfigError as error:
            reported = {problem.path for problem in draft.problems}
            draft.problems += [
                problem for problem in error.problems if problem.path not in reported
            ]
            removable_paths = list(_removable_paths(data))
            bad_paths = {
                next((path for path in removable_paths if _is_within(problem.path, path)), ())
                for problem in error.problems
            }
            if () in bad_paths:  # a problem of the whole file
                raise ConfigError(source, draft.problems) from None
            for path in sorted(bad_paths, key=len):
                if find_value(data, path[:-1]) is not None:  # else its parent was removed already
                    del find_value(data, path[:-1])[path[-1]]
                    draft.removed.append(path)
                    draft.damaged += [path[:2]] if path[0] in NAMED_SECTIONS else []


def _removable_paths(data: dict[str, Any]) -> Iterator[Path]:
    """Yield the paths that can be removed, smallest first: settings, entries, sections.

    A missing required key has no path, so its entry is removed.
    """
    for section in NAMED_SECTIONS:
        entries = data.get(section)
        if isinstance(entries, dict):
            for name, entry in entries.items():
                if isinstance(entry, dict):
                    yield from ((section, name, key) for key in entry)
            yield from ((section, name) for name in entries)
    yield from ((key,) for key in data)


def _is_within(path: str, parent: Path) -> bool:
    return path == dotted(parent) or path.startswith(f"{dotted(parent)}.")
