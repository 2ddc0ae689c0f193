"""The promise of SECURITY.md: no file from outside makes headrace run code."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.console.config import read_yaml
from headrace.console.errors import StorageError, UserError
from headrace.models.conversion.files import read_torch
from headrace.models.conversion.savanna.settings import read_settings

ROOT = Path(__file__).parent.parent
FOLDERS = (
    *("configs", "console", "dataplane", "mixtures", "models"),
    *("planner", "reports", "tokenize", "trainer"),
)

OWN_PROCESSES = {
    "trainer/cluster/ranks.py",
    "planner/measure/local.py",
    "models/compilation/worker.py",
}
"""They read pickles that another process of the same command wrote into a private folder or a
pipe."""
AS_DATA = {"models/conversion/pickles.py"}
"""Their unpickler builds tensors and containers alone; a test plants code in a file
(test_savanna_checkpoints.py)."""

SAFE_LOADERS = ("_loader()", "yaml.SafeLoader", "yaml.CSafeLoader")
"""Loaders of YAML that make no objects; `_loader` returns a subclass of them."""


def full_names(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for: `load` → `torch.load`."""
    return {
        name.asname or name.name: (
            name.name if isinstance(node, ast.Import) else f"{node.module}.{name.name}"
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }


def calls_that_run_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each call that may run code which a file brings."""
    tree = ast.parse(text)
    known = full_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, dot, rest = ast.unparse(node.func).partition(".")
        name = f"{known.get(first, first)}{dot}{rest}"
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if (
            name in ("eval", "exec", "compile", "marshal.loads", "shelve.open")
            or name in ("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter")
            or name.rpartition(".")[2] in ("read_pickle", "FileSystemReader")
            or (
                name.split(".")[0] in ("pickle", "_pickle", "dill", "cloudpickle", "joblib")
                and name.rpartition(".")[2] in ("load", "loads", "Unpickler")
            )
            or (name == "torch.load" and options.get("weights_only") != "True")
            or options.get("allow_pickle", "False") != "False"
            or options.get("trust_remote_code", "False") != "False"
            or (name == "yaml.load" and options.get("Loader") not in SAFE_LOADERS)
            or name in ("yaml.unsafe_load", "yaml.full_load")
        ):
            yield node.lineno, name


def test_nothing_reads_a_file_that_may_run_code() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if str(file.relative_to(ROOT)) not in OWN_PROCESSES | AS_DATA
        for line, name in calls_that_run_code(file.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "pickle.loads(data)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "eval(text)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "from pickle import loads as read\nread(data)",
        "from torch import load\nload(file)",
        "import pickle as p\np.Unpickler(file).load()",
        "dcp.FileSystemReader(folder)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
    ],
)
def test_such_a_call_is_found(text: str) -> None:
    assert list(calls_that_run_code(text))


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "torch.load(file, weights_only=True)",
        "json.loads(text)",
        "from json import loads\nloads(text)",
        "pickle.dumps(x)",
    ],
)
def test_other_calls_are_not(text: str) -> None:
    assert not list(calls_that_run_code(text))


class Calls:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def test_weights_run_no_code(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(2), "x": Calls(tmp_path / "made")}, file)
    with pytest.raises(StorageError, match="cannot read"):
        read_torch(file, hint="")
    assert not (tmp_path / "made").exists()
    torch.load(file, weights_only=False)  # negative control
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("read", [read_yaml, lambda file: read_settings([file])])
def test_a_tag_of_yaml_makes_no_object(tmp_path: Path, read: Callable[[Path], object]) -> None:
    file = tmp_path / "x.yml"
    file.write_text(f"key: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(UserError):
        read(file)
    assert not (tmp_path / "made").exists()
