"""Read and write an anneal's folder: a killed command continues from its files.

settings.yaml model.yaml    configuration of all runs, and their model
candidates/00.yaml …        a mixture file for each run: candidates × seeds
anneal.json                 the request and its runs; written after all files above
runs/00 …                   the runs
scores.json anneal.html     the ranking, for programs (`mixtures search`) and for people
logs/ slurm.sh              of a Slurm array
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ...console import config as yaml_config
from ...trainer.folders import folder as files
from ...trainer.folders.request_folder import RequestFolder, write
from .prepare import PreparedAnneal

SETTINGS = "settings.yaml"
"""All runs' configuration. It is not called run.yaml, which marks a run's folder."""


@dataclass(frozen=True)
class Entry:
    """A candidate's run, as anneal.json lists it."""

    number: int
    name: str
    seed: int
    plan: str
    """Plan hash."""
    tokens: int


class AnnealFolder(RequestFolder):
    def __init__(self, root: str | Path) -> None:
        written_before_request = ("candidates", SETTINGS, files.MODEL, files.LOGS)
        super().__init__(root, "anneal", written_before_request)
        self.settings = self.root / SETTINGS
        self.model = self.root / files.MODEL
        self.scores = self.root / "scores.json"
        self.page = self.root / "anneal.html"
        self.logs = self.root / files.LOGS
        self.slurm = self.root / files.SLURM_SCRIPT

    def mixture_file(self, number: int) -> Path:
        return self.root / "candidates" / f"{number:02}.yaml"

    def run_folder(self, number: int) -> files.RunFolder:
        return files.RunFolder(self.root / "runs" / f"{number:02}")

    def begin(self, prepared: PreparedAnneal) -> list[Entry]:
        """Write the candidates, unless the folder has this request. Raise if it has a different
        request."""
        stored = self.read_stored(prepared.request)
        if stored is not None:
            return [Entry(**entry) for entry in stored["runs"]]
        write(self.settings, yaml_config.dump(prepared.run))
        write(self.model, yaml_config.dump(prepared.model))
        entries = []
        for number, candidate in enumerate(prepared.candidates):
            write(self.mixture_file(number), yaml_config.dump(candidate.mixture))
            plan = candidate.plan
            num_tokens = plan.end_token - plan.first_token
            identity = plan.learnt_hash
            entries.append(Entry(number, candidate.name, candidate.seed, identity, num_tokens))
        self.store(prepared.request, runs=[asdict(entry) for entry in entries])
        return entries
