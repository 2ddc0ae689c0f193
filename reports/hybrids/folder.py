"""Read and write a comparison's folder: a killed command continues from its files.

settings.yaml mixture.yaml models/NAME.yaml    configuration and rows of all runs; their models
hybrids.json                the request; written after the files above
runs/NAME-seed-1 …          the runs
peers/NAME                  ledger.jsonl, evaluations.jsonl and metrics.jsonl of programs that are
                            not headrace, and were trained on the same rows
results.json hybrids.html   results, for programs and for people
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console import config as yaml_config
from ...trainer.folders import folder as files
from ...trainer.folders.request_folder import RequestFolder, write

if TYPE_CHECKING:
    from .prepare import PreparedComparison

SETTINGS, MODELS = "settings.yaml", "models"


@dataclass(frozen=True)
class ComparedRun:
    """A run of the comparison."""

    model: str
    seed: int
    """Seed of the initial weights."""

    @property
    def name(self) -> str:
        return f"{self.model}-seed-{self.seed}"


class ComparisonFolder(RequestFolder):
    def __init__(self, root: str | Path) -> None:
        super().__init__(root, "hybrids", (MODELS, SETTINGS, files.MIXTURE))
        self.settings = self.root / SETTINGS
        self.mixture = self.root / files.MIXTURE
        self.results = self.root / "results.json"
        self.page = self.root / "hybrids.html"

    def model_file(self, name: str) -> Path:
        return self.root / MODELS / f"{name}.yaml"

    def run_folder(self, entry: ComparedRun) -> files.RunFolder:
        return files.RunFolder(self.root / "runs" / entry.name)

    def peers(self) -> Mapping[str, Path]:
        """Return the folders of peers by name."""
        return {path.name: path for path in sorted((self.root / "peers").glob("*"))}

    def begin(self, prepared: PreparedComparison) -> None:
        """Write the request and its files, unless the folder has this request. Raise if it has a
        different request."""
        if self.read_stored(prepared.request) is not None:
            return
        write(self.settings, yaml_config.dump(prepared.run))
        write(self.mixture, yaml_config.dump(prepared.mixture))
        for name, model in prepared.models.items():
            write(self.model_file(name), yaml_config.dump(model))
        self.store(prepared.request)


def write_results(folder: ComparisonFolder, results: Mapping[str, Any], page: str) -> None:
    from ...dataplane.storage.sealed import seal

    write(folder.results, seal(dict(results), indent=1).decode())
    write(folder.page, page)
