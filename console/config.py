"""Configuration: frozen dataclasses, read from YAML and checked before anything starts.

A configuration is a frozen dataclass beside the code that it configures. A string below each field
documents it, `__post_init__` raises ValueError if fields contradict each other, and pydantic checks
types and rejects unknown keys while a file is read. The dataclasses themselves need only the
standard library, so that models import with torch alone.

    run = load(RunConfig, "run.yaml", overrides=["optimizer.lr=3e-4"])
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from . import yaml_text
from .errors import ConfigError, ConfigProblem, StorageError, file_fault
from .explain import (
    AsWritten,
    Elsewhere,
    NameIn,
    OneOf,
    Size,
    changed_booleans,
    locate_problem,
    path_hint,
    problems,
)
from .yaml_text import Lines, Path, count, size

__all__ = [
    "AsWritten",
    "Elsewhere",
    "Lines",
    "NameIn",
    "OneOf",
    "Size",
    "added_field",
    "apply_overrides",
    "build",
    "count",
    "dump",
    "key_paths",
    "load",
    "plain",
    "read_yaml",
    "size",
]

T = TypeVar("T")
Data = dict[str, Any]
NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
"""Environment variable of pydantic."""


def load(kind: type[T], file: str | pathlib.Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file as the dataclass `kind`. `overrides` are `dotted.path=value` texts."""
    data, lines = read_yaml(file)
    data = apply_overrides(data, overrides, lines)
    return build(kind, data, source=str(file), lines=lines)


def read_yaml(file: str | pathlib.Path) -> tuple[Data, Lines]:
    """Return a YAML file's data, and the line number of each value."""
    path = pathlib.Path(file)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = path_hint(path, "check the path")
        raise StorageError(f"file not found: {path}", hint=near) from None
    except IsADirectoryError:
        hint = f"give a file in it, such as {path}/NAME.yaml"
        raise StorageError(f"{path} is a folder, not a YAML file", hint=hint) from None
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at {error.start}"
        raise StorageError(
            f"{path} is not UTF-8 text: {byte}", hint="save the file as UTF-8"
        ) from None
    except OSError as error:
        reason, advice = file_fault(error)
        raise StorageError(f"cannot read {path}: {reason}", hint=advice) from None
    return yaml_text.parse(text, source=str(file))


def apply_overrides(
    data: Mapping[str, Any], overrides: Iterable[str], lines: Lines | None = None
) -> Data:
    """Return a copy of `data` with every `dotted.path=value` set.

    Overridden values get the line None in `lines`.
    """
    import copy

    result = copy.deepcopy(dict(data))
    invalid = []
    for word in overrides:
        path, equals, text = word.partition("=")
        try:
            if not equals or not all(path.split(".")):
                raise ValueError("write an override as path.to.key=value")
            keys = _put(result, path.split("."), yaml_text.value(text, path))
            if lines is not None:
                lines.update({keys[:end]: None for end in range(1, len(keys))} | lines)
                lines[keys] = None
        except ValueError as error:
            invalid.append(ConfigProblem(path, str(error), typed=True))
    if invalid:
        raise ConfigError("the overrides on the command line", invalid)
    return result


@contextlib.contextmanager
def _without_plugins() -> Iterator[None]:
    """Let pydantic skip its search for plugins, which reads the metadata of every package."""
    previous = os.environ.get(NO_PLUGINS)
    os.environ[NO_PLUGINS] = "__all__"
    try:
        yield
    finally:
        os.environ.pop(NO_PLUGINS)
        if previous is not None:
            os.environ[NO_PLUGINS] = previous


def build(kind: type[T], data: object, *, source: str, lines: Lines | None = None) -> T:
    """Check `data` against `kind` and build it; report all problems at once."""
    import pydantic

    for dataclass in _dataclasses_in(kind, set()):
        if "__pydantic_config__" not in dataclass.__dict__:
            dataclass.__pydantic_config__ = {"extra": "forbid"}  # pydantic rejects unknown keys
    try:
        with _without_plugins():
            built: T = pydantic.TypeAdapter(kind).validate_python(data)
    except pydantic.ValidationError as error:
        invalid = problems(kind, data, error.errors(include_url=False), lines or {})
        raise ConfigError(source, invalid) from None
    # Python and pydantic accept True as 1; in YAML that is a mistake.
    changed = [
        locate_problem(lines or {}, path, "should be a number, not true or false")
        for path in changed_booleans(data, plain(built, complete=True))
    ]
    if changed:
        raise ConfigError(source, changed)
    return built


def key_paths(kind: Any) -> Iterator[str]:
    """Yield the dotted path of every key in a configuration.

    NAME stands for a name that the user chooses, 0 for a list's item.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if field.init:
                below = [f"{field.name}.{key}" for key in key_paths(hints[field.name])]
                yield from below or [field.name]
        return
    marks = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, OneOf)]
    choices = [choice for mark in marks for choice in mark.registry.values()]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, Mapping, tuple, list, Sequence):
        name = "NAME" if origin in (dict, Mapping) else "0"
        below = [f"{name}.{key}" for key in key_paths(arguments[-1 if name == "NAME" else 0])]
        yield from dict.fromkeys(below)
        return
    members = choices or arguments
    yield from dict.fromkeys(key for member in members for key in key_paths(member))


def dump(value: Any) -> str:
    """Return a configuration as YAML, which `load` reads back to an equal value."""
    return yaml_text.emit(plain(value))


def plain(value: Any, *, complete: bool = False) -> Any:
    """Return a configuration as dictionaries, lists and scalars; without the defaults of
    `added_field`, unless it is to be complete."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name), complete=complete)
            for field in dataclasses.fields(value)
            if field.init and (complete or not _is_added_default(field, getattr(value, field.name)))
        }
    if isinstance(value, Mapping):
        return {plain(key): plain(item, complete=complete) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, complete=complete) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def added_field(default: Any) -> Any:
    """Declare a field that older files lack. Its default is written nowhere, so hashes and files of
    older configurations stay as they are."""
    return dataclasses.field(default=default, metadata={"added": True})


def _is_added_default(field: dataclasses.Field[Any], value: Any) -> bool:
    return "added" in field.metadata and value == field.default


def _put(section: Any, keys: Sequence[str], value: Any) -> Path:
    """Set the value at `keys`, create missing sections, and return the path."""
    path: list[str | int] = []
    for key in keys[:-1]:
        path.append(_key_in(section, key))
        if isinstance(section, dict) and section.get(path[-1]) is None:
            section[path[-1]] = {}
        section = section[path[-1]]
        if not isinstance(section, (dict, list)):
            raise ValueError(f"`{key}` is a value; it has no keys")
    path.append(_key_in(section, keys[-1]))
    section[path[-1]] = value
    return tuple(path)


def _key_in(section: dict[str, Any] | list[Any], key: str) -> str | int:
    if isinstance(section, dict):
        return key
    if not key.isdecimal() or int(key) >= len(section):
        raise ValueError(f"the list has no item `{key}`; it has {len(section)} items, from 0")
    return int(key)


def _dataclasses_in(kind: Any, seen: set[Any]) -> Iterable[Any]:
    """Yield every dataclass that a type hint refers to, also through OneOf."""
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
