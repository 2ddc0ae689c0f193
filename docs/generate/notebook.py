"""The notebook of the site as a page, with what its cells printed (run_notebook.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "notebook.ipynb"


def read_output(cell: Any) -> str:
    """Return the stored output of a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def notebook_page() -> str:
    """Return the notebook as a Markdown page, with the stored outputs."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if output := read_output(cell):
            parts.append(f"```text\n{output.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
