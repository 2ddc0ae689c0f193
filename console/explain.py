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

from .errors import Problem, Problems
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
    """Mark a field that holds one of several dataclasses, chosen by a key of the YAML.

        operators: dict[str, Annotated[object, OneOf(REGISTRY, tag="kind")]]

    The registry is read when a file is read: a kind that is added to it can be used at once.
    `default` is the kind of a section without the key; without a default the key is required.
    """

    def __init__(
        self, registry: typing.Mapping[str, type], *, tag: str, default: str | None = None
    ) -> None:
        self.registry = registry
        self.tag = tag
        self.default = default

    def chosen(self, data: Any) -> type | None:
        """Return the dataclass that `data` chooses; None if it names none of them."""
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
    """Mark a text field that holds a name of a table, or one of `others`.

        precision: Annotated[str, NameIn(PRECISIONS, "auto")]

    `refused` returns why a name that other programs have is in no table; None for other names.
    """

    def __init__(
        self,
        table: Iterable[str],
        *others: str,
        refused: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.table = table
        self.others = others
        self.refused = refused

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        names = core_schema.literal_schema([*self.others, *self.table])
        return core_schema.no_info_before_validator_function(self._with_reason, names)

    def _with_reason(self, data: Any) -> Any:
        if reason := self.refused(data) if isinstance(data, str) else None:
            raise ValueError(reason)
        return data


class Size:
    """Mark a field that holds a number of bytes: 67108864, 64Mi, 64MiB, 64MB or 64 MB. The count
    64B is refused."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def parsed(data: Any) -> Any:
            written = data.text if isinstance(data, Count) else data
            return size(written) if isinstance(written, str) else written

        return core_schema.no_info_before_validator_function(parsed, handler(source))


class AsWritten:
    """Mark a field for another program: 64M stays the text 64M, and is no count."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        def written(data: Any) -> Any:
            return data.text if isinstance(data, Count) else data

        return core_schema.no_info_before_validator_function(written, handler(source))


def problems(kind: Any, data: Any, errors: Sequence[Any], lines: Lines) -> list[Problem]:
    """Return a problem for each wrong value. `errors` are pydantic's for `data` as `kind`."""
    messages: dict[Path, list[str]] = {}
    expectations: dict[Path, list[str]] = {}
    for item in errors:
        path = _data_path(data, item["loc"], missing=item["type"] in MISSING)
        if item["type"] == "union_tag_invalid":  # pydantic names the section, not its tag
            path = (*path, item["ctx"]["discriminator"].strip("'"))
        error = item.get("ctx", {}).get("error")
        if isinstance(error, Problems):
            for problem in error.problems:
                _add_once(messages, (*path, *_keys(problem.path)), problem.what)
            continue
        if item["type"] == "literal_error" and isinstance(find_value(data, path), (dict, list)):
            _add_once(expectations, path, item["ctx"]["expected"])
            continue
        expected = EXPECTED.get(re.sub(r"_(type|parsing|from_float).*$", "", item["type"]))
        if item["loc"][-1:] == ("[key]",) or item["type"] == "invalid_key":
            _add_once(messages, path, _wrong_key(path[-1], item))
        elif expected:
            _add_once(expectations, path, expected)
        else:
            _add_once(messages, path, _message(kind, data, path, item))
    for path, kinds in expectations.items():
        # A field of a union type fails once per type; an error deeper in the data says more.
        deeper = any(
            other[: len(path)] == path for other in (*messages, *expectations) if other != path
        )
        if not deeper and path not in messages:
            given = find_value(data, path)
            expected = f"should be {' or '.join(kinds)}, not {_show(given)}"
            messages[path] = [expected + _quotes(given, kinds)]
    return [locate_problem(lines, path, what) for path, whats in messages.items() for what in whats]


def _keys(path: str) -> Path:
    """Return a dotted path as keys and list positions."""
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
        for position, (value, other) in enumerate(zip(data, built, strict=True)):
            yield from changed_booleans(value, other, (*path, position))


def find_line(lines: Lines, path: Path) -> int | None:
    """Return the line of a value, or of the section that lacks it."""
    return lines.get(_holder(lines, path))


def locate_problem(lines: Lines, path: Path, what: str) -> Problem:
    """Return a problem of the value at `path`, with its line if it is in a file."""
    holder = _holder(lines, path)
    typed = holder in lines and lines[holder] is None
    return Problem(dotted(path), what, lines.get(holder), typed=typed)


def _holder(lines: Lines, path: Path) -> Path:
    """Return the innermost section of a path that is in the YAML or on the command line."""
    while path and path not in lines:
        path = path[:-1]
    return path


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `word`; None if none is similar.

    A name is also similar if it abbreviates the word (`lr` for learning_rate) or is a word of it
    (`batch` for batch_size), and the other way round.
    """
    names = list(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if matches:
        return matches[0]
    short = (name for name in names if _abbreviates(name, word) or _abbreviates(word, name))
    return next(short, None)


def _abbreviates(short: str, long: str) -> bool:
    """True for the initials of several words, and for one of the words."""
    words = re.split("[_-]", long)
    return len(words) > 1 and (short == "".join(word[:1] for word in words) or short in words)


def nearest_path(path: str | os.PathLike[str]) -> str | None:
    """Return the existing path that is most similar to one that does not exist; None if none is."""
    target = pathlib.Path(path)
    here = pathlib.Path(target.anchor)
    for name in target.parts[bool(target.anchor) :]:
        if not (here / name).exists():
            try:
                near = nearest(name, sorted(entry.name for entry in here.iterdir()))
            except OSError:
                return None
            if near is None:
                return None
            name = near
        here /= name
    return None if here == target else str(here)


def path_hint(path: str | os.PathLike[str], otherwise: str) -> str:
    """Return a hint for a path that does not exist: the nearest path, or `otherwise`."""
    near = nearest_path(path)
    return f"did you mean {near}?" if near else otherwise


def find_value(data: Any, path: Path) -> Any:
    """Return the value at `path`; None if there is none."""
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def hint(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the most similar known one."""
    near = nearest(word, known)
    return f"; did you mean `{near}`?" if near else "."


def _message(kind: Any, data: Any, path: Path, item: Any) -> str:
    what, context = item["type"], item.get("ctx", {})
    given = find_value(data, path)
    if what in UNKNOWN:
        names = _names_at(kind, data, path[:-1])
        return f"unknown key{hint(str(path[-1]), names)} Known: {', '.join(names)}"
    if what == "union_tag_not_found":
        return f"needs the key {context['discriminator'].replace(chr(39), '`')}"
    if what in MISSING:
        return "is required"
    if what == "union_tag_invalid":
        known = _quoted(context["expected_tags"])
        tag = context["tag"]
        return f"`{tag}` is unknown{hint(tag, known)} Known: {', '.join(sorted(known))}"
    if what == "literal_error":
        expected = context["expected"]
        return f"`{given}` is not one of {expected}{hint(str(given), _quoted(expected))}"
    if what == "value_error":
        return str(context["error"])
    return f"{item['msg'][0].lower()}{item['msg'][1:]}: {_show(given)}"


def _wrong_key(key: str | int, item: Any) -> str:
    """Return the message for a wrong key of a dictionary."""
    if not isinstance(key, str):
        return f"the key {key!r} is not text: write it in quotes"
    known = _quoted(item.get("ctx", {}).get("expected", ""))
    return f"unknown key{hint(key, known)} Known: {', '.join(known)}"


def _data_path(data: Any, location: Sequence[str | int], *, missing: bool) -> Path:
    """Return pydantic's location without the names of union members: keys that exist in `data`,
    and a missing key at the end."""
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
    """Return the keys of the dataclass at `path`."""
    for key in path:
        kind, data = _field_type(kind, key, data), find_value(data, (key,))
    names: dict[str, None] = {}
    for choice in _choices(kind, data):
        if dataclasses.is_dataclass(choice):
            names |= dict.fromkeys(field.name for field in dataclasses.fields(choice) if field.init)
    return list(names)


def _field_type(kind: Any, key: str | int, parent: Any) -> Any:
    """Return the type hint of `key`; the data of `parent` chooses among the types of a union."""
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
    """Return the types of a hint: the members of a union, the dataclass that a tag chooses."""
    if typing.get_origin(kind) is typing.Annotated:
        for mark in kind.__metadata__:
            if isinstance(mark, OneOf):
                choice = mark.chosen(data)
                return [] if choice is None else [choice]
        return _choices(typing.get_args(kind)[0], data)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(kind) for member in _choices(argument, data)]
    return [kind]


def _add_once(messages: dict[Path, list[str]], path: Path, message: str) -> None:
    at_path = messages.setdefault(path, [])
    if message not in at_path:
        at_path.append(message)


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']+)'", text)


def _quotes(given: Any, kinds: Sequence[str]) -> str:
    """Return a hint if only the quotes are wrong: '900B' is text, 900B is a number."""
    if isinstance(given, (int, float)) and "text" in kinds:
        return "; write it in quotes"
    number = isinstance(given, str) and COUNT.match(given) and "text" not in kinds
    return "; write it without quotes" if number else ""


def _show(given: Any) -> str:
    """Return a value for an error message, cut after 60 characters."""
    text = (
        "null" if given is None else str(given).lower() if isinstance(given, bool) else repr(given)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
