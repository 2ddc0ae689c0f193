"""The promise of SECURITY.md: no file from outside makes headrace run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("configs", "console", "dataplane", "mixtures", "models", "tokenize", "trainer")

OWN_PROCESSES = {"trainer/cluster/ranks.py", "trainer/measure/local.py"}
"""They read pickles that another process of the same command wrote into a private folder."""


def calls_that_run_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each call that may run code which a file brings."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if (
            name in ("eval", "exec", "compile", "marshal.loads", "shelve.open")
            or (
                name.split(".")[0] in ("pickle", "dill", "cloudpickle", "joblib")
                and name.rpartition(".")[2] in ("load", "loads", "Unpickler")
            )
            or (name == "torch.load" and options.get("weights_only") != "True")
            or options.get("allow_pickle", "False") != "False"
            or options.get("trust_remote_code", "False") != "False"
            or (name == "yaml.load" and "Loader" not in options)
            or name in ("yaml.unsafe_load", "yaml.full_load")
        ):
            yield node.lineno, name


def test_nothing_reads_a_file_that_may_run_code() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if str(file.relative_to(ROOT)) not in OWN_PROCESSES
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
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
    ],
)
def test_such_a_call_is_found(text: str) -> None:
    assert list(calls_that_run_code(text))


@pytest.mark.parametrize(
    "text",
    ["model.eval()", "torch.load(file, weights_only=True)", "json.loads(text)", "pickle.dumps(x)"],
)
def test_other_calls_are_not(text: str) -> None:
    assert not list(calls_that_run_code(text))
