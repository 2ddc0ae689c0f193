"""Run the notebook of the site in a process of its own.

    python -m docs.generate.run_notebook             fail if a cell does, or prints otherwise
    python -m docs.generate.run_notebook --write     store what the cells print

A line that begins with `!` is a command of the shell; the value of a last expression is printed.
Numbers with a unit of time or speed may differ.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .notebook import NOTEBOOK, read_output

BORDER = "--- next cell ---"
PROGRAM = """
import ast, json, subprocess, sys
names = {"__name__": "__main__"}
for cell in json.load(sys.stdin):
    print(BORDER, flush=True)
    lines = [
        f"__run({line[1:]!r})" if line.startswith("!") else line for line in cell.splitlines()
    ]
    names["__run"] = lambda command: subprocess.run(
        command, shell=True, check=True, stderr=subprocess.DEVNULL
    ) and None
    tree = ast.parse("\\n".join(lines))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    value = last and eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    if value is not None:
        print(value)
    sys.stdout.flush()
"""
MEASURED = re.compile(r"\d[\d.,]*(?=\s?(?:s|ms|MB/s|tok/s)\b)")


def main(words: Sequence[str]) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = run_cells(["".join(cell["source"]) for cell in cells])
    changed = []
    for cell, output in zip(cells, outputs, strict=True):
        if _without_times(read_output(cell)) != _without_times(output):
            changed.append(f"{''.join(cell['source'])}\n{output}")
        stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(True)}
        cell["outputs"] = [stream] if output else []
    if "--write" in words:
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    elif changed:
        sys.exit("the notebook prints otherwise now:\n" + "\n\n".join(changed))


def run_cells(sources: Sequence[str]) -> list[str]:
    """Run cells in a fresh process and an empty folder; returns what each prints."""
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"BORDER = {BORDER!r}{PROGRAM}"],
            input=json.dumps(sources),
            cwd=folder,
            env={**os.environ, "PATH": commands},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"a cell of the notebook fails:\n{done.stdout}\n{done.stderr}")
    return [text.removeprefix("\n") for text in done.stdout.split(BORDER)[1:]]


def _without_times(text: str) -> str:
    return MEASURED.sub("0", text)


if __name__ == "__main__":
    main(sys.argv[1:])
