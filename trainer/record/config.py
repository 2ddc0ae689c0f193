"""Configure a run's loggers, and the conditions that skip a step or end the run."""

from __future__ import annotations

from dataclasses import dataclass

from ...dataplane.storage import storage
from ..loop.guard import Guard


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Guard):
    """Loggers, and conditions that skip a step or end the run."""

    log_seconds: float = 5.0
    """Least seconds between two steps on the terminal."""
    tensorboard: bool = True
    """Write TensorBoard's files to the run's folder."""
    wandb: str | None = None
    """Project of Weights & Biases that gets the same curves (extra `wandb`): one page for a run's
    folder, which each start continues."""
    mlflow: str | None = None
    """Tracking URI of MLflow, or a folder, that gets the same curves (extra `mlflow`), in one
    request for each step. The experiment is `headrace`, or MLFLOW_EXPERIMENT_NAME. Steps that run
    again after a crash appear twice there."""
    mirror: str | None = None
    """URL in a store. The run's records are copied below it, into a folder of the run's name, while
    it trains: `trainer board URL` shows the run from any machine."""
    layers: int | None = None
    """Record signals by layer in every so many steps, in `signals.jsonl` with the ranks' times:
    weight_norm (before the step), gradient_norm (before clipping), update_norm, activation_rms (of
    the residual stream after the layer, without padding rows), and of experts expert_max (tokens of
    the fullest one, in multiples of the mean) and expert_entropy (of their shares of the tokens: 1
    if they are equal, 0 if one gets all). Such a step holds a second copy of the rank's masters."""
    noise: int | None = None
    """Measure the gradient noise scale, tr(Σ) / |G|², in every so many steps, from the squared
    norms of two gradients: the step's, and that of every rank's first micro-batch (of a single one
    half of its rows, or every other rank), which costs one more micro-batch. `noise_scale` is the
    ratio of two averages, `noise_trace` and `noise_square`, at which 0.95 stays in each measured
    step; a resume goes on with them. It is null until both are above 0. A step of one row is
    refused."""
    straggler: float = 0.2
    """Part of a step for which the others must wait for a rank, in `straggler_steps` steps in a
    row, for a warning that names it; 0: ranks are not timed."""
    straggler_steps: int = 20
    """Steps in a row after which a slow rank is named, and after which it counts as mended."""
    stall_seconds: float = 1800.0
    """Seconds without a new step, or a new part of the start, on any rank after which the run ends;
    0: never."""
    join_seconds: float = 600.0
    """Seconds that ranks started by another launcher (srun) wait for each other at the start."""
    peak_flops: float | None = None
    """Peak bf16 FLOP/s of one device, for MFU; known GPUs need none. FP8 has twice the peak."""

    @property
    def signals(self) -> bool:
        """Whether some steps record further signals."""
        return self.layers is not None or self.noise is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("log_seconds", "stall_seconds"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must be at least 0, not {getattr(self, key)}")
        if not 0 <= self.straggler < 1:
            raise ValueError(
                f"straggler is a part of a step: it must be from 0 to below 1, not {self.straggler}"
            )
        for key in ("layers", "noise", "straggler_steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if self.mirror is not None and storage.is_local(self.mirror):
            raise ValueError(
                f"mirror must be a URL of a store, such as s3://bucket/runs, not {self.mirror}: "
                "`trainer board` reads the run's folder itself"
            )
        if not self.join_seconds > 0:
            raise ValueError(f"join_seconds must be above 0, not {self.join_seconds}")
