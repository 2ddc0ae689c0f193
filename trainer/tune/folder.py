"""Files of a tune: its request, candidates and finished trials. A killed tune continues there.

tune.json                  the request; written when all candidates are there
candidates/00.yaml …       layout plans, the best predicted first; then those of probes
results/00-0.json …        finished trials, by candidate and round
trials/00-0/ …             the runs
plan.yaml hardware.yaml    the best plan, and the corrected figures
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...console import config as reader
from ...console.errors import BusyError, RunError
from ...dataplane.storage.atomic import replacing
from ..run.layout_plan import LayoutPlan, load_plan
from .trial import Result

LOCK = ".lock"


class TuneFolder:
    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.request = self.root / "tune.json"
        self.candidates = self.root / "candidates"
        self.results = self.root / "results"
        self.trials = self.root / "trials"
        self.plan = self.root / "plan.yaml"
        self.hardware = self.root / "hardware.yaml"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with this process."""
        self.check_free()
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise BusyError(
                f"{self.root} is in use by another tune",
                hint="wait until it has ended, or choose another --out",
            ) from None
        finally:
            os.close(descriptor)

    def check_free(self) -> None:
        """Raise if the folder holds anything but a tune."""
        if not self.root.is_dir() or self.request.exists():
            return
        known = {LOCK, self.candidates.name, f".{self.request.name}"}
        others = [p.name for p in self.root.iterdir() if not p.name.startswith(tuple(known))]
        if others:
            raise RunError(
                f"{self.root} holds other files ({', '.join(sorted(others)[:3])}) and no tune",
                hint="choose another --out",
            )

    def open(
        self, request: Mapping[str, Any], search: Callable[[], Sequence[LayoutPlan]]
    ) -> list[LayoutPlan]:
        """Return the candidates of this request: those that are stored, or those of `search`."""
        request = json.loads(json.dumps(request))
        if self.request.exists():
            stored = json.loads(self.request.read_text())
            changed = [
                f"{key}: the folder has {stored.get(key)}, this tune {request.get(key)}"
                for key in sorted({*stored, *request} - {"candidates"})
                if stored.get(key) != request.get(key)
            ]
            if changed:
                raise RunError(
                    f"{self.root} holds another tune",
                    where="\n" + "\n".join(f"    {line}" for line in changed),
                    hint="choose another --out, or undo the change",
                )
            return [load_plan(self.candidate(n)) for n in range(stored["candidates"])]
        found = list(search())
        for number, plan in enumerate(found):
            self.add(number, plan)
        write(self.request, json.dumps({**request, "candidates": len(found)}, indent=1))
        return found

    def candidate(self, number: int) -> Path:
        return self.candidates / f"{number:02}.yaml"

    def add(self, number: int, plan: LayoutPlan) -> None:
        """Write the plan of a trial."""
        write(self.candidate(number), reader.dump(plan))

    def once(self, name: str, run: Callable[[Path], Result]) -> Result:
        """Return the stored result of a trial, or run it in its folder and store it."""
        file = self.results / f"{name}.json"
        if file.exists():
            return Result(**json.loads(file.read_text()))
        result = run(self.trials / name)
        write(file, json.dumps(asdict(result), indent=1))
        return result


def write(file: Path, text: str) -> None:
    """Write a file that appears whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(text.encode())
