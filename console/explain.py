"""Turn pydantic's validation errors into messages that say how to fix a configuration."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .errors import ConfigProblem, ConfigProblems
from .yaml_text import COUNT, Count, Lines, Path, dotted, size

UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
MISSING = ("missing", "missing_argument", "union_tag_not_found")
EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "keys with values",
    "mapping": "keys with values",
    "dataclass": "keys with values",
    "model_attributes": "keys with values",
    "none": "null",
}
"""Expected value by pydantic's error type without its suffix (`int_parsing`, `list_type`)."""


class OneOf:
    """Mark a field that holds one of several dataclasses; a key of the YAML chooses.

        operators: dict[str, Annotated[object, OneOf(REGISTRY, tag="kind")]]

    The registry is read when a file is read, so an added kind can be used at once. A section
    without the key has the kind `default`; without a default the key is required.
    """

    def __init__(
        self, registry: typing.Mapping[str, type], *, tag: str, default: str | None = None
    ) -> None:
        self.registry = registry
        self.tag = tag
        self.default = default

    def choose(self, data: Any) -> type | None:
        """Return the dataclass that `data` chooses; None if it names none."""
        name = data.get(self.tag, self.default) if isinstance(data, dict) else self.default
        return self.registry.get(str(name))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        choices = {name: handler.generate_schema(kind) for name, kind in self.registry.items()}
        union = core_schema.tagged_union_schema(choices, discriminator=self.tag)
        if self.default is None:
            return union
        return core_schema.no_info_before_validator_function(self._with_default, union)

    def _with_default(self, data: Any) -> Any:
        return {self.tag: self.default, **data} if isinstance(data, dict) else data


class NameIn:
    """Mark a text field that holds a table's name, or one of `extra`.

        precision: Annotated[str, NameIn(PRECISIONS, "auto")]

    `refused` returns why no table has a name that other programs know; None for unknown names.
    """

    def __init__(
        self,
        table: Iterable[str],
        *extra: str,
        refused: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.table = table
        self.extra = extra
        self.refused = refused

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        names = core_schema.literal_schema([*self.extra, *self.table])
        return core_schema.no_info_before_validator_function(self._with_reason, names)

    def _with_reason(self, data: Any) -> Any:
        if reason := self.refused(data) if isinstance(data, str) else None:
            raise ValueError(reason)
        return data


class Elsewhere:
    """Mark a field some of whose words belong to another key: `reasons` says where, by word.

    kernel: Annotated[Literal["auto", "torch"], Elsewhere(next="is set by kernels.NAME")]
    """

    def __init__(self, **reasons: str) -> None:
        self.reasons = reasons

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._with_reason, handler(source))

    def _with_reason(self, data: Any) -> Any:
        if isinstance(data, str) and data in self.reasons:
            raise ValueError(f"`{data}` {self.reasons[data]}")
        return data


class Size:
    """Mark a field that holds bytes: 67108864, 64Mi, 64MiB, 64MB or 64 MB; the count 64B is
    refused."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def parse(data: Any) -> Any:
            text = _as_written(data)
            return size(text) if isinstance(text, str) else text

        return core_schema.no_info_before_validator_function(parse, handler(source))


class AsWritten:
    """Mark a field for another program: 64M stays the text 64M, and is no count."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(_as_written, handler(source))


def _as_written(data: Any) -> Any:
    return data.text if isinstance(data, Count) else data


def problems(kind: Any, data: Any, errors: Sequence[Any], lines: Lines) -> list[ConfigProblem]:
    """Return a problem for every wrong value. `errors` are pydantic's for `data` as `kind`."""
    messages: dict[Path, list[str]] = {}
    expectations: dict[Path, list[str]] = {}
    for error in errors:
        path = _data_path(data, error["loc"], missing=error["type"] in MISSING)
        if error["type"] == "union_tag_invalid":  # pydantic names the section, not its tag
            path = (*path, error["ctx"]["discriminator"].strip("'"))
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, ConfigProblems):
            for problem in cause.problems:
                _add_once(messages, (*path, *_keys(problem.path)), problem.message)
            continue
        if error["type"] == "literal_error" and isinstance(find_value(data, path), (dict, list)):
            _add_once(expectations, path, error["ctx"]["expected"])
            continue
        expected = EXPECTED.get(re.sub(r"_(type|parsing|from_float).*$", "", error["type"]))
        if error["loc"][-1:] == ("[key]",) or error["type"] == "invalid_key":
            _add_once(messages, path, _wrong_key(path[-1], error))
        elif expected:
            _add_once(expectations, path, expected)
        else:
            _add_once(messages, path, _message(kind, data, path, error))
    paths = {*messages, *expectations}
    for path, kinds in expectations.items():
        # A field of a union type fails once per type; an error deeper in the data says more.
        is_deeper = any(deep[: len(path)] == path for deep in paths if deep != path)
        if not is_deeper and path not in messages:
            value = find_value(data, path)
            expected = f"should be {' or '.join(kinds)}, not {_show(value)}"
            messages[path] = [expected + _quotes(value, kinds)]
    return [locate_problem(lines, path, text) for path, texts in messages.items() for text in texts]


def _keys(path: str) -> Path:
    """Split a dotted path into keys and list positions."""
    return tuple(int(key) if key.isdecimal() else key for key in path.split("."))


def changed_booleans(data: Any, built: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths at which pydantic turned true or false into a number."""
    if isinstance(data, bool):
        if not isinstance(built, bool):
            yield path
    elif isinstance(data, dict) and isinstance(built, dict):
        for key, value in data.items():
            yield from changed_booleans(value, built.get(key, value), (*path, key))
    elif isinstance(data, list) and isinstance(built, list):
        for position, values in enumerate(zip(data, built, strict=True)):
            yield from changed_booleans(*values, (*path, position))


def find_line(lines: Lines, path: Path) -> int | None:
    """Return the line where a value stands, or the section that lacks it."""
    return lines.get(_holder(lines, path))


def locate_problem(lines: Lines, path: Path, message: str) -> ConfigProblem:
    """Return the problem with the value at `path`, and its line if it stands in a file."""
    holder = _holder(lines, path)
    typed = holder in lines and lines[holder] is None
    return ConfigProblem(dotted(path), message, lines.get(holder), typed=typed)


def _holder(lines: Lines, path: Path) -> Path:
    """Return the innermost section on a path that the YAML or the command line has."""
    while path and path not in lines:
        path = path[:-1]
    return path


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `word`, or None.

    Similar are also abbreviations (`lr` and learning_rate) and single words (`batch` and
    batch_size).
    """
    names = list(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if matches:
        return matches[0]
    short = (name for name in names if _abbreviates(name, word) or _abbreviates(word, name))
    return next(short, None)


def _abbreviates(short: str, long: str) -> bool:
    """True for the initials of several words, and for a single word."""
    words = re.split("[_-]", long)
    return len(words) > 1 and (short == "".join(word[:1] for word in words) or short in words)


def nearest_path(path: str | os.PathLike[str]) -> str | None:
    """Return the existing path most similar to a missing one, or None."""
    target = pathlib.Path(path)
    existing = pathlib.Path(target.anchor)
    for name in target.parts[bool(target.anchor) :]:
        if not (existing / name).exists():
            try:
                near = nearest(name, sorted(entry.name for entry in existing.iterdir()))
            except OSError:
                return None
            if near is None:
                return None
            name = near
        existing /= name
    return None if existing == target else str(existing)


def path_hint(path: str | os.PathLike[str], otherwise: str) -> str:
    """Return a hint for a missing path: the nearest path, or `otherwise`."""
    near = nearest_path(path)
    return f"did you mean {near}?" if near else otherwise


def find_value(data: Any, path: Path) -> Any:
    """Return the value at `path`, or None."""
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def hint(word: str, known: Iterable[str]) -> str:
    """Return how a message about an unknown word ends: with the nearest known word."""
    near = nearest(word, known)
    return f"; did you mean `{near}`?" if near else "."


def _message(kind: Any, data: Any, path: Path, error: Any) -> str:
    error_type, context = error["type"], error.get("ctx", {})
    value = find_value(data, path)
    if error_type in UNKNOWN:
        names = _names_at(kind, data, path[:-1])
        return f"unknown key{hint(str(path[-1]), names)} Known: {', '.join(names)}"
    if error_type == "union_tag_not_found":
        return f"needs the key {context['discriminator'].replace(chr(39), '`')}"
    if error_type in MISSING:
        return "is required"
    if error_type == "union_tag_invalid":
        known = _quoted(context["expected_tags"])
        tag = context["tag"]
        return f"`{tag}` is unknown{hint(tag, known)} Known: {', '.join(sorted(known))}"
    if error_type == "literal_error":
        expected = context["expected"]
        return f"`{value}` is not one of {expected}{hint(str(value), _quoted(expected))}"
    if error_type == "value_error":
        return str(context["error"])
    return f"{error['msg'][0].lower()}{error['msg'][1:]}: {_show(value)}"


def _wrong_key(key: str | int, error: Any) -> str:
    """Return the message for a wrong dictionary key."""
    if not isinstance(key, str):
        return f"the key {key!r} is not text: write it in quotes"
    known = _quoted(error.get("ctx", {}).get("expected", ""))
    return f"unknown key{hint(key, known)} Known: {', '.join(known)}"


def _data_path(data: Any, location: Sequence[str | int], *, missing: bool) -> Path:
    """Return pydantic's location without union members: keys in `data`, and a missing last key."""
    path: list[str | int] = []
    for position, key in enumerate(location):
        exists = (isinstance(data, dict) and key in data) or (
            isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data)
        )
        if exists:
            data = data[key]
            path.append(key)
        elif missing and position == len(location) - 1:
            path.append(key)
    return tuple(path)


def _names_at(kind: Any, data: Any, path: Path) -> list[str]:
    """Return the keys that the dataclass at `path` has."""
    for key in path:
        kind, data = _field_type(kind, key, data), find_value(data, (key,))
    names: dict[str, None] = {}
    for choice in _choices(kind, data):
        if dataclasses.is_dataclass(choice):
            names |= dict.fromkeys(field.name for field in dataclasses.fields(choice) if field.init)
    return list(names)


def _field_type(kind: Any, key: str | int, parent: Any) -> Any:
    """Return the type hint of `key`; data in `parent` chooses among a union's types."""
    for choice in _choices(kind, parent):
        if dataclasses.is_dataclass(choice):
            hints = typing.get_type_hints(choice, include_extras=True)
            if key in hints:
                return hints[str(key)]
        arguments = typing.get_args(choice)
        if typing.get_origin(choice) is tuple and arguments[-1] is not Ellipsis:
            return arguments[int(key)]
        if arguments:
            return arguments[-1] if arguments[-1] is not Ellipsis else arguments[0]
    return None


def _choices(kind: Any, data: Any) -> list[Any]:
    """Return a hint's types: all members of a union, or the dataclass that a tag chooses."""
    if typing.get_origin(kind) is typing.Annotated:
        for mark in kind.__metadata__:
            if isinstance(mark, OneOf):
                choice = mark.choose(data)
                return [] if choice is None else [choice]
        return _choices(typing.get_args(kind)[0], data)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(kind) for member in _choices(argument, data)]
    return [kind]


def _add_once(messages: dict[Path, list[str]], path: Path, message: str) -> None:
    messages_at_path = messages.setdefault(path, [])
    if message not in messages_at_path:
        messages_at_path.append(message)


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']+)'", text)


def _quotes(value: Any, kinds: Sequence[str]) -> str:
    """Return a hint if only the quotes are wrong: '900B' is text, 900B is a number."""
    if isinstance(value, (int, float)) and "text" in kinds:
        return "; write it in quotes"
    is_count = isinstance(value, str) and COUNT.match(value) and "text" not in kinds
    return "; write it without quotes" if is_count else ""


def _show(value: Any) -> str:
    """Format a value for an error message, cut after 60 characters."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
