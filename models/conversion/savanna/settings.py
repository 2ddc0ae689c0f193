"""Savanna's YAML files, merged as Savanna does, and the fate of every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ....console.errors import ConfigError, ConfigProblem, StorageError
from ....console.explain import nearest
from .keys import ALIASES, ELSEWHERE, USED
from .limits import MISSING, REFUSED, Limit

Fate = Literal["used", "elsewhere", "missing"]


@dataclass(frozen=True)
class SavannaSettings:
    """Values in all files, and Savanna's defaults for missing keys."""

    values_by_key: Mapping[str, Any]
    source: str

    def __getitem__(self, key: str) -> Any:
        value = self.values_by_key.get(key)
        return value if value is not None else USED[key][0]

    def required(self, key: str) -> Any:
        value = self[key]
        if value is None:
            raise self.refusal(ConfigProblem(key, "is missing, and Savanna has no default"))
        return value

    def number(self, key: str) -> float:
        """Return a number; YAML 1.1 reads `1e-4` as text."""
        return number(self.required(key), key, self.source)

    def integer(self, key: str) -> int:
        return int(self.number(key))

    def refusal(self, *problems: ConfigProblem) -> ConfigError:
        return ConfigError(
            self.source,
            problems,
            hint="every key: page reference/other-programs of the site (docs/savanna.md)",
        )

    def fates(self) -> Iterator[tuple[str, Fate, str]]:
        """Yield (key, fate, our key or reason) for all keys in the files, and for defaults that
        headrace cannot express."""
        for key, limit in (MISSING | REFUSED).items():
            if not harmless(self.values_by_key.get(key), limit):
                value = self.values_by_key.get(key, limit[0])
                default = "" if key in self.values_by_key else " (Savanna's default)"
                yield key, "missing", f"{value!r}{default}: {limit[2]}"
        for key in self.values_by_key:
            if key in USED:
                yield key, "used", USED[key][1]
            elif key not in MISSING and key not in REFUSED:
                yield key, "elsewhere", explain_elsewhere(key) or ""
            elif harmless(self.values_by_key[key], (MISSING | REFUSED)[key]):
                yield key, "elsewhere", "off, as here"


def read_settings(files: Sequence[str | Path]) -> SavannaSettings:
    """Merge YAML files: `-` in a key means `_`, and no key may stand in two files."""
    import yaml

    values_by_key: dict[str, Any] = {}
    origin: dict[str, str] = {}
    problems = []
    for file in map(Path, files):
        try:
            data = yaml.safe_load(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise StorageError(f"cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise StorageError(f"{file} is not YAML: {error}") from None
        if not isinstance(data, dict):
            raise StorageError(f"{file} has no keys", hint="name the YAML files of a configuration")
        for written, value in data.items():
            key = str(written).replace("-", "_")
            key = ALIASES.get(key, key)
            if key in values_by_key:
                problems.append(
                    ConfigProblem(str(written), f"is set in {origin[key]} and in {file}")
                )
            values_by_key[key], origin[key] = value, str(file)
    settings = SavannaSettings(values_by_key, ", ".join(map(str, files)))
    known = {*USED, *MISSING, *REFUSED, *ELSEWHERE, *ALIASES}
    for key in values_by_key:
        if key not in known and explain_elsewhere(key) is None:
            near = nearest(key, known)
            hint = f"; did you mean `{near}`?" if near else ""
            problems.append(ConfigProblem(key, f"is not a key of Savanna{hint}"))
    if problems:
        raise settings.refusal(*problems)
    return settings


def explain_elsewhere(key: str) -> str | None:
    """Return where headrace sets what a key sets, or why it needs no such key."""
    return next((where for name, where in ELSEWHERE.items() if fnmatchcase(key, name)), None)


def harmless(value: Any, limit: Limit) -> bool:
    """True if a value, or Savanna's default for None, needs nothing from headrace."""
    return (limit[0] if value is None else value) in limit[1]


def number(value: Any, key: str, source: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        problem = ConfigProblem(key, f"must be a number, not {value!r}")
        raise ConfigError(source, [problem]) from None
