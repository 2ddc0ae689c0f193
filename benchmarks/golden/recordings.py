"""Recordings: a JSON file for each model and form, with the circumstances of each run."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import LAYOUTS, Case, GoldenError
from .trees import Curve, Workshop

FOLDER = Path(__file__).parent
PROBE = """
import importlib.metadata, json, platform
import torch
found = {name: importlib.metadata.version(name) for name in PACKAGES}
found["python"] = platform.python_version()
found["capability"] = torch.backends.cpu.get_cpu_capability()
print(json.dumps(found))
"""
PACKAGES = ("torch", "deepspeed", "numpy", "pyarrow")
INSTRUCTIONS = ("sse4", "avx", "fma", "f16c", "amx", "bf16", "asimd", "sve")
"""Beginnings of the CPU flags that a numerical library looks at."""


def circumstances(workshop: Workshop) -> dict[str, Any]:
    """Return all that may change a bit of a run, besides the tree: versions, CPU, threads."""
    result: dict[str, Any] = json.loads(
        workshop.run([sys.executable, "-c", f"PACKAGES = {PACKAGES!r}\n{PROBE}"])
    )
    return {**result, **processor(), "threads": workshop.threads}


def processor() -> dict[str, str]:
    """Return the CPU's name and the instruction sets that it offers."""
    lines: dict[str, str] = {}
    file = Path("/proc/cpuinfo")
    if file.exists():
        for line in file.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            lines[key.strip()] = value.strip()
    flags = lines.get("flags", lines.get("Features", "")).split()
    numbers = [lines[key] for key in ("cpu family", "model", "stepping") if key in lines]
    return {
        "cpu": f"{lines.get('model name', platform.machine())} {'/'.join(numbers)}".strip(),
        "instructions": " ".join(sorted(f for f in flags if f.startswith(INSTRUCTIONS))),
    }


@dataclass(frozen=True)
class Recorded:
    """A recorded run."""

    curve: Curve
    commit: str
    circumstances: dict[str, Any]


class Recording:
    """The file of a model and a form. The ledger is stored once: no layout changes it. (A run of
    fewer steps has its first hashes.)"""

    def __init__(self, model: str, form: str, folder: Path = FOLDER) -> None:
        self.model = model
        self.form = form
        self.file = folder / (f"{model}.json" if form == "short" else f"{model}.{form}.json")
        self.ledger: list[str] = []
        self.runs: dict[str, dict[str, Any]] = {}

    def load(self) -> Recording:
        """Read the file, if there is one."""
        if self.file.exists():
            try:
                data = json.loads(self.file.read_text())
                self.ledger, self.runs = data["ledger"], data["runs"]
                if not self.ledger or not self.runs:
                    raise ValueError("it holds no run")
                for run in self.runs.values():
                    if not 0 < len(run["loss"]) == len(run["norm"]) <= len(self.ledger):
                        raise ValueError("curves and ledger have other numbers of steps")
                    for key in ("commit", "circumstances", "options", "data"):
                        run[key]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise GoldenError(
                    f"{self.file} is damaged: {error!r}",
                    f"restore it (`git checkout -- {self.file.name}` in its folder), or remove it "
                    f"and record it again: `make golden MODELS={self.model}`",
                ) from None
        return self

    def steps(self, case: Case) -> int:
        """Return the number of recorded steps; 0 if there is no run."""
        return len(self.runs[case.layout]["loss"]) if case.layout in self.runs else 0

    def check(self, case: Case) -> None:
        """Raise an error if there is no run of the case."""
        if case.layout not in self.runs:
            long = " LONG=1" * (self.form == "long")
            raise GoldenError(
                f"{self.file} has no run of layout {case.layout}",
                f"record it: `make golden MODELS={case.model} LAYOUTS={case.layout}{long}`",
            )

    def get(self, case: Case, data: str) -> Recorded:
        """The recorded run of a case, which must have been made with the same `data`."""
        self.check(case)
        run, long = self.runs[case.layout], " LONG=1" * (self.form == "long")
        if run["options"] != case.words() or run["data"] != data:
            raise GoldenError(
                f"{case}: benchmarks/golden has other options, corpus or mixture than the recorded "
                "run",
                f"take the change back, or renew the recording: `make golden MODELS={case.model}"
                f"{long}`",
            )
        curve = Curve(ledger=self.ledger[: len(run["loss"])], loss=run["loss"], norm=run["norm"])
        return Recorded(curve, run["commit"], run["circumstances"])

    def put(self, case: Case, curve: Curve, **about: Any) -> None:
        """Add a run, and write the file."""
        both = min(len(curve.ledger), len(self.ledger))
        if curve.ledger[:both] != self.ledger[:both]:
            raise GoldenError(
                f"{case}: the ledger differs from that of {', '.join(self.runs)}",
                "a layout must not change the ledger; if the data order was changed on purpose, "
                f"renew all layouts: `make golden MODELS={case.model}`",
            )
        self.ledger = max(self.ledger, curve.ledger, key=len)
        self.runs[case.layout] = {
            **about,
            "options": case.words(),
            "loss": curve.loss,
            "norm": curve.norm,
        }
        self.runs = {name: self.runs[name] for name in LAYOUTS if name in self.runs}
        self.file.write_text(self.text())

    def text(self) -> str:
        """Return JSON with a line for each list, so that a renewal has a readable diff."""
        runs = ",\n".join(
            f"  {json.dumps(layout)}: {{\n"
            + ",\n".join(f"   {json.dumps(key)}: {json.dumps(run[key])}" for key in run)
            + "\n  }"
            for layout, run in self.runs.items()
        )
        head = f' "model": {json.dumps(self.model)},\n "steps": {len(self.ledger)},\n'
        return f'{{\n{head} "ledger": {json.dumps(self.ledger)},\n "runs": {{\n{runs}\n }}\n}}\n'
