"""When a run saves, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 500
    """Steps between two checkpoints. The last step and an interruption save as well."""
    keep_last: int = 3
    """The newest checkpoints that stay."""
    keep_every: int | None = None
    """Checkpoints of steps that this divides stay for good."""
    background: bool = True
    """Write while the next steps run; the run waits only for a copy to host memory."""

    def __post_init__(self) -> None:
        for name in ("every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
