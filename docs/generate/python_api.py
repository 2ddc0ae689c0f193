"""The reference of the Python interface that is declared public, made from its docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from headrace.trainer.guide.config_key import text_below

from .markdown import code, definitions, escaped

MODULES = {
    "headrace.dataplane": "The stream, and datasets for Hugging Face",
    "headrace.dataplane.loader": "Micro-batches of a rank",
    "headrace.dataplane.order.plan": "Plans",
    "headrace.mixtures.planning.resolve_mixture": "From a mixture to a plan",
    "headrace.mixtures.audit.auditor": "The audit of a run",
    "headrace.dataplane.tokenizers": "Tokenizers",
    "headrace.models.config.config": "Configurations of models",
    "headrace.models.model.model": "Models",
    "headrace.models.model.generate": "Generation",
}
"""Public modules with their titles."""

LINE = 88
"""Longest signature in characters that stays on one line."""


def api_page() -> str:
    """Return the page of all public modules."""
    head = (
        "# Python\n\nThese modules are public: a change of them is named in the changelog. "
        "[The loader in your own loop](../loader.md) shows them at work."
    )
    return "\n\n".join([head, *(_module(*item) for item in MODULES.items())]) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Return the classes and functions of a module that are public: those of `__all__`, or those
    that it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
    members = ((name, getattr(module, name)) for name in names)
    return [name for name, value in members if inspect.isclass(value) or inspect.isfunction(value)]


def _module(name: str, title: str) -> str:
    module = import_module(name)
    entries = [
        _entry(public_name, getattr(module, public_name)) for public_name in public_names(module)
    ]
    return "\n\n".join(
        [f"## {title}: {code(name)}", escaped(inspect.getdoc(module) or ""), *entries]
    )


def _entry(name: str, value: Any) -> str:
    head = f"### {code(name)}\n\n```python\n{_signature(name, value)}\n```"
    doc = inspect.getdoc(value) or ""
    text = "" if doc.startswith(f"{name}(") else escaped(doc)
    members = definitions(_members(value)) if inspect.isclass(value) else ""
    return "\n\n".join(filter(None, [head, text, members]))


def _signature(name: str, value: Any) -> str:
    word = "class" if inspect.isclass(value) else "def"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a protocol, or a class of C
        return f"{word} {name}"
    if word == "class":
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    line = f"{word} {name}{_unquoted(signature)}"
    if len(line) <= LINE:
        return line
    parameters = ",\n    ".join(map(_unquoted, signature.parameters.values()))
    result = "" if word == "class" else line[line.rindex(")") + 1 :]
    return f"{word} {name}(\n    {parameters},\n){result}"


def _unquoted(signature: object) -> str:
    """Return a signature without the quotes that postponed annotations have in it."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature))


def _members(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the fields, and the documented methods and properties, that a class defines."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    for field in fields:
        yield code(f"{field.name}: {field.type}"), escaped(text_below(kind, field.name))
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            signature = (
                "" if isinstance(value, property) else _unquoted(inspect.signature(function))
            )
            yield code(name + signature), escaped(inspect.cleandoc(function.__doc__))
