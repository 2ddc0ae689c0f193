"""`headrace config KEY`: what a key of a run, a mixture or a model means, and where it is set.

The text is the string below the dataclass field, so it never differs from the code's.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...console import command
from ...console.errors import MisuseError

if TYPE_CHECKING:
    from ...console.config import OneOf

REQUIRED = "required"


@dataclass(frozen=True)
class KeyMeaning:
    """What a key means, in the words of YAML."""

    kinds: tuple[str, ...]
    """Kinds that give the key this meaning, such as adamw; none if no section above has kinds."""
    type: str
    required: bool
    default: Any
    """Value in YAML that a key has if it is not set; None if it is required. Of a section, keys
    with defaults of their own are left out."""
    text: str
    below: tuple[str, ...]
    """Keys below it."""

    @property
    def default_text(self) -> str:
        return json.dumps(self.default, ensure_ascii=False, default=str)


@click.command()
@click.argument("key")
@click.argument("place", required=False, metavar="[FILE.yaml|RUN]", type=click.Path())
@command.json_option
def main(key: str, place: str | None, as_json: bool) -> None:
    """Explain a key: its meaning, its default, and where a file or a run sets it.

    Keys of a mixture begin with `mixture.`, keys of a model with `model.`; all others are those of
    a run. NAME stands for a name of yours.

    \b
    Examples:
      headrace config optimizer.lr
      headrace config engine.gather runs/first
      headrace config mixture.phases.NAME.weights mixture.yaml

    More: docs/trainer.md
    """
    from ...console import config as reader

    meanings = find_meanings(key)
    if not meanings:
        raise _unknown(key)
    setting = None
    if place is not None:
        file = _file(key, Path(place))
        data, lines = reader.read_yaml(file)
        # All meanings remain if the kind in the file has no such key.
        meanings = find_meanings(key, data) or meanings
        setting = describe_setting(key, file, data, lines)
    if as_json:
        listed = [dataclasses.asdict(meaning) for meaning in meanings]
        command.emit({"key": key, "meanings": listed, "set": setting})
        return
    for meaning in meanings:
        kinds = f" (kinds: {', '.join(meaning.kinds)})" if meaning.kinds else ""
        default = REQUIRED if meaning.required else f"default {meaning.default_text}"
        click.echo(f"{key}: {meaning.type}, {default}{kinds}")
        if meaning.text:
            click.echo(textwrap.indent(meaning.text, "  "))
        if meaning.below:
            click.echo(f"  keys: {', '.join(meaning.below)}")
    if setting is not None:
        click.echo(setting)


def find_meanings(key: str, data: Any = None) -> list[KeyMeaning]:
    """Return a key's distinct meanings; where a file's `data` names a kind, for this kind alone."""
    kind, path = _root(key)
    meanings: dict[str, KeyMeaning] = {}
    for owner, field, hint, kinds in _fields(kind, path.split("."), data):
        meaning = describe_field(owner, field, hint)
        known = meanings.setdefault(repr(meaning), meaning)
        meanings[repr(meaning)] = replace(known, kinds=tuple(dict.fromkeys([*known.kinds, *kinds])))
    return list(meanings.values())


def describe_setting(key: str, file: Path, data: Any, lines: Mapping[Any, int | None]) -> str:
    """Return the lines that set a key in a file, which `read_yaml` has read."""
    settings = []
    for path, value in _values(data, _root(key)[1].split(".")):
        line = lines.get(path)
        settings.append(f"{file}{'' if line is None else f', line {line}'}: {value!r}")
    return "\n".join(settings) or f"{file} does not set it"


def _file(key: str, place: Path) -> Path:
    """Return the file that may set a key: `place`, or a file in a run's or a recipe's folder."""
    from ..folders.folder import RunFolder

    if not place.is_dir():
        return place
    folder = RunFolder(place)
    if not folder.run.exists():
        folder.check_is_run()
    files = {"mixture": folder.mixture, "model": folder.model}
    return files.get(key.partition(".")[0], folder.run)


def _root(key: str) -> tuple[Any, str]:
    """Return the configuration that has a key, and the key's path in it."""
    from ...mixtures.mixture_file.mixture import Mixture
    from ...models.config.config import ModelConfig
    from ..run.config import RunConfig

    prefix, _, path = key.partition(".")
    return {"mixture": (Mixture, path), "model": (ModelConfig, path)}.get(prefix, (RunConfig, key))


def _fields(
    hint: Any, path: Sequence[str], data: Any, kinds: tuple[str, ...] = ()
) -> Iterator[tuple[type, Any, Any, tuple[str, ...]]]:
    """Yield (dataclass, field, type, kinds above it) for every field at a path below a type.

    Of a section whose kind `data` chooses, only this kind counts.
    """
    values = [value for _, value in _values(data, path[:1])]
    data_below = values[0] if len(values) == 1 else None
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        for field in dataclasses.fields(hint):
            if field.init and field.name == path[0]:
                if len(path) == 1:
                    yield hint, field, hints[field.name], kinds
                else:
                    yield from _fields(hints[field.name], path[1:], data_below, kinds)
        return
    if (mark := _kind_mark(hint)) is not None:
        chosen = mark.choose(data) if isinstance(data, Mapping) else None
        for kind, choice in mark.registry.items():
            if chosen in (None, choice):
                yield from _fields(choice, path, data, (*kinds, kind))
        return
    for member, is_named in iter_members(hint):
        if not is_named:
            yield from _fields(member, path, data, kinds)
        elif len(path) > 1:
            yield from _fields(member, path[1:], data_below, kinds)


def _kind_mark(hint: Any) -> OneOf | None:
    from ...console.config import OneOf

    marks = (mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, OneOf))
    return next(marks, None)


def iter_members(hint: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the types within a type; True for those below a name or an index."""
    if (mark := _kind_mark(hint)) is not None:
        yield from ((choice, False) for choice in mark.registry.values())
        return
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (dict, Mapping, tuple, list, Sequence):
        yield arguments[-1 if origin in (dict, Mapping) else 0], True
        return
    yield from ((argument, False) for argument in arguments if not isinstance(argument, str))


def describe_field(owner: type, field: Any, hint: Any) -> KeyMeaning:
    """Return what a dataclass field of the type `hint` means as a key, without its kinds."""
    default = _default(field)
    is_required = default is dataclasses.MISSING
    sections = list(_sections(hint))
    fields = (field for section in sections for field in dataclasses.fields(section))
    below = dict.fromkeys(field.name for field in fields if field.init)
    text = text_below(owner, field.name)
    if (
        not text
        and len(sections) == 1
        and not str(sections[0].__doc__).startswith(
            f"{sections[0].__name__}("  # the docstring that a dataclass gets if it has none
        )
    ):
        text = inspect.getdoc(sections[0]) or ""
    return KeyMeaning(
        (),
        format_type(hint),
        is_required,
        None if is_required else _yaml_value(default, hint),
        text,
        tuple(below),
    )


def _default(field: Any) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _yaml_value(value: Any, hint: Any) -> Any:
    """Return a value as YAML data; of a section, without keys that have their own defaults."""
    from ...console.config import plain

    if not dataclasses.is_dataclass(value):
        return plain(value)
    mark = _kind_mark(hint)
    return {
        field.name: plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if field.init
        and (
            getattr(value, field.name) != _default(field)
            or (mark is not None and field.name == mark.tag)
        )
    }


def format_type(hint: Any) -> str:
    """Return a type in the words of YAML: `keys` for a section, values in quotes for a choice."""
    from ...console.config import NameIn

    if (mark := _kind_mark(hint)) is not None:
        return f"keys by {mark.tag}"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "keys"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        marks = [mark for mark in hint.__metadata__ if isinstance(mark, NameIn)]
        names = [json.dumps(name) for mark in marks for name in (*mark.extra, *mark.table)]
        return " | ".join(names) or format_type(arguments[0])
    if origin is typing.Literal:
        return " | ".join(map(json.dumps, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(format_type, arguments))
    if origin in (dict, Mapping):
        return f"dict[{', '.join(map(format_type, arguments))}]"
    if origin in (tuple, list, Sequence):
        items = [argument for argument in arguments if argument is not ...]
        return f"list[{', '.join(map(format_type, items))}]"
    if hint is type(None):
        return "null"
    return hint.__name__ if hint in (bool, int, float, str) else "value"


def _sections(hint: Any) -> Iterator[type]:
    """Yield the dataclasses within a type, down to the first ones."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        return
    for member, _ in iter_members(hint):
        yield from _sections(member)


def text_below(owner: type, name: str) -> str:
    """Return the string below a field, from the class that declares it."""
    declaring = next(base for base in owner.__mro__ if name in inspect.get_annotations(base))
    [node] = ast.parse(textwrap.dedent(inspect.getsource(declaring))).body
    assert isinstance(node, ast.ClassDef)
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        target = getattr(statement, "target", None)
        if not (isinstance(target, ast.Name) and target.id == name and isinstance(after, ast.Expr)):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            return inspect.cleandoc(after.value.value)
    return ""


def _values(data: Any, path: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the paths and values that a path has in a file's data; NAME is any name there."""
    if not path:
        yield (), data
        return
    if isinstance(data, Mapping):
        keys = list(data) if path[0] == "NAME" else [path[0]] if path[0] in data else []
    elif isinstance(data, list) and path[0].isdecimal() and int(path[0]) < len(data):
        keys = [int(path[0])]
    else:
        keys = []
    for key in keys:
        for below, value in _values(data[key], path[1:]):
            yield (key, *below), value


def _unknown(key: str) -> MisuseError:
    from ...console.explain import nearest
    from ..cli import keys

    known = list(keys())
    last = key.rpartition(".")[2]
    near = [path for path in known if path.rpartition(".")[2] == last]
    if not near and (like := nearest(key, known)) is not None:
        near = [like]
    hint = f"did you mean {', '.join(near[:5])}?" if near else None
    return MisuseError(f"there is no key {key}", hint=hint)
