"""Configuration of scores during training."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from ...console import config as reader
from ...console.errors import MissingError
from ..folders.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class ScoresConfig:
    """Tasks of lm-evaluation-harness, scored at checkpoints."""

    tasks: tuple[str, ...]
    """Names of tasks, groups or tags."""
    every: int = 500
    """Steps between two checkpoints that are scored: a multiple of checkpoints.every. The last
    checkpoint is scored too."""
    include_path: str | None = None
    """Folder with YAML files of more tasks."""
    limit: int | None = None
    """Most documents of each task. Default: all."""
    num_fewshot: int | None = None
    """Examples before a question. Default: what the task says."""
    max_length: int | None = None
    """Longest context in tokens. Default: the run's longest row."""
    batch_tokens: int = 16384
    """Most tokens of a batch, with its padding."""
    ema: bool = False
    """Score the moving average of the weights, which optimizer.ema keeps."""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("tasks is empty")
        for key in ("every", "limit", "max_length", "batch_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot must be at least 0, not {self.num_fewshot}")


def read_run_config(folder: RunFolder) -> ScoresConfig | None:
    """Read the key `scores` from run.yaml; None if the run scores no checkpoints."""
    data, _ = reader.read_yaml(folder.run)
    settings = data.get("scores")
    if settings is None:
        return None
    return reader.build(ScoresConfig, settings, source=str(folder.run))


def check_installed(feature: str) -> None:
    """Raise if the extra lm-evaluation-harness, which `feature` needs, is not installed."""
    if find_spec("lm_eval") is None:
        raise MissingError(
            f"{feature} runs tasks of lm-evaluation-harness, and lm_eval is not installed",
            hint="pip install 'headrace[eval]'",
        )
