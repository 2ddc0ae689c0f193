"""Imports between the modules of headrace, read from the source text."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

ABSOLUTE = "headrace"
"""Target of an absolute import of headrace, which the package itself must not contain."""


def imports(
    text: str, package: tuple[str, ...], modules: Collection[str] = (), *, strings: bool = True
) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted target of each import of headrace in a module of `package`.

    Targets have no leading `headrace.`; late imports and imports for type checking count, and with
    `strings` also modules that a registry names. A name is part of the target if `modules`
    contains it: `from . import guard`.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == ABSOLUTE:
                    yield node.lineno, ABSOLUTE
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                if (node.module or "").split(".")[0] == ABSOLUTE:
                    yield node.lineno, ABSOLUTE
                continue
            base = package[: len(package) - (node.level - 1)]
            target = ".".join((*base, *(node.module.split(".") if node.module else ())))
            for name in node.names:
                longer = f"{target}.{name.name}".lstrip(".")
                yield node.lineno, longer if longer in modules or not target else target
        elif (
            strings
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (match := re.fullmatch(r"headrace((\.\w+){2,})", node.value))
        ):
            yield node.lineno, match[1][1:]  # a module by its name, as registries have them


def module_name(file: Path) -> str:
    """Return the dotted name of a file's module; `file` is relative to the root."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def graph(root: Path, files: Collection[Path]) -> dict[str, set[str]]:
    """Return the modules that each module imports.

    A module that a registry names in a string is not imported: the table knows its entries, and
    the entries may import what all of them share.
    """
    names = {module_name(file.relative_to(root)): file for file in files}
    edges: dict[str, set[str]] = {}
    for name, file in names.items():
        package = file.parent.relative_to(root).parts
        targets = {target for _, target in imports(file.read_text(), package, names, strings=False)}
        edges[name] = {target for target in targets if target in names and target != name}
    return edges


def cycles(edges: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or not (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in edges[module]:
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            place = stack.index(module)
            if len(stack) - place > 1:
                groups.append(sorted(stack[place:]))
            del stack[place:]

    for module in edges:
        if module not in order:
            visit(module)
    return groups
