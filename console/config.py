"""Configuration: frozen dataclasses, read from YAML, checked in full before anything starts.

A configuration is an ordinary frozen dataclass that lives beside what it configures. Fields are
documented by the string below them, `__post_init__` raises ValueError where two fields disagree,
and pydantic checks types and refuses unknown keys when a file is read. The dataclasses
themselves need the standard library only, so that models import with torch alone.

    run = load(RunConfig, "run.yaml", overrides=["optimizer.lr=3e-4"])
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from . import yaml_text
from .errors import ConfigError, Problem, StorageError
from .explain import NameIn, OneOf, changed_booleans, line_of, nearest, problems
from .yaml_text import Lines, Path, count, dotted

__all__ = [
    "Lines",
    "NameIn",
    "OneOf",
    "apply_overrides",
    "build",
    "count",
    "dump",
    "load",
    "plain",
    "read_yaml",
]

T = TypeVar("T")
Data = dict[str, Any]


def load(kind: type[T], file: str | pathlib.Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file as `kind`. `overrides` are `dotted.path=value` words."""
    data, lines = read_yaml(file)
    data = apply_overrides(data, overrides, lines)
    return build(kind, data, source=str(file), lines=lines)


def read_yaml(file: str | pathlib.Path) -> tuple[Data, Lines]:
    """The data of a YAML file, and the line on which each of its values stands."""
    path = pathlib.Path(file)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        hint = f"did you mean {path.parent / near}?" if near else "check the path"
        raise StorageError(f"there is no file {path}", hint=hint) from None
    except IsADirectoryError:
        hint = f"name a file in it, such as {path}/NAME.yaml"
        raise StorageError(f"{path} is a folder, not a YAML file", hint=hint) from None
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at {error.start}"
        raise StorageError(what, hint="save it as UTF-8") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from None
    return yaml_text.parse(text, source=str(file))


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str], lines: Lines | None = None
) -> Data:
    """A copy of `data` with each `dotted.path=value` put in its place.

    What is overridden no longer stands on the line that `lines` knows.
    """
    import copy

    result = copy.deepcopy(dict(data))
    wrong = []
    for word in overrides:
        path, equals, text = word.partition("=")
        try:
            if not equals or not all(path.split(".")):
                raise ValueError("an override is written path.to.key=value")
            place = _put(result, path.split("."), yaml_text.value(text))
            if lines is not None:
                lines.update({place[:end]: None for end in range(1, len(place))} | lines)
                lines[place] = None
        except ValueError as error:
            wrong.append(Problem(path, str(error)))
    if wrong:
        raise ConfigError("the overrides on the command line", wrong)
    return result


def build(kind: type[T], data: object, *, source: str, lines: Lines | None = None) -> T:
    """Check `data` against `kind` and build it; every problem is reported at once."""
    import pydantic

    for part in _dataclasses_in(kind, set()):
        if "__pydantic_config__" not in part.__dict__:
            part.__pydantic_config__ = {"extra": "forbid"}  # read by pydantic: no unknown keys
    try:
        built: T = pydantic.TypeAdapter(kind).validate_python(data)
    except pydantic.ValidationError as error:
        found = problems(kind, data, error.errors(include_url=False), lines or {})
        raise ConfigError(source, found) from None
    # Python counts True as 1, and so does pydantic; nobody who writes YAML does.
    changed = [
        Problem(dotted(path), "should be a number, not true or false", line_of(lines or {}, path))
        for path in changed_booleans(data, plain(built))
    ]
    if changed:
        raise ConfigError(source, changed)
    return built


def dump(value: Any) -> str:
    """A configuration as YAML that `load` reads back to an equal value."""
    return yaml_text.emit(plain(value))


def plain(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _put(place: Any, keys: Sequence[str], value: Any) -> Path:
    """Set what stands at `keys`; sections that do not exist yet are made. Returns the place."""
    path: list[str | int] = []
    for key in keys[:-1]:
        path.append(_key_in(place, key))
        if isinstance(place, dict) and place.get(path[-1]) is None:
            place[path[-1]] = {}
        place = place[path[-1]]
        if not isinstance(place, (dict, list)):
            raise ValueError(f"`{key}` holds a value, not keys")
    path.append(_key_in(place, keys[-1]))
    place[path[-1]] = value
    return tuple(path)


def _key_in(place: dict[str, Any] | list[Any], key: str) -> str | int:
    if isinstance(place, dict):
        return key
    if not key.isdecimal() or int(key) >= len(place):
        raise ValueError(f"the list has no item `{key}`: it has {len(place)}, from 0")
    return int(key)


def _dataclasses_in(kind: Any, seen: set[Any]) -> Iterable[Any]:
    """Every dataclass that a hint leads to, those behind a OneOf included."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in seen:
        seen.add(kind)
        yield kind
        for hint in typing.get_type_hints(kind, include_extras=True).values():
            yield from _dataclasses_in(hint, seen)
    for mark in getattr(kind, "__metadata__", ()):
        if isinstance(mark, OneOf):
            for choice in mark.registry.values():
                yield from _dataclasses_in(choice, seen)
    for argument in typing.get_args(kind):
        yield from _dataclasses_in(argument, seen)
