"""Names: values and functions say what they hold; pages and docstrings name existing files."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_CODE = {"build", "data", "dist", "runs"}

VAGUE = {
    "beside", "each", "found", "given", "least", "left", "made", "most", "one", "other", "others",
    "own", "same", "stuff", "such", "thing", "things", "wanted", "what",
}  # fmt: skip
"""Names that do not say what a value is: a name is a noun of the field."""
JSON_KEYS = {"console/doctor.py": {"found", "what"}, "tokenize/verify.py": {"what"}}
"""Fields that have such a name because `--json` prints it."""
NAME_FIELDS: dict[type[ast.AST], str] = {
    ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.alias: "asname",
    ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name",
    ast.ExceptHandler: "name", ast.MatchAs: "name", ast.MatchStar: "name",
}  # fmt: skip


def vague_names(nodes: Collection[ast.AST]) -> Iterator[str]:
    """Yield the vague names that a statement binds, by its nodes. `left` is a side if `right` or
    `top` is bound too."""
    names = []
    for node in nodes:
        name = getattr(node, NAME_FIELDS.get(type(node), ""), None)
        if name is not None and not isinstance(getattr(node, "ctx", None), ast.Load):
            names.append(name)
    sides = {"left"} if {"right", "top"} & set(names) else set()
    yield from (name for name in names if name in VAGUE - sides)


@cache
def read_modules() -> dict[str, tuple[str, list[str]]]:
    """Return the docstrings and the vague names of all modules, by their paths."""
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir()
        and (path.name == ".ci" or not path.name.startswith("."))
        and path.name not in NO_CODE
    ]
    result = {}
    for file in (
        ROOT / "__init__.py",
        *(path for folder in folders for path in folder.rglob("*.py")),
    ):
        docs, vague = [], []
        for statement in ast.parse(file.read_text()).body:
            nodes = list(ast.walk(statement))
            vague += vague_names(nodes)
            strings = [node.value for node in nodes if isinstance(node, ast.Expr)]
            docs += [node.value for node in strings if isinstance(node, ast.Constant)]
        text = "\n".join(doc for doc in docs if isinstance(doc, str))
        result[file.relative_to(ROOT).as_posix()] = text, vague
    return result


def test_names_say_what_they_hold() -> None:
    vague = {path: set(names) for path, (_, names) in read_modules().items() if names}
    assert vague == JSON_KEYS


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("found = 1", ["found"]),
        ("def one(other, *, most=0): ...", ["one", "other", "most"]),
        ("rows = [each for each in items]", ["each"]),
        ("class Report:\n    what: str\n    def fill(self): self.own = 1", ["what", "own"]),
        ("import math as thing", ["thing"]),
        ("def trim(text):\n    left = 3", ["left"]),
        ("left, right = sides", []),
        ("largest = found(other.most, given=left)", []),
    ],
)
def test_a_vague_name_is_detected(code: str, names: list[str]) -> None:
    [statement] = ast.parse(code).body
    assert sorted(vague_names(list(ast.walk(statement)))) == sorted(names)


def missing_files(text: str, existing: Collection[str]) -> list[str]:
    """Return the .py and .md files that a text names and the repository lacks.

    A path may be shortened from the left: `engines/update.py`. NAME stands for any name.
    """
    names = re.findall(r"(?<![\w/.{}*<>:-])(?:[\w-]+/)*[\w-]+\.(?:py|md)\b(?!/)", text)
    paths = [f"/{path}" for path in existing]
    return [
        name
        for name in names
        if "NAME" not in name and not any(path.endswith(f"/{name}") for path in paths)
    ]


def test_pages_and_docstrings_name_existing_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    texts = {path: docs for path, (docs, _) in read_modules().items()}
    texts |= {page.relative_to(ROOT).as_posix(): page.read_text() for page in pages}
    stale = {path: missing_files(text, texts) for path, text in texts.items()}
    assert not {path: names for path, names in stale.items() if names}


def test_a_stale_path_is_found() -> None:
    text = "See engines/update.py, update.py and operators/NAME.py; models/gone.py, date.py, a.md."
    existing = ["trainer/engines/update.py", "models/present.py"]
    assert missing_files(text, existing) == ["models/gone.py", "date.py", "a.md"]
