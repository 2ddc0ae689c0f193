"""Compile the programs of a model side by side, in a process beside this one."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ...console.errors import LayoutError, MissingError
from .worker import Compilation, Request

COMMAND = [sys.executable, "-m", f"{__package__}.worker"]
SLOW = 4.0
"""CPU seconds beyond which a program is named."""


def compile_programs(
    request: Request,
    report: Callable[[int, int], None] = lambda count, total: None,
    *,
    cache: str | None = None,
) -> Compilation:
    """Compile what the cache lacks, and say what happened. `report` is told how many programs are
    compiled, and how many will be. Raise a MissingError if Triton lacks what it needs, a
    LayoutError if the process ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"TRITON_CACHE_DIR": cache} if cache is not None else {}
    environment.pop("TRITON_INTERPRET", None)
    result: dict[str, Any] | None = None
    count = total = 0
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            COMMAND, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            with process.stdin as stdin:
                pickle.dump(request, stdin)
            for line in process.stdout:
                event = json.loads(line)
                result = event.get("result", result)
                count += "compiled" in event
                total = event.get("count", total)
                if total and result is None:
                    report(count, total)
        except BrokenPipeError:  # it has ended: its last words say why
            pass
        finally:
            process.stdout.close()
            if result is None:
                process.kill()
            process.wait()
        words.seek(0)
        last = [line.strip() for line in words.read().splitlines() if line.strip()][-1:]
    if result is None:
        raise LayoutError(
            f"the programs of the model could not be compiled: {''.join(last) or 'no reason'}",
            hint="`headrace doctor` shows what this machine has; `kernel: torch` in the model runs "
            "plain torch",
        )
    compilation = Compilation(**result)
    if compilation.tool is not None:
        raise lacking(compilation.tool)
    return compilation


def lacking(problem: str) -> MissingError:
    """Return the error of a problem of `tools`, whose second part mends it."""
    message, _, hint = problem.partition("; ")
    return MissingError(message, hint=hint)
