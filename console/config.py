"""Configuration: frozen dataclasses, read from YAML, checked in full before anything starts.

A configuration is an ordinary frozen dataclass that lives beside what it configures. Fields are
documented by the string below them, `__post_init__` raises ValueError where two fields disagree,
and pydantic checks types and refuses unknown keys when a file is read. The dataclasses
themselves need the standard library only, so that models import with torch alone.

    run = load(RunConfig, "run.yaml", overrides=["optimizer.lr=3e-4"])
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError, Problem, StorageError

if TYPE_CHECKING:
    import yaml
    from pydantic_core import CoreSchema

T = TypeVar("T")
Data = dict[str, Any]
Lines = dict[tuple[str | int, ...], int]

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
COUNT = re.compile(r"^([0-9][0-9_]*(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|[KMBT])$")
FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


def load(kind: type[T], file: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file as `kind`. `overrides` are `dotted.path=value` words."""
    data, lines = read_yaml(file)
    return build(kind, apply_overrides(data, overrides), source=str(file), lines=lines)


def read_yaml(file: str | Path) -> tuple[Data, Lines]:
    """The data of a YAML file, and the line on which each of its values stands."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = _nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise StorageError(
            f"there is no file {path}", mend=f"did you mean {path.parent / near}?" if near else None
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}") from None
    return parse_yaml(text, source=str(file))


def parse_yaml(text: str, *, source: str) -> tuple[Data, Lines]:
    import yaml

    try:
        node = yaml.compose(text, Loader=_loader())
        lines: Lines = {}
        problems: list[Problem] = []
        _index(node, (), lines, problems)
        if problems:
            raise ConfigError(source, problems)
        data = yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError(source, [Problem("", f"not YAML: {error.problem}", line)]) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(source, [Problem("", "expected `key: value` lines at the top level", 1)])
    return data, lines


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> Data:
    """A copy of `data` with each `dotted.path=value` put in its place."""
    import copy

    import yaml

    result = copy.deepcopy(dict(data))
    problems = []
    for word in overrides:
        path, equals, value = word.partition("=")
        keys = path.split(".")
        if not equals or not all(keys):
            problems.append(Problem(word, "an override is written path.to.key=value"))
            continue
        place: Any = result
        for key in keys[:-1]:
            place = _descend(place, key)
            if not isinstance(place, (dict, list)):
                problems.append(Problem(path, f"`{key}` holds a value, not keys"))
                break
        else:
            try:
                parsed = yaml.load(value, Loader=_loader())
            except yaml.YAMLError:
                problems.append(Problem(path, f"`{value}` is not a YAML value"))
                continue
            if isinstance(place, dict):
                place[keys[-1]] = parsed
            elif keys[-1].isdigit() and int(keys[-1]) < len(place):
                place[int(keys[-1])] = parsed
            else:
                problems.append(Problem(path, f"the list has no item `{keys[-1]}`"))
    if problems:
        raise ConfigError("the overrides on the command line", problems)
    return result


def build(kind: type[T], data: object, *, source: str, lines: Lines | None = None) -> T:
    """Check `data` against `kind` and build it; every problem is reported at once."""
    import pydantic

    problems: list[Problem] = []
    try:
        checked: T = pydantic.TypeAdapter(_strict(kind)).validate_python(data)
        return checked
    except pydantic.ValidationError as error:
        for item in error.errors(include_url=False):
            path = _data_path(data, item["loc"])
            problems.append(
                Problem(_dotted(path), _explain(kind, data, path, item), _line(lines or {}, path))
            )
    raise ConfigError(source, problems) from None


def dump(value: Any) -> str:
    """A configuration as YAML that `load` reads back to an equal value."""
    import yaml

    return yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True)


def plain(value: Any) -> Any:
    """A configuration as dictionaries, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class OneOf:
    """Marks a field that holds one of several dataclasses, chosen by a key of the YAML.

    operators: dict[str, Annotated[object, OneOf(REGISTRY, tag="kind")]]
    """

    def __init__(self, registry: Mapping[str, type], *, tag: str) -> None:
        self.registry = registry
        self.tag = tag

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        from pydantic_core import core_schema

        choices = {
            name: handler.generate_schema(_strict(kind)) for name, kind in self.registry.items()
        }
        return core_schema.tagged_union_schema(choices, discriminator=self.tag)


def _strict(kind: Any) -> Any:
    """Have pydantic refuse unknown keys of this dataclass and of those inside it."""
    for part in _dataclasses_in(kind, set()):
        if "__pydantic_config__" not in part.__dict__:
            part.__pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}
    return kind


def _dataclasses_in(kind: Any, seen: set[Any]) -> Iterable[Any]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in seen:
        seen.add(kind)
        yield kind
        for hint in typing.get_type_hints(kind).values():
            yield from _dataclasses_in(hint, seen)
    for argument in typing.get_args(kind):
        yield from _dataclasses_in(argument, seen)


def _explain(kind: Any, data: Any, path: tuple[str | int, ...], item: Any) -> str:
    given = _value(data, path)
    what = item["type"]
    if what in ("unexpected_keyword_argument", "extra_forbidden"):
        names = _names_at(kind, data, path[:-1])
        return f"unknown key{_hint(str(path[-1]), names)} Known: {', '.join(names)}"
    if what in ("missing", "missing_argument"):
        return "is required"
    if what == "union_tag_invalid":
        tag = item["ctx"]["tag"]
        known = re.findall(r"'([^']+)'", item["ctx"]["expected_tags"])
        return f"there is no `{tag}`{_hint(tag, known)} Known: {', '.join(sorted(known))}"
    if what == "value_error":
        return str(item["ctx"]["error"])
    if what == "literal_error":
        expected = item["ctx"]["expected"]
        known = re.findall(r"'([^']+)'", expected)
        return f"`{given}` is not one of {expected}{_hint(str(given), known)}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{message}, not {given!r}"


def _names_at(kind: Any, data: Any, path: tuple[str | int, ...]) -> list[str]:
    """The keys that the dataclass at `path` knows."""
    for key in path:
        data = _value(data, (key,))
        kind = _field_type(kind, key, data)
    names = []
    for choice in _choices(kind, data):
        if dataclasses.is_dataclass(choice):
            names += [f.name for f in dataclasses.fields(choice) if f.init]
    return names


def _field_type(kind: Any, key: str | int, data: Any) -> Any:
    for choice in _choices(kind, data):
        if dataclasses.is_dataclass(choice):
            hints = typing.get_type_hints(choice, include_extras=True)
            if key in hints:
                return hints[str(key)]
        arguments = typing.get_args(choice)
        if arguments:
            return arguments[-1] if arguments[-1] is not Ellipsis else arguments[0]
    return None


def _choices(kind: Any, data: Any) -> list[Any]:
    """The types that a hint may stand for, given the data: unions opened, tags followed."""
    if typing.get_origin(kind) is typing.Annotated:
        for mark in kind.__metadata__:
            if isinstance(mark, OneOf):
                tag = str(data.get(mark.tag)) if isinstance(data, dict) else ""
                return [mark.registry[tag]] if tag in mark.registry else []
        return _choices(typing.get_args(kind)[0], data)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [part for argument in typing.get_args(kind) for part in _choices(argument, data)]
    return [kind]


def _data_path(data: Any, location: Sequence[str | int]) -> tuple[str | int, ...]:
    """pydantic's location without the names of union branches: only keys that can be found."""
    path: list[str | int] = []
    for position, key in enumerate(location):
        found = (isinstance(data, dict) and key in data) or (
            isinstance(data, (list, tuple)) and isinstance(key, int) and key < len(data)
        )
        if found:
            data = data[key]
            path.append(key)
        elif position == len(location) - 1 and isinstance(data, dict):
            path.append(key)  # a missing key
    return tuple(path)


def _value(data: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _descend(place: Any, key: str) -> Any:
    if isinstance(place, list) and key.isdigit() and int(key) < len(place):
        return place[int(key)]
    if isinstance(place, dict):
        if place.get(key) is None:
            place[key] = {}
        return place[key]
    return None


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(key) for key in path)


def _line(lines: Lines, path: tuple[str | int, ...]) -> int | None:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


def _nearest(word: str, known: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _hint(word: str, known: Iterable[str]) -> str:
    near = _nearest(word, known)
    return f"; did you mean `{near}`?" if near else "."


def _index(
    node: yaml.Node | None, path: tuple[str | int, ...], lines: Lines, problems: list[Problem]
) -> None:
    """Note the line of every value, and every key that is written twice."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*path, key.value)
            line = key.start_mark.line + 1
            if place in lines:
                first = lines[place]
                problems.append(
                    Problem(_dotted(place), f"written twice, first on line {first}", line)
                )
            lines[place] = line
            _index(value, place, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            lines[(*path, position)] = value.start_mark.line + 1
            _index(value, (*path, position), lines, problems)


def _loader() -> type[yaml.SafeLoader]:
    """PyYAML's safe loader, for which 1e-4 and 900B are numbers and `on`/`no` are words."""
    import yaml

    global _LOADER
    if _LOADER is None:

        class Loader(yaml.SafeLoader):
            pass

        Loader.yaml_implicit_resolvers = {
            first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        bools = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
        Loader.add_implicit_resolver("tag:yaml.org,2002:bool", bools, list("tTfF"))
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
        Loader.add_implicit_resolver("!count", COUNT, list("0123456789"))
        Loader.add_constructor("!count", lambda loader, node: count(node.value))
        _LOADER = Loader
    return _LOADER


_LOADER: type[yaml.SafeLoader] | None = None


def count(text: str) -> int | float:
    """'900B' → 900_000_000_000, '8Ki' → 8192. Exact; a fraction of one stays a float."""
    from fractions import Fraction

    match = COUNT.match(text)
    if not match:
        raise ValueError(f"`{text}` is not a count such as 4096, 900B or 8Ki")
    value = Fraction(match[1].replace("_", "")) * {**SUFFIXES, **BINARY}[match[2]]
    return int(value) if value.denominator == 1 else float(value)
