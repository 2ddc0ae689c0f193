"""When a run saves, and what it keeps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 500
    """Steps between two checkpoints. The last step and an interruption save as well."""
    keep_last: int = 3
    """The newest checkpoints that stay."""
    keep_every: int | None = None
    """Checkpoints of steps that this divides stay for good."""
    keep_abandoned: int = 3
    """Checkpoints that a run passed over (--fallback), which stay to be looked at: the latest."""
    url: str | None = None
    """Where the files of checkpoints go (s3://…, or what else fsspec opens); the run's folder keeps
    a record of each. Left out: they stay in the run's folder."""
    background: bool = True
    """Write while the next steps run; the run waits only for a copy to host memory."""

    def __post_init__(self) -> None:
        for name in ("every", "keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.keep_abandoned < 0:
            raise ValueError(f"keep_abandoned must be at least 0, not {self.keep_abandoned}")
        if self.url is not None and "://" not in self.url:
            raise ValueError(f"url must name a store, as in s3://bucket/folder, not {self.url!r}")


def is_planned(step: int, every: int, edges: Collection[int]) -> bool:
    """Whether a run saves at this step in any case: an interruption saves wherever it comes."""
    return step % every == 0 or step in edges
