from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.launch import Launcher

InProcesses = Callable[..., Any]


@pytest.fixture
def in_processes(tmp_path: Path) -> InProcesses:
    """Run a task of layouts.py on several processes, and return what rank 0 says."""

    def run(processes: int, task: str, folder: Path | None = None, **arguments: Any) -> Any:
        folder = folder or tmp_path
        (folder / "arguments.json").write_text(json.dumps(arguments))
        script = str(Path(__file__).with_name("layouts.py"))
        command = [sys.executable, script, task, str(folder)]
        assert Launcher(command, processes, threads=1, logs=folder).run() == 0
        return json.loads((folder / "result.json").read_text())

    return run
