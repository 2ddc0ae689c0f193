"""Read YAML without surprises: 1e-4 and 900B are numbers, `on` and 2026-01-01 are text.

PyYAML reads YAML 1.1: 1e-4 is text, 010 is eight, 12:30 is 750, `no` is false, and duplicate keys
are accepted. Here everything that looks like a number is one, everything else is text, duplicate
keys are an error, and the line of every value is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    import yaml

Path = tuple[str | int, ...]
"""Keys and list positions from the top level to a value."""

Lines = dict[Path, int | None]
"""Line number of each value; None for a value from the command line."""

DECIMAL = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
DIGITS = "[0-9][0-9_]*"
COUNT = re.compile(rf"^({DIGITS}(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|[KMBT])$")
SIZE = re.compile(rf"^({DIGITS}(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?) ?(?:(Ki|Mi|Gi|Ti|[KMGT])B?)?$")
SIZES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, **BINARY}
VALUES = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        rf"[-+]?(?:(?:{DIGITS}\.[0-9_]*|\.{DIGITS})(?:[eE][-+]?[0-9]+)?|{DIGITS}[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "tag:yaml.org,2002:merge": (r"<<", "<"),
    "!count": (COUNT.pattern, "0123456789"),
}
"""Values other than text: tag, pattern, and possible first characters."""


class Count(int):
    """A whole number that YAML writes with a suffix, and its text.

    The key decides the meaning: 64B is a count, 64 billion, and no size in bytes.
    """

    text: str

    def __new__(cls, number: int, text: str) -> Count:
        instance = super().__new__(cls, number)
        instance.text = text
        return instance

    def __reduce__(self) -> tuple[object, ...]:
        return Count, (int(self), self.text)


def parse(text: str, *, source: str) -> tuple[dict[str, Any], Lines]:
    """Return a YAML text's data, and the line number of each value."""
    import yaml

    lines: Lines = {}
    try:
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is not None:
            problems = list(_index(loader, node, (), (), lines))
            if problems:
                raise ConfigError(source, problems)
        data = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError(source, [ConfigProblem("", f"not YAML: {error.problem}", line)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise ConfigError(source, [ConfigProblem("", message, line)]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, [ConfigProblem("", f"cannot be read: {error}")]) from None
    if not isinstance(data, dict):
        raise ConfigError(
            source, [ConfigProblem("", "expected `key: value` lines at the top level", 1)]
        )
    return data, lines


def value(text: str, key: str = "KEY") -> Any:
    """Parse the VALUE of a typed KEY=VALUE as YAML; ValueError if it is none."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError):
        quoted = text.replace("'", "''")
        raise ValueError(
            f"`{text}` is not a YAML value; if it is a text, put YAML quotes inside the shell's: "
            f"\"{key}='{quoted}'\""
        ) from None


def emit(data: Any) -> str:
    """Return `data` as YAML text, which `parse` reads back to an equal value."""
    import yaml

    return yaml.dump(data, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=100)


def count(text: str) -> int | float:
    """Parse a count exactly: '900B' → 900_000_000_000, '8Ki' → 8192.

    Whole numbers become a Count, fractions a float.
    """
    match = COUNT.match(text)
    if not match:
        raise ValueError(f"`{text}` is not a count like 4096, 900B or 8Ki")
    number = Fraction(match[1].replace("_", "")) * (DECIMAL | BINARY)[match[2]]
    return Count(int(number), text) if number.denominator == 1 else float(number)


def size(text: str) -> int:
    """Parse a size in bytes: '64MiB', '64Mi' → 67_108_864, '64MB', '64 MB', '64M' → 64_000_000.

    The suffix B alone is refused: after a count it means a billion, after a size it means bytes.
    """
    match = SIZE.match(text)
    if not match:
        raise ValueError(f"`{text}` is not a size in bytes like 500_000, 64MB or 64MiB")
    number = Fraction(match[1].replace("_", "")) * SIZES.get(match[2], 1)
    if number.denominator != 1:
        raise ValueError(f"`{text}` is not a whole number of bytes")
    return int(number)


def _index(
    loader: Any, node: yaml.Node, path: Path, above: tuple[yaml.Node, ...], lines: Lines
) -> Iterator[ConfigProblem]:
    """Record every value's line; yield mistakes that YAML allows."""
    import yaml

    if node in above:
        yield ConfigProblem(dotted(path), "refers to itself", node.start_mark.line + 1)
        return
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                yield ConfigProblem(dotted(path), "a key must be a single value", line)
                continue
            inner = (*path, loader.construct_object(key))
            if inner in lines:
                yield ConfigProblem(
                    dotted(inner), f"duplicate key, first on line {lines[inner]}", line
                )
            lines[inner] = line
            yield from _index(loader, item, inner, above, lines)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            lines[(*path, position)] = item.start_mark.line + 1
            yield from _index(loader, item, (*path, position), above, lines)


def dotted(path: Path) -> str:
    """Return a path as text: phases.stable.tokens."""
    return ".".join(str(key) for key in path)


@cache
def _loader() -> type[yaml.SafeLoader]:
    import yaml

    class PlainLoader(yaml.SafeLoader):
        pass

    PlainLoader.yaml_implicit_resolvers = {}
    for tag, (pattern, first) in VALUES.items():
        PlainLoader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), [*first])
    PlainLoader.add_constructor("!count", lambda loader, node: count(node.value))
    return PlainLoader


@cache
def _dumper() -> type[yaml.SafeDumper]:
    """Return a dumper that quotes text which a YAML reader could take for another type."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_str(self, data: str) -> yaml.ScalarNode:
            # Without quotes, PyYAML reads U+0085 and similar characters back as a space.
            style = None if data.isprintable() else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, Dumper.represent_str)
    Dumper.add_representer(Count, Dumper.represent_int)
    for tag, (pattern, first) in VALUES.items():
        Dumper.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), [*first])
    return Dumper
