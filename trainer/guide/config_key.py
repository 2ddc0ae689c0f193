"""`headrace config KEY`: the meaning of a key of a run, a mixture or a model, and where it is set.

The meaning is the string below the field of the configuration's dataclass, so it is never another
one than the code's.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ...console import command
from ...console.errors import MisuseError

REQUIRED = "required"


@dataclass(frozen=True)
class KeyMeaning:
    """A key, as one configuration has it."""

    owners: tuple[str, ...]
    """Names of the dataclasses that have it so."""
    type: str
    default: str
    text: str
    below: tuple[str, ...]
    """Names of the keys below it."""


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

    found = meanings(key)
    if not found:
        raise _unknown(key)
    where = None
    if place is not None:
        file = _file(key, Path(place))
        data, lines = reader.read_yaml(file)
        found = meanings(key, data) or found  # all, if the kind in the file has no such key
        where = setting(key, file, data, lines)
    if as_json:
        listed = [dataclasses.asdict(meaning) for meaning in found]
        command.emit({"key": key, "meanings": listed, "set": where})
        return
    for meaning in found:
        click.echo(f"{key}: {meaning.type}, {_default(meaning)} ({', '.join(meaning.owners)})")
        if meaning.text:
            click.echo(textwrap.indent(meaning.text, "  "))
        if meaning.below:
            click.echo(f"  keys: {', '.join(meaning.below)}")
    if where is not None:
        click.echo(where)


def meanings(key: str, data: Any = None) -> list[KeyMeaning]:
    """Return the different meanings of a key, with the configurations that have each. Of a section
    whose kind `data` says, a file's data, return those of this kind."""
    kind, path = _root(key)
    owners: dict[KeyMeaning, list[str]] = {}
    for owner, field, hint in _fields(kind, path.split("."), data):
        names = owners.setdefault(meaning_of(owner, field, hint), [])
        names += [] if owner.__name__ in names else [owner.__name__]
    return [replace(meaning, owners=tuple(names)) for meaning, names in owners.items()]


def setting(key: str, file: Path, data: Any, lines: Mapping[Any, int | None]) -> str:
    """Return the line that sets a key in a file, which `read_yaml` has read."""
    rows = []
    for names, value in _values(data, _root(key)[1].split(".")):
        line = lines.get(names)
        rows.append(f"{file}{'' if line is None else f', line {line}'}: {value!r}")
    return "\n".join(rows) or f"{file} does not set it"


def _file(key: str, place: Path) -> Path:
    """Return the file that may set a key: the place itself, or a file of the folder of a run or of
    a recipe."""
    from ..folders.folder import RunFolder

    if not place.is_dir():
        return place
    folder = RunFolder(place)
    if not folder.run.exists():
        folder.check_is_run()
    files = {"mixture": folder.mixture, "model": folder.model}
    return files.get(key.partition(".")[0], folder.run)


def _root(key: str) -> tuple[Any, str]:
    """Return the configuration that a key belongs to, and the key's path in it."""
    from ...mixtures.mixture_file.mixture import Mixture
    from ...models.config.config import ModelConfig
    from ..run.config import RunConfig

    prefix, _, rest = key.partition(".")
    return {"mixture": (Mixture, rest), "model": (ModelConfig, rest)}.get(prefix, (RunConfig, key))


def _fields(kind: Any, path: Sequence[str], data: Any) -> Iterator[tuple[type, Any, Any]]:
    """Yield (dataclass, field, type) of every field at a path below a type, which `data` has."""
    within = [value for _, value in _values(data, path[:1])]
    below_data = within[0] if len(within) == 1 else None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            if field.init and field.name == path[0]:
                if len(path) == 1:
                    yield kind, field, hints[field.name]
                else:
                    yield from _fields(hints[field.name], path[1:], below_data)
        return
    if isinstance(data, Mapping) and (chosen := _chosen(kind, data)) is not None:
        yield from _fields(chosen, path, data)
        return
    for below, named in parts_of(kind):
        if not named:
            yield from _fields(below, path, data)
        elif len(path) > 1:
            yield from _fields(below, path[1:], below_data)


def _chosen(kind: Any, data: Any) -> type | None:
    """Return the dataclass that a section chooses, if its type has several to choose from."""
    from ...console.config import OneOf

    marks = (mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, OneOf))
    return next((mark.chosen(data) for mark in marks), None)


def parts_of(kind: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the types that a type is made of; True with those below a name of the user's."""
    from ...console.config import OneOf

    for mark in getattr(kind, "__metadata__", ()):
        if isinstance(mark, OneOf):
            yield from ((choice, False) for choice in mark.registry.values())
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (dict, Mapping, tuple, list, Sequence):
        named = arguments[-1 if origin in (dict, Mapping) else 0]
        yield named, True
        return
    yield from ((argument, False) for argument in arguments if not isinstance(argument, str))


def meaning_of(owner: type, field: Any, hint: Any) -> KeyMeaning:
    """Return the meaning of a field of a dataclass; `hint` is its type."""
    default = REQUIRED
    if field.default is not dataclasses.MISSING:
        default = repr(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        default = type(made).__name__ if dataclasses.is_dataclass(made) else repr(made)
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    sections = list(_classes(hint))
    fields = (each for section in sections for each in dataclasses.fields(section))
    below = dict.fromkeys(each.name for each in fields if each.init)
    text = text_below(owner, field.name)
    if (
        not text
        and len(sections) == 1
        and not str(sections[0].__doc__).startswith(
            f"{sections[0].__name__}("  # the docstring that a dataclass gets if it has none
        )
    ):
        text = inspect.getdoc(sections[0]) or ""
    return KeyMeaning((), plain_type(kind), default, text, tuple(below))


def plain_type(annotation: str) -> str:
    """Return an annotation without the marks of `Annotated`, which are for the reader of YAML."""
    return ast.unparse(_WithoutMarks().visit(ast.parse(annotation, mode="eval")))


class _WithoutMarks(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return node


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
        return
    for part, _ in parts_of(hint):
        yield from _classes(part)


def text_below(owner: type, name: str) -> str:
    """Return the string below a field, in the source of the class that declares it."""
    declaring = next(each for each in owner.__mro__ if name in inspect.get_annotations(each))
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
    """Yield the places and the values of a path in a file's data; NAME is any name there."""
    if not path:
        yield (), data
        return
    if isinstance(data, Mapping):
        chosen = list(data) if path[0] == "NAME" else [path[0]] if path[0] in data else []
    elif isinstance(data, list) and path[0].isdecimal() and int(path[0]) < len(data):
        chosen = [int(path[0])]
    else:
        chosen = []
    for name in chosen:
        for place, value in _values(data[name], path[1:]):
            yield (name, *place), value


def _default(meaning: KeyMeaning) -> str:
    return REQUIRED if meaning.default == REQUIRED else f"default {meaning.default}"


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
