"""Write a Savanna configuration as model.yaml, mixture.yaml and run.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....console import config as reader
from ....console.errors import ConfigProblems
from ...config.config import ModelConfig, load_model_config
from ..files import stage_folder
from .model import convert_model
from .run import convert_mixture, convert_run
from .settings import SavannaSettings, read_settings

MODEL, MIXTURE, RUN = "model.yaml", "mixture.yaml", "run.yaml"


@dataclass(frozen=True)
class ConversionReport:
    """Configuration keys: converted, set elsewhere, or not expressible."""

    used: tuple[str, ...]
    elsewhere: tuple[str, ...]
    missing: tuple[str, ...]
    """Keys that headrace cannot express, each with its reason."""


def convert_settings(
    files: Sequence[str | Path], folder: str | Path, *, data_parallel: int | None = None
) -> ConversionReport:
    """Write the new folder, which appears when it is complete."""
    settings = read_settings(files)
    model = check_model(settings)
    run, missing = convert_run(settings)
    mixture = convert_mixture(settings, data_parallel)
    fates = list(settings.fates())
    report = ConversionReport(
        used=tuple(f"{key}: {place}" for key, fate, place in fates if fate == "used"),
        elsewhere=tuple(f"{key}: {place}" for key, fate, place in fates if fate == "elsewhere"),
        missing=(*(f"{key}: {why}" for key, fate, why in fates if fate == "missing"), *missing),
    )
    with stage_folder(Path(folder)) as partial:
        for name, data in ((MODEL, model), (MIXTURE, mixture), (RUN, run)):
            text = reader.dump(data)
            if name == RUN:
                text = _comments(settings, report) + text
            (partial / name).write_text(text, encoding="utf-8")
        load_model_config(partial / MODEL)
    return report


def check_model(settings: SavannaSettings) -> ModelConfig:
    """Return the model; raise ConfigError for what makes no valid one."""
    try:
        return convert_model(settings)
    except ConfigProblems as error:
        raise settings.refusal(*error.problems) from None


def _comments(settings: SavannaSettings, report: ConversionReport) -> str:
    """Return run.yaml's header comments: the sources, and the keys that are not expressed."""
    lines = [f"From Savanna: {settings.source}."]
    if report.missing:
        lines += ["Not expressible:", *(f"  {line}" for line in report.missing)]
    if report.elsewhere:
        lines += ["Set elsewhere, or not needed:", *(f"  {line}" for line in report.elsewhere)]
    return "".join(f"# {line}\n" for line in lines)
