"""Files of a tune: its request, candidates and finished trials. A killed tune continues there.

tune.json                  the request; written when all candidates are there
candidates/00.yaml …       layout plans, the best predicted first; then those of probes
results/00-0.json …        finished trials, by candidate and round
trials/00-0/ …             the runs
plan.yaml hardware.yaml    the best plan, and the corrected figures
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...console import config as reader
from ...dataplane.storage.sealed import sealed, unsealed
from ...trainer.folders.request_folder import RequestFolder, write
from ...trainer.run.layout_plan import LayoutPlan, load_plan
from .trial import Result


class TuneFolder(RequestFolder):
    def __init__(self, root: str | Path) -> None:
        super().__init__(root, "tune", before=("candidates",))
        self.candidates = self.root / "candidates"
        self.results = self.root / "results"
        self.trials = self.root / "trials"
        self.plan = self.root / "plan.yaml"
        self.hardware = self.root / "hardware.yaml"

    def open(
        self, request: Mapping[str, Any], search: Callable[[], Sequence[LayoutPlan]]
    ) -> list[LayoutPlan]:
        """Return the candidates of this request: those that are stored, or those of `search`."""
        stored = self.stored(request)
        if stored is not None:
            return [load_plan(self.candidate(n)) for n in range(stored["candidates"])]
        found = list(search())
        for number, plan in enumerate(found):
            self.add(number, plan)
        self.store(request, candidates=len(found))
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
            hint = "remove the file, and run the same command again: the trial is run again"
            return Result(**unsealed(str(file), file.read_bytes(), hint=hint))
        result = run(self.trials / name)
        write(file, sealed(asdict(result), indent=1).decode())
        return result
