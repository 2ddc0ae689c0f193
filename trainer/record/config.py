"""Configuration of a run's loggers, and of what skips a step or ends the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..loop.guard import Action, Guard


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Loggers of a run, and conditions that skip a step or end the run."""

    log_seconds: float = 5.0
    """Least seconds between two steps on the terminal."""
    tensorboard: bool = True
    """Write TensorBoard's files to the run's folder."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the same curves (extra `wandb`)."""
    mlflow: str | None = None
    """Tracking URI of MLflow, or a folder, that gets the same curves (extra `mlflow`)."""
    not_finite: Action = "stop"
    """Action after a step whose gradients are not finite; such a step is never applied. stop: end
    the run; skip: continue; rollback: continue with the weights of the newest checkpoint."""
    spike: Action | Literal["none"] = "none"
    """Action after a loss spike; none: apply the step like any other."""
    spike_bound: float = 10.0
    """Deviations above the median of the losses before it that make a loss a spike."""
    spike_window: int = 100
    """Losses that a loss is compared with; no loss is a spike before a quarter of them exist."""
    rollbacks: int = 3
    """Most rollbacks to one checkpoint; the next ends the run."""
    stall_seconds: float = 1800.0
    """Seconds without a new step, or a new part of the start, on any rank after which the run ends;
    0: never."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU; known GPUs need none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("log_seconds", 0),
            ("stall_seconds", 0),
            ("spike_bound", 0),
            ("spike_window", 4),
            ("rollbacks", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def guard(self) -> Guard:
        return Guard(
            not_finite=self.not_finite,
            spike=self.spike,
            bound=self.spike_bound,
            window=self.spike_window,
            rollbacks=self.rollbacks,
        )
