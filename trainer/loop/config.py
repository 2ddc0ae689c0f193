"""Settings for reading rows and for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ...console.config import Size


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings for reading rows. None of these keys changes which rows are read."""

    workers: int = 0
    """Groups of rows that a thread of each rank reads ahead; 0 reads within the step."""
    cache: str | None = None
    """Folder that caches data from object storage; all processes and runs on a machine may share
    it. Default: headrace in the user's cache folder."""
    cache_bytes: Annotated[int, Size()] = 64 << 30
    """Maximum size of the cache, such as 64GiB. It should hold four windows per source, by default
    at most 512 MiB each: with fewer than two, chunks are fetched more than once; with fewer than
    four, by more requests."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"workers must be at least 0, not {self.workers}")
        if self.cache_bytes < 1:
            raise ValueError(f"cache_bytes must be at least 1, not {self.cache_bytes}")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The loss on rows that no step trains on."""

    every: int = 500
    """Steps between two evaluations. The end of each phase is evaluated too."""
    rows: int = 64
    """Maximum rows per source."""
    seq_len: int | None = None
    """Tokens per row. Default: the plan's shortest sequence length."""
    split: str = "val"
    """Name that `tokenize build --split` gave to the held-out split."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Datasets by name. Default: the split beside each `…/train` of the mixture, with the same view
    or packing; where the split has no such view, all of its documents."""

    def __post_init__(self) -> None:
        for key in ("every", "rows", "seq_len"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")


def held_out_digest(config: EvaluateConfig) -> str:
    """Digest the settings that select held-out rows.

    The digest names the plan's file, so the rows stay the same unless these settings change.
    """
    settings = [config.rows, config.seq_len, config.split, sorted(config.sources.items())]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
