"""Files of an anneal's candidates. A command that was killed continues there.

settings.yaml model.yaml    configuration of all runs, and their model
candidates/00.yaml …        mixtures, one for each run: candidates × seeds
anneal.json                 the request and its runs; written when all of these are there
runs/00 …                   the runs
scores.json anneal.html     the ranking, for programs (`mixtures search`) and for people
logs/ slurm.sh              of a Slurm array
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ...console import config as reader
from ...trainer.folders import folder as files
from ...trainer.folders.request_folder import RequestFolder, write
from .prepare import Prepared

SETTINGS = "settings.yaml"
"""The configuration of all runs. It is no run.yaml: that marks the folder of a run."""


@dataclass(frozen=True)
class Entry:
    """A run of a candidate, as the request's file lists it."""

    number: int
    name: str
    seed: int
    plan: str
    """Hash of the plan."""
    tokens: int


class AnnealFolder(RequestFolder):
    def __init__(self, root: str | Path) -> None:
        before = ("candidates", SETTINGS, files.MODEL, files.LOGS)
        super().__init__(root, "anneal", before)
        self.settings = self.root / SETTINGS
        self.model = self.root / files.MODEL
        self.scores = self.root / "scores.json"
        self.page = self.root / "anneal.html"
        self.logs = self.root / files.LOGS
        self.slurm = self.root / files.SLURM_SCRIPT

    def mixture(self, number: int) -> Path:
        return self.root / "candidates" / f"{number:02}.yaml"

    def run_of(self, number: int) -> files.RunFolder:
        return files.RunFolder(self.root / "runs" / f"{number:02}")

    def begin(self, prepared: Prepared) -> list[Entry]:
        """Write the candidates, unless the folder has this request. Raise if it has another."""
        stored = self.stored(prepared.request)
        if stored is not None:
            return [Entry(**entry) for entry in stored["runs"]]
        write(self.settings, reader.dump(prepared.run))
        write(self.model, reader.dump(prepared.model))
        entries = []
        for number, each in enumerate(prepared.candidates):
            write(self.mixture(number), reader.dump(each.mixture))
            tokens = each.plan.last_token - each.plan.first_token
            entries.append(Entry(number, each.name, each.seed, each.plan.hash, tokens))
        self.store(prepared.request, runs=[asdict(entry) for entry in entries])
        return entries
