"""Files of a tune: request, candidates and finished trials. A killed tune continues there.

tune.json                  the request, written after all candidates
candidates/00.yaml …       layout plans, the best predicted first; then probes
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
from ...dataplane.storage.sealed import seal, unseal
from ...trainer.folders.request_folder import RequestFolder, write
from ...trainer.run.layout_plan import LayoutPlan, load_plan
from .trial import TrialResult


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
        """Return the stored candidates of this request, or search for them."""
        stored = self.read_stored(request)
        if stored is not None:
            return [load_plan(self.candidate(n)) for n in range(stored["candidates"])]
        plans = list(search())
        for number, plan in enumerate(plans):
            self.add(number, plan)
        self.store(request, candidates=len(plans))
        return plans

    def candidate(self, number: int) -> Path:
        return self.candidates / f"{number:02}.yaml"

    def add(self, number: int, plan: LayoutPlan) -> None:
        """Write a trial's plan."""
        write(self.candidate(number), reader.dump(plan))

    def once(self, name: str, run: Callable[[Path], TrialResult]) -> TrialResult:
        """Return a trial's stored result, or run the trial in its folder and store its result."""
        file = self.results / f"{name}.json"
        if file.exists():
            hint = "remove the file, and run the same command again: the trial is run again"
            return TrialResult(**unseal(str(file), file.read_bytes(), hint=hint))
        result = run(self.trials / name)
        write(file, seal(asdict(result), indent=1).decode())
        return result
