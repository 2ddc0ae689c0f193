"""Reference of the configuration, from the dataclasses and the strings below their fields."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator

from headrace.mixtures.mixture_file.mixture import Mixture
from headrace.models.config.config import ModelConfig
from headrace.planner.hardware.file import HardwareFile
from headrace.tokenize.builder.build import BuildConfig
from headrace.tokenize.train import TrainConfig
from headrace.trainer.guide.config_key import REQUIRED, describe_field, iter_members
from headrace.trainer.run.config import RunConfig

from .markdown import code, definitions, escaped, link_pages

ROOTS = {
    "run": (RunConfig, "A run", "`trainer run RUN.yaml`; on the command line as `KEY=VALUE`."),
    "mixture": (Mixture, "A mixture", "`mixtures plan FILE`; in a run as `mixture.KEY=VALUE`."),
    "model": (
        ModelConfig,
        "A model",
        "`headrace models show FILE`; in a run as `model.KEY=VALUE`.",
    ),
    "build": (BuildConfig, "A build", "`tokenize build`, as options; in Python `BuildConfig`."),
    "tokenizer": (TrainConfig, "A tokenizer's training", "`tokenize train`."),
    "hardware": (HardwareFile, "A cluster", "`trainer plan --hardware FILE`."),
}
"""Configuration, title and use of each page."""


def configuration_pages() -> dict[str, str]:
    """Return a page for each file that people write."""
    return {f"reference/{name}-file.md": _page(*root) for name, root in ROOTS.items()}


def sections(kind: type) -> dict[type, list[str]]:
    """Return the dataclasses of a configuration with the keys that hold each."""
    paths_by_section: dict[type, list[str]] = {}
    waiting: list[tuple[type, str]] = [(kind, "")]
    while waiting:
        section, path = waiting.pop(0)
        seen = section in paths_by_section
        paths_by_section.setdefault(section, []).append(path)
        if seen:
            continue
        hints = typing.get_type_hints(section, include_extras=True)
        for field in dataclasses.fields(section):
            if field.init:
                below = f"{path}.{field.name}".lstrip(".")
                waiting += [(inner, place) for inner, place in _within(hints[field.name], below)]
    return paths_by_section


def _within(hint: object, path: str) -> Iterator[tuple[type, str]]:
    """Yield the dataclasses of a field's type with their paths; NAME stands for a name."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint, path
        return
    for member, is_named in iter_members(hint):
        yield from _within(member, f"{path}.NAME" if is_named else path)


def _page(kind: type, title: str, use: str) -> str:
    written = [_section(section, paths) for section, paths in sections(kind).items()]
    return "\n\n".join([f"# {title}", f"Used by {use}", *written]) + "\n"


def _section(kind: type, paths: list[str]) -> str:
    keys = list(dict.fromkeys(path for path in paths if path))
    head = "## Keys" if not keys else f"## {code(keys[0])}: {kind.__name__}"
    also = f"Also below {', '.join(map(code, keys[1:]))}." if keys[1:] else ""
    hints = typing.get_type_hints(kind, include_extras=True)
    items = []
    for field in dataclasses.fields(kind):
        if field.init:
            meaning = describe_field(kind, field, hints[field.name])
            default = REQUIRED if meaning.required else f"default {code(meaning.default_text)}"
            items.append(
                (
                    f"{code(field.name)}: {code(meaning.type)}, {default}",
                    link_pages(escaped(meaning.text)) or _choices(meaning.below),
                )
            )
    doc = inspect.getdoc(kind) or ""
    text = "" if doc.startswith(f"{kind.__name__}(") else link_pages(escaped(doc))
    return "\n\n".join(filter(None, [head, text, also, definitions(items)]))


def _choices(keys: tuple[str, ...]) -> str:
    return f"A section with the keys {', '.join(map(code, keys))}." if keys else "The kind."
