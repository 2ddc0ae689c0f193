"""`trainer clean`: delete checkpoints outside a run's policy, and the tails that starts after a
kill have cut from records."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...console.errors import CheckpointError
from ...dataplane.runlog import writer as lines
from ..folders.folder import RunFolder
from . import store
from .policy import CheckpointConfig


@dataclass(frozen=True)
class Outdated:
    """A checkpoint outside the policy, or a record's tail."""

    kind: Literal["checkpoint", "tail"]
    path: str
    size: int | None
    """Bytes in its files; None if its manifest cannot be read."""


def clean(
    folder: RunFolder, config: CheckpointConfig, keep: Collection[int], *, dry_run: bool
) -> list[Outdated]:
    """Delete outdated checkpoints, the records' tails, and partial files from killed starts. Return
    the checkpoints and tails. The run must be stopped, except in a dry run, which deletes
    nothing."""
    with contextlib.nullcontext() if dry_run else folder.locked():
        tails = [tail for record in folder.records for tail in lines.list_tails(record)]
        outdated = [
            *(_describe(path) for path in store.find_outdated(folder.checkpoints, config, keep)),
            *(Outdated("tail", str(tail), tail.stat().st_size) for tail in tails),
        ]
        if not dry_run:
            folder.clear()
            store.clean(folder.checkpoints)
            store.prune(folder.checkpoints, config, keep)
            for tail in tails:
                tail.unlink()
        return outdated


def _describe(checkpoint: Path) -> Outdated:
    size = None
    with contextlib.suppress(CheckpointError):
        size = sum(file.size for file in store.read_manifest(str(checkpoint)).files)
    return Outdated("checkpoint", str(checkpoint), size)
