"""Which loggers a run has, and when the run is ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..loop.guard import Action, Guard


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """What is shown of a run, and what ends it."""

    log_seconds: float = 5.0
    """Seconds between two lines on the terminal, at least."""
    tensorboard: bool = True
    """Write TensorBoard's files as well."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the same curves (extra `wandb`)."""
    mlflow: str | None = None
    """Tracking URI of MLflow, or a folder, that gets the same curves (extra `mlflow`)."""
    not_finite: Action = "stop"
    """A step whose gradients are not finite changes nothing. stop: the run ends; skip: it goes on;
    rollback: it goes on with the weights of the newest checkpoint."""
    spike: Action | Literal["none"] = "none"
    """The same for a step whose loss is a spike; none: it is applied like any other."""
    spike_bound: float = 10.0
    """A loss is a spike above the median of those before it by so many of their deviations."""
    spike_window: int = 100
    """How many losses before it count; the first quarter of a window is not looked at."""
    rollbacks: int = 3
    """How often a run may go back to one checkpoint before it ends."""
    stall_seconds: float = 1800.0
    """End the run when no process has begun another step, or part of the start, for so long; 0:
    never."""
    peak_flops: float | None = None
    """Of one device, for MFU; known GPUs need none."""

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
