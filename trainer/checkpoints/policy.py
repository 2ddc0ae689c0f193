"""Configure when a run saves, and which checkpoints it keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run saves, and which checkpoints it keeps."""

    every: int = 500
    """Steps between two checkpoints. The last step and an interruption are saved too."""
    keep_last: int = 3
    """Number of the newest checkpoints to keep."""
    keep_every: int | None = None
    """Checkpoints of steps that this divides are never deleted."""
    keep_abandoned: int = 3
    """Number of the latest abandoned checkpoints (--fallback), and of the latest tails of each
    record (lines that a start after a kill cuts: `ledger.after-500.jsonl`), to keep for
    inspection."""
    url: str | None = None
    """Store for the files of checkpoints (s3://…, or any URL that fsspec opens); the run's folder
    keeps a record of each. Default: the run's folder."""
    background: bool = True
    """Write while the next steps run; the step waits only for a copy to host memory."""

    def __post_init__(self) -> None:
        for key in ("every", "keep_last", "keep_every"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if self.keep_abandoned < 0:
            raise ValueError(f"keep_abandoned must be at least 0, not {self.keep_abandoned}")
        if self.url is not None and "://" not in self.url:
            raise ValueError(f"url must name a store, as in s3://bucket/folder, not {self.url!r}")


def is_planned(step: int, every: int, edges: Collection[int]) -> bool:
    """Return whether a run saves at this step without an interruption."""
    return step % every == 0 or step in edges
